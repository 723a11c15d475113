"""`TorchEstimator` and `LightningEstimator` on Spark: pipelines, tuning, saving, and refusals."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession

from sparkdl import LightningEstimator, TorchEstimator, TorchModel
from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.ml.estimators import torch_train, training
from tests.doubles import sessions
from tests.doubles.lazy import Lazy
from tests.doubles.sessions import SparkSessions
from tests.ml.torch_fits import adam, line, net, still
from tests.ml.torch_models import two_in_two_out

torch: Any = Lazy("torch")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("spark_ml"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def points(spark_sessions: SparkSessions) -> DataFrame:
    """Columns `a`, `b`, `label` (double, 0 to 2), `held`, `sample_weight`."""
    spark: SparkSession = spark_sessions.get(sessions.ML)
    rows = spark.range(300, numPartitions=3).selectExpr("id", "id % 3 as c", "id % 7 / 7 as n")
    return rows.selectExpr(
        "double(if(c = 0, n, 2 - n)) as a",
        "double(if(c = 1, n, 2 + n)) as b",
        "double(c) as label",
        "id % 5 = 0 as held",
        "1.0d + id % 2 as sample_weight",
    )


def heavy() -> Any:
    """Make a classifier of 16 MB, more than a message holds."""
    module, ballast = classifier(), torch.nn.Parameter(torch.arange(4e6), requires_grad=False)
    module.register_parameter("ballast", ballast)
    return module


def classifier() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))


def assembled(*estimators: Any) -> Pipeline:
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    return Pipeline(stages=[assembler, *estimators])


def estimator(**params: Any) -> Any:
    given: dict[str, Any] = {"loss": "CrossEntropyLoss", "optimizer": adam, "seed": 1}
    make = params.pop("make", classifier)
    return TorchEstimator(make, **{**given, "batch_size": 16, "epochs": 6, **params})


@pytest.mark.usefixtures("as_files")
def test_two_nodes_fit_a_classifier_that_evaluators_take_and_that_is_saved(
    points: DataFrame, tmp_path: Path
) -> None:
    stage = estimator(
        make=heavy,
        num_workers=2,
        metrics={"acc": "accuracy"},
        validation_indicator_col="held",
        weight_col="sample_weight",
        optimizer=partial(torch.optim.AdamW, lr=0.05),
        trainer_args={"gradient_clip_val": 5.0},
    )
    stage.save(str(tmp_path / "estimator"))
    loaded: Any = TorchEstimator.load(str(tmp_path / "estimator"))
    assert loaded.getOptimizer().func is torch.optim.AdamW
    fitted = assembled(loaded).fit(points)
    model: Any = fitted.stages[-1]
    assert isinstance(model, TorchModel)
    assert sorted(model.history) == ["acc", "loss", "val_acc", "val_loss"]
    assert model.history["val_acc"][-1] > 0.9
    assert model.summary.feed is not None
    assert model.summary.feed.rows_used == 6 * 240
    fitted.save(str(tmp_path / "pipeline"))
    again: Any = PipelineModel.load(str(tmp_path / "pipeline"))
    assert again.stages[-1].summary == model.summary
    scored = again.transform(points).cache()
    assert scored.dtypes[-2:] == [("probability", "vector"), ("prediction", "double")]
    log_loss: Any = MulticlassClassificationEvaluator().setMetricName("logLoss")  # type: ignore[arg-type]
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored) > 0.9
    assert log_loss.evaluate(scored) < 0.7
    module = again.stages[-1].getModel()
    assert torch.equal(module.ballast, torch.arange(4e6))
    (row, *_) = scored.take(1)
    with torch.no_grad():
        logits = module(torch.tensor(row.features.toArray()[None]).float())[0]
    assert row.probability.toArray() == pytest.approx(logits.softmax(0).numpy(), abs=1e-5)
    assert row.prediction == float(logits.argmax())
    scored.unpersist()


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Spark's pool
def test_spark_tunes_it_with_two_fits_at_once(points: DataFrame) -> None:
    stage = estimator(epochs=4)
    grid = ParamGridBuilder().addGrid(stage.optimizer, [still, adam])
    search: Any = CrossValidator(
        estimator=assembled(stage),
        estimatorParamMaps=grid.build(),
        evaluator=MulticlassClassificationEvaluator(metricName="accuracy"),
        numFolds=2,
        parallelism=2,
        seed=1,
    )
    tuned = search.fit(points)
    gc.collect()  # Spark leaves a pool of threads to it
    assert tuned.avgMetrics[1] > tuned.avgMetrics[0]
    assert tuned.transform(points).dtypes[-1] == ("prediction", "double")


def locked() -> Any:
    """Make a module that holds what cannot be pickled."""
    module = torch.nn.Linear(2, 2)
    module.lock = threading.Lock()
    return module


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TorchEstimator(net, gone=1), "TorchEstimator has no parameter 'gone'"),
        (
            lambda: TorchEstimator(locked()),
            "Linear cannot be pickled: .*Give a function that makes",
        ),
        (lambda: TorchEstimator(7), "model is a int; give a torch.nn.Module or a function"),
        (lambda: TorchEstimator(net, callbacks=[7]), "give a list of the"),
    ],
)
def test_what_cannot_work_is_refused_at_once(make: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"loss": None}, "TorchEstimator has no loss: set loss="),
        ({"loss": "MSELos"}, "loss: PyTorch has no 'MSELos'; did you mean 'MSELoss'"),
        ({"label_col": "labels"}, "no column 'labels'.*did you mean 'label'"),
        ({"features_col": "text"}, "column 'text' is of type string, which cannot feed"),
        ({"input_shapes": {"x": [1]}}, "input_shapes names 'x': must name columns .* are features"),
        ({"output_types": {"s": "double"}}, "output_types names 's': must name .* prediction"),
        ({"features_col": "sample_weight"}, "is called 'sample_weight'.*rename it"),
        ({"num_workers": 301}, "300 rows to train on: at least 301"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_nodes_start(
    points: DataFrame, monkeypatch: pytest.MonkeyPatch, params: Any, match: str
) -> None:
    monkeypatch.setattr(training, "launch", None)
    rows = points.selectExpr("array(a, b) as features", "label", "'a' as text", "sample_weight")
    with pytest.raises(ConfigError, match=match):
        estimator(**params).fit(rows)


def test_columns_go_by_place_and_ambiguous_ones_are_refused(points: DataFrame) -> None:
    odd = points.select("a", "b", "label", "a", "held").toDF("x.y", "q`r", "Z", "twice", "twice")
    columns = ("q`r", "Z", "x.y")
    kind: Any = training.Training
    fit = partial(kind, net, None, 1, 1, validation_col=None)
    rows, _ = fit(columns=columns).rows(odd)
    assert rows.columns == [*columns]
    first = rows.first()
    assert first is not None
    assert first["Z"] in (0.0, 1.0, 2.0)
    both = odd.toDF("x", "X", "label", "y", "y")
    for frame, names in ((odd, ("twice",)), (both, ("x", "X"))):
        with pytest.raises(ConfigError, match=f"has several columns '{names[0]}'"):
            fit(columns=names).rows(frame)
    rows, _ = fit(columns=("x",)).rows(both)
    assert rows.columns == ["x"], "as no column that is fed has its name"


def test_module_says_what_it_takes(points: DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "launch", None)
    fit: Any = partial(TorchEstimator, two_in_two_out(), loss="MSELoss")
    with pytest.raises(ConfigError, match="has the inputs left, right, and input_mapping="):
        fit(features_col="a").fit(points)
    with pytest.raises(
        ConfigError, match="trainer_args must leave out max_epochs=3: set epochs of the estimator"
    ):
        LightningEstimator(line, trainer_args={"max_epochs": 3}, features_col="a").fit(points)
    with (
        monkeypatch.context() as without,
        pytest.raises(FrameworkMissingError, match=r"the model: pip install 'sparkdl\[torch\]'"),
    ):
        without.setattr(torch_train, "find_spec", {}.get)
        TorchEstimator(net, loss="MSELoss", features_col="a").fit(points)
    with pytest.raises(
        ConfigError, match=r"TorchEstimator has no model: give it one, TorchEstimator\(model"
    ):
        TorchEstimator(loss="MSELoss").fit(points)
