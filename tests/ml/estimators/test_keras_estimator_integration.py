"""`KerasEstimator` on Spark and real data: pipelines, evaluators, saving and loading."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.ml.feature import SQLTransformer
from pyspark.sql import DataFrame, SparkSession, functions as f

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.ml.estimators import keras_estimator, network
from sparkdl.ml.estimators.estimator import launch_options
from sparkdl.ml.estimators.keras_estimator import KerasEstimator
from sparkdl.ml.estimators.keras_train import with_softmax
from sparkdl.ml.model_file import ModelFile
from sparkdl.ml.scoring.keras_objects import save_to
from sparkdl.ml.scoring.model import KerasModel
from sparkdl.ml.scoring.tensorflow import keras_predictor
from tests.doubles import sessions
from tests.doubles.lazy import Lazy
from tests.doubles.sessions import SparkSessions
from tests.ml.train_fns import FEATURES, classifier, halving, read_all

keras: Any = Lazy("keras")
ROWS, EPOCHS = 300, 4
pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(400)]


def scaled() -> Any:
    """Return a layer that Keras does not have."""

    class Scaled(keras.layers.Layer):  # type: ignore[misc]
        factor: Any = np.float32(1)

        def call(self, x: Any) -> Any:
            return self.factor * x

        def save_own_variables(self, store: Any) -> None:
            store["factor"] = self.factor

        def load_own_variables(self, store: Any) -> None:
            self.factor = np.array(store["factor"])

    return Scaled


def two_headed(kind: Any) -> Any:
    """Make a model of own parts: two numbers in, their sum and difference out, both times two."""
    layer = kind()
    layer.factor = np.float32(2)  # which is no weight
    given = keras.Input((2,), name="x")
    x = layer(given)
    heads = [keras.layers.Dense(1, use_bias=False, name=name)(x) for name in ("total", "gap")]
    return keras.Model(given, heads)


@dataclass(frozen=True)
class Trained:
    """A pipeline that was trained on two workers.

    Attributes:
        rows: the right ones among those that it was trained on, in one partition.
        folder: with what its callbacks have written, and the saved pipeline.
    """

    pipeline: PipelineModel
    rows: DataFrame
    folder: Path

    @property
    def model(self) -> Any:
        return self.pipeline.stages[-1]


@pytest.fixture(scope="module")
def trained(spark_sessions: SparkSessions, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train once, with all that an estimator can be given, for the tests that look at it."""

    class OwnLoss(keras.losses.Loss):  # type: ignore[misc]
        def call(self, y: Any, p: Any) -> Any:
            return (keras.ops.reshape(y, (-1, 1)) - p) ** 2

    folder = tmp_path_factory.mktemp("trained")
    numbers = spark_sessions.get(sessions.ML).range(ROWS, numPartitions=1)
    numbers = numbers.selectExpr("rand(1) as a", "rand(2) as c", "id % 5 = 0 as held", "1d as w")
    labels = "2 * (a + c) as total", "2 * (a - c) as gap"
    rows = numbers.selectExpr("float(a) as a", "c", *labels, "held", "w")
    wrong = numbers.selectExpr("float(a) as a", "c", "-9d as total", "9d as gap", "held", "0d as w")
    kind = scaled()
    estimator = KerasEstimator(
        partial(two_headed, kind),
        custom_objects={"Scaled": kind},
        callbacks=partial(halving, folder / "notes"),
        loss=[OwnLoss(), "mse"],
        loss_weights=[1.0, 0.5],
        metrics=[[keras.metrics.MeanAbsoluteError()], ["mae"]],
        optimizer=keras.optimizers.SGD(1.0),
        features_col=["a", "b"],
        label_col=["total", "gap"],
        validation_indicator_col="held",
        weight_col="w",
        num_workers=2,
        batch_size=12,
        epochs=30,
        seed=7,
        checkpoint_dir=str(folder / "checkpoints"),
    )
    estimator.save(str(folder / "estimator"))
    loaded = KerasEstimator.load(str(folder / "estimator"))
    named = SQLTransformer(statement="SELECT *, c AS b FROM __THIS__")
    fitted = Pipeline(stages=[named, loaded]).fit(rows.union(wrong))
    model: Any = fitted.stages[-1]
    model.setOutputMapping({"total": "t", "gap": "g"}).setOutputTypes({"t": "double"})
    fitted.save(str(folder / "pipeline"))
    return Trained(fitted, rows, folder)


@pytest.mark.usefixtures("spark_ml")
def test_two_workers_train_in_a_pipeline_as_parameters_and_callbacks_say(trained: Trained) -> None:
    history = trained.model.history
    assert trained.model.summary.feed.rows_used >= EPOCHS * 2 * (ROWS - ROWS // 5)
    names = sorted(history)
    assert {"loss", "val_loss", "total_loss", "gap_loss", "gap_mae"} < set(names)
    assert {len(values) for values in history.values()} == {EPOCHS}, "a callback has ended it"
    lines = [f"{epoch} {0.3 * 0.5**epoch:.4f} {names}" for epoch in range(EPOCHS)]
    notes = (trained.folder / "notes").read_text().splitlines()
    assert sorted(notes) == sorted(2 * lines)  # every node has callbacks of its own
    assert history["val_loss"][-1] < 0.01, "rows of the weight 0 would forbid it"
    weighted = history["total_loss"][-1] + 0.5 * history["gap_loss"][-1]
    assert history["loss"][-1] == pytest.approx(weighted, rel=0.2)  # Keras weighs batches otherwise
    assert not list((trained.folder / "checkpoints").iterdir()), "they are deleted after success"


@pytest.mark.usefixtures("spark_ml")
def test_saved_pipeline_scores_as_the_trained_model_and_has_its_summary(trained: Trained) -> None:
    loaded: Any = PipelineModel.load(str(trained.folder / "pipeline"))
    assert loaded.stages[-1].summary == trained.model.summary
    assert loaded.stages[-1].summary.seconds > 0
    scored = trained.pipeline.transform(trained.rows).cache()
    assert scored.dtypes[-2:] == [("t", "double"), ("g", "array<float>")]
    assert RegressionEvaluator(labelCol="total", predictionCol="t").evaluate(scored) < 0.2
    rows = scored.collect()
    assert loaded.transform(trained.rows).collect() == rows
    given = np.array([(row.a, row.b) for row in rows], np.float32)
    totals, gaps = trained.model.getModel().predict(given, verbose=0)
    assert [row.t for row in rows] == pytest.approx(totals[:, 0], rel=1e-4, abs=1e-5)
    assert [row.g[0] for row in rows] == pytest.approx(gaps[:, 0], rel=1e-4, abs=1e-5)
    scored.unpersist()


@pytest.mark.smoke
def test_null_behind_the_rows_that_are_looked_at_ends_the_training(
    spark_ml: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"framework": "plain"}  # for the feed fails, whoever reads
    monkeypatch.setattr(network, "launch_options", lambda args: launch_options(args) | plain)
    monkeypatch.setattr(keras_estimator, "train", read_all)
    late = spark_ml.range(5000, numPartitions=1).selectExpr(
        f"array_repeat(0.5d, {FEATURES}) as features", "if(id = 4990, null, 1.0d) as label"
    )
    with pytest.raises(FeedTypeError, match=r"column 'label' holds a null.*dropna"):
        KerasEstimator(classifier, loss="mse").fit(late)


class Unpicklable:
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: KerasEstimator(classifier, batchSize=1), "did you mean 'batch_size'"),
        (lambda: KerasEstimator(classifier, mode="job"), "cannot be: .*; did you mean 'jobs'"),
        (lambda: KerasEstimator(classifier, features_col=[]), "features_col=.* must name a column"),
        (
            lambda: KerasEstimator(classifier, callbacks=[Unpicklable]),
            "callbacks=<class .*give a list",
        ),
        (
            lambda: KerasEstimator(classifier, callbacks=[Unpicklable()]),
            "callbacks cannot travel to the nodes: .*Give a function",
        ),
        (lambda: KerasEstimator(7), "model is a int"),
        (lambda: KerasEstimator(classifier()), "has no loss"),
    ],
)
def test_what_cannot_work_is_refused_at_once(make: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


@pytest.mark.smoke
def test_softmax_gives_columns_that_evaluators_take_as_they_are(spark_ml: SparkSession) -> None:
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Activation("softmax")])
    for last in (inner, keras.layers.Softmax(), "softmax", "linear"):
        layers = [keras.layers.Dense(3, kernel_initializer="identity")]
        layers += [keras.layers.Activation(last) if isinstance(last, str) else last]
        model = keras.Sequential([keras.Input((3,)), *layers])
        stage: Any = stage_of(model)
        frame = spark_ml.range(6, numPartitions=1).selectExpr(
            "array(double(id % 3 = 0), double(id % 3 = 1), double(id % 3 = 2)) as features",
            "double(id % 3) as label",
        )
        types = stage.transform(frame).dtypes[2:]
        if last == "linear":
            assert types == [("prediction", "array<float>")], "logits or a regression: no guess"
            continue
        assert types == [("probability", "vector"), ("prediction", "double")]
        scored = stage.transform(frame)
        as_it_is = stage.copy().setOutputTypes({"prediction": "array<float>"})
        assert as_it_is.transform(frame).dtypes[2:] == [("prediction", "array<float>")]
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored) == 1.0
    only = keras.layers.Dense(1, "sigmoid", kernel_initializer="identity")
    stage = stage_of(keras.Sequential([keras.Input((3,)), only])).setProbabilityCol("p")
    scored = stage.transform(frame.withColumn("label", f.expr("double(label = 0)")))
    assert scored.dtypes[2:] == [("p", "vector"), ("prediction", "double")]
    assert BinaryClassificationEvaluator(rawPredictionCol="p").evaluate(scored) == 1.0


def test_columns_that_are_there_already_name_the_parameter_to_set(spark_ml: SparkSession) -> None:
    stage: Any = stage_of(keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, "softmax")]))
    columns = "array(1d, 2d) as features", "1d as Probability", "1d as prediction"
    frame = spark_ml.range(2, numPartitions=1).selectExpr(*columns)
    with pytest.raises(ConfigError, match=r"'probability'.*with probability_col=, rename"):
        stage.transform(frame.drop("prediction"))
    with pytest.raises(ConfigError, match="with probability_col=, prediction_col=, rename"):
        stage.transform(frame)
    chosen = stage.copy().setProbabilityCol("p").setPredictionCol("class")
    assert chosen.transform(frame).columns[-2:] == ["p", "class"]
    with pytest.raises(ConfigError, match="with raw_prediction_col=, rename"):
        chosen.setRawPredictionCol("Probability").setProbabilityCol(None).transform(frame)


def stage_of(model: Any) -> Any:
    file = ModelFile("keras", partial(save_to, model=model))
    return KerasModel(file, with_softmax(keras_predictor(model).signature, model))
