"""What `KerasEstimator` cannot train is refused by name, before there are nodes."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators import training
from sparkdl.ml.estimators.keras_estimator import KerasEstimator
from tests.doubles import sessions
from tests.doubles.sessions import SparkSessions
from tests.ml.models import WIDTH, network

pytestmark = [pytest.mark.tensorflow, pytest.mark.usefixtures("spark_ml"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def frame(spark_sessions: SparkSessions) -> DataFrame:
    """Six rows: what is right, and every column that is not."""
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql import types as t

    rows: list[Any] = [
        ([0.5] * WIDTH, Vectors.dense([0.5] * WIDTH), float(n), "text", {"a": 1.0}, n > 9)
        for n in range(6)
    ]
    array, number = t.ArrayType(t.DoubleType()), t.DoubleType()
    kinds = {
        "good": array, "vector": VectorUDT(), "label": number, "text": t.StringType(),
        "map": t.MapType(t.StringType(), number), "none": t.BooleanType(),
    }  # fmt: skip
    fields = [t.StructField(name, kind) for name, kind in kinds.items()]
    return spark_sessions.get(sessions.ML).createDataFrame(rows, t.StructType(fields))


@pytest.fixture(scope="module")
def model() -> Any:
    return network()


@pytest.fixture(autouse=True)
def no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_args: Any, **_options: Any) -> None:
        raise AssertionError("nodes were started")

    monkeypatch.setattr(training, "launch", launch)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"label_col": "labels"}, "no column 'labels'.*did you mean 'label'"),
        (
            {"label_col": "text"},
            r"column 'text' is of type string, and labels must be .*StringIndexer",
        ),
        ({"weight_col": "text"}, "column 'text' is of type string, and weights must be numbers"),
        ({"features_col": "text"}, "column 'text' is of type string, which cannot feed .*input x"),
        ({"features_col": "map"}, "'map' is of type map<string,double>, and features must be"),
        ({"input_mapping": {"good": "a", "label": "b"}}, "the model has the inputs x, and"),
        ({"validation_indicator_col": "none"}, "0 rows to validate with, by validation_indicator"),
        ({"num_workers": 7}, "6 rows to train on: at least 7 must be there"),
        ({"mode": "jobs", "validation_indicator_col": "none"}, "0 rows to validate with"),
        ({"mode": "jobs", "num_gpus": 1}, "num_gpus cannot be used with mode='jobs'"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name_before_nodes_start(
    frame: DataFrame, model: Any, params: Any, match: str
) -> None:
    params = {"features_col": "good", **params}
    with pytest.raises(ConfigError, match=match):
        KerasEstimator(model, **params).fit(frame)


@pytest.mark.parametrize("column", ["good", "vector"])
def test_what_can_be_trained_reaches_the_nodes(frame: DataFrame, model: Any, column: str) -> None:
    with pytest.raises(AssertionError, match="nodes were started"):
        KerasEstimator(model, features_col=column, num_workers=6).fit(frame)


def test_model_of_several_inputs_is_told_which_columns_feed_them(frame: DataFrame) -> None:
    model = network(a="float32", b="string")
    with pytest.raises(ConfigError, match=r"inputs a, b, and input_mapping=\{'good': ''\} must"):
        KerasEstimator(model, features_col="good").fit(frame)
    mapping = {"text": "a", "label": "b"}
    with pytest.raises(ConfigError, match=r"'text' is of type string, which cannot feed .*input a"):
        KerasEstimator(model, input_mapping=mapping).fit(frame)
    mapping = {"label": "a", "text": "b"}
    with pytest.raises(AssertionError, match="nodes were started"):
        KerasEstimator(model, input_mapping=mapping).fit(frame)


def test_empty_data_is_an_error_at_once(frame: DataFrame) -> None:
    from sparkdl.ml.estimators.estimator import TFEstimator

    none = frame.where("label < 0")
    with pytest.raises(ConfigError, match="the DataFrame has 0 rows to train on: at least 1"):
        KerasEstimator(network(), features_col="good").fit(none)
    with pytest.raises(ConfigError, match="the DataFrame has 0 rows to train on"):
        TFEstimator(print, {}).fit(none)
    unmarked = TFEstimator(print, {"validation_indicator_col": "none"})
    with pytest.raises(ConfigError, match="0 rows to validate with, by validation_indicator_col='"):
        unmarked.fit(frame)
