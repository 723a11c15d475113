"""`KerasEstimator` on Spark and real data: pipelines, evaluators, saving and loading."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.feature import StandardScaler, VectorAssembler
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.ml.estimators import keras_estimator, network
from sparkdl.ml.estimators.estimator import launch_options
from sparkdl.ml.estimators.keras_estimator import KerasEstimator
from sparkdl.ml.estimators.keras_train import with_softmax
from sparkdl.ml.scoring.keras_objects import saved
from sparkdl.ml.scoring.model import KerasModel
from tests.doubles import sessions
from tests.doubles.programs import output_of
from tests.doubles.sessions import SparkSessions
from tests.ml.train_fns import (
    FEATURES,
    classifier,
    halving,
    read_all,
    worsening,
)

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(400)]


def patients(spark: SparkSession) -> DataFrame:
    """scikit-learn's breast cancer data: columns f0 to f9, `label` (double), `held`, `weight`."""
    from sklearn.datasets import load_breast_cancer

    values, labels = load_breast_cancer(return_X_y=True)
    names = [f"f{i}" for i in range(FEATURES)]
    rows = [
        [*map(float, row[:FEATURES]), float(label), number % 5 == 0, 1.0 + number % 2]
        for number, (row, label) in enumerate(zip(values, labels, strict=True))
    ]
    schema = ", ".join(f"{name} double" for name in names)
    schema += ", label double, held boolean, weight double"
    return spark.createDataFrame(rows, schema)


def stages(estimator: Any) -> list[Any]:
    assembler = VectorAssembler(inputCols=[f"f{i}" for i in range(FEATURES)], outputCol="raw")
    scaler = StandardScaler(inputCol="raw", outputCol="features", withMean=True)
    return [assembler, scaler, estimator]


@dataclass(frozen=True)
class Trained:
    """A pipeline that was trained on two workers.

    Attributes:
        test: rows that it was not trained on, in one partition.
        folder: with what its callbacks have written, and the saved pipeline.
    """

    pipeline: PipelineModel
    test: DataFrame
    folder: Path

    @property
    def model(self) -> Any:
        return self.pipeline.stages[-1]


@pytest.fixture(scope="module")
def trained(spark_sessions: SparkSessions, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train once, for all tests that look at what came of it."""
    folder = tmp_path_factory.mktemp("trained")
    rows = patients(spark_sessions.get(sessions.ML))
    train, test = rows.randomSplit([0.8, 0.2], seed=3)
    wrong = train.withColumn("label", 1 - f.col("label")).withColumn("weight", f.lit(0.0))
    estimator = KerasEstimator(
        classifier,
        callbacks=partial(halving, folder / "notes"),
        loss="binary_crossentropy",
        metrics=["accuracy"],
        probability_col="probability",
        validation_indicator_col="held",
        weight_col="weight",
        num_workers=2,
        batch_size=8,
        epochs=30,
        seed=7,
    )
    estimator.save(str(folder / "estimator"))
    loaded = KerasEstimator.load(str(folder / "estimator"))
    fitted = Pipeline(stages=stages(loaded)).fit(train.union(wrong).coalesce(2))
    fitted.write().overwrite().save(str(folder / "pipeline"))
    return Trained(fitted, test.coalesce(1), folder)


@pytest.mark.usefixtures("spark_ml")
def test_two_workers_train_in_a_pipeline_with_what_parameters_and_callbacks_say(
    trained: Trained,
) -> None:
    model = trained.model
    assert isinstance(model, KerasModel)
    names = ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert sorted(model.history) == names
    epochs = len(model.history["loss"])
    assert 2 <= epochs < 30  # the early stopping has ended it
    lines = [f"{epoch} {0.5 ** (epoch + 4)} {names}" for epoch in range(epochs)]
    notes = (trained.folder / "notes").read_text().splitlines()
    assert sorted(notes) == sorted(2 * lines)  # every node has callbacks of its own


@pytest.mark.usefixtures("spark_ml")
def test_scores_are_those_of_the_trained_model_and_evaluators_take_them(trained: Trained) -> None:
    import keras

    scored = trained.pipeline.transform(trained.test).cache()
    assert scored.dtypes[-2:] == [("probability", "vector"), ("prediction", "double")]
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored)
    auc = BinaryClassificationEvaluator(rawPredictionCol="probability").evaluate(scored)
    assert accuracy > 0.85
    assert auc > 0.93
    model = trained.model.getModel()
    assert isinstance(model, keras.Model)
    (row, *_) = scored.take(1)
    (expected,) = model.predict(row.features.toArray()[None], verbose=0)[0]
    assert row.probability[1] == pytest.approx(expected, rel=1e-5)
    assert row.prediction == float(expected > 0.5)
    scored.unpersist()


@pytest.mark.usefixtures("spark_ml")
def test_saved_pipeline_is_loaded_with_its_summary_and_scores(trained: Trained) -> None:
    loaded: Any = PipelineModel.load(str(trained.folder / "pipeline"))
    assert loaded.stages[-1].history == trained.model.history
    assert loaded.stages[-1].summary == trained.model.summary
    assert loaded.stages[-1].summary.seconds > 0
    rows = [p.transform(trained.test).select("probability") for p in (loaded, trained.pipeline)]
    assert rows[0].collect() == rows[1].collect()


@pytest.mark.deep
@pytest.mark.usefixtures("spark_ml")
def test_saved_pipeline_is_loaded_in_a_process_without_its_code(trained: Trained) -> None:
    code = (
        "from pyspark.sql import SparkSession; from pyspark.ml import PipelineModel;"
        "spark = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false')"
        ".getOrCreate();"
        f"model = PipelineModel.load({str(trained.folder / 'pipeline')!r}); stage=model.stages[-1];"
        f"rows = spark.createDataFrame([[0.0] * {FEATURES}] * 3,"
        f" [f'f{{i}}' for i in range({FEATURES})]);"
        "print(len(stage.history['loss']), model.transform(rows).select('prediction').collect())"
    )
    said = output_of(sys.executable, "-c", code, cwd=trained.folder, timeout_s=200)
    epochs, _, rows = said.strip().splitlines()[-1].partition(" ")
    assert int(epochs) == len(trained.model.history["loss"])
    assert rows.count("Row(prediction=") == 3


def test_killed_training_has_the_history_and_the_early_stopping_of_an_undisturbed_one(
    spark_ml: SparkSession, tmp_path: Path
) -> None:
    frame = spark_ml.range(64, numPartitions=1).selectExpr(
        f"array_repeat(id / 64, {FEATURES}) as features", "double(id > 31) as label"
    )
    marker = tmp_path / "died"
    models = [
        KerasEstimator(
            classifier,
            loss="mse",
            optimizer="sgd",
            epochs=7,
            batch_size=64,
            seed=3,
            callbacks=partial(worsening, marker if dies else None),
            checkpoint_dir=str(tmp_path / f"checkpoints-{dies}"),
            max_restarts=1,
        ).fit(frame)
        for dies in (False, True)
    ]
    assert marker.exists()
    undisturbed, killed = (model.history["loss"] for model in models)
    # The second epoch was the best: it is not an epoch of the process that ended the training.
    assert len(killed) == 4
    assert killed[1] < min(killed[0], *killed[2:])
    assert killed == pytest.approx(undisturbed)
    expected, found = (model.getModel().get_weights() for model in models)
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(expected, found, strict=True))


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


def test_softmax_gives_columns_that_evaluators_take_without_a_further_parameter(
    spark_ml: SparkSession,
) -> None:
    import keras

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


def test_columns_that_are_there_already_name_the_parameter_to_set(spark_ml: SparkSession) -> None:
    import keras

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
    from sparkdl.ml.scoring.tensorflow import keras_predictor

    return KerasModel(saved(model), with_softmax(keras_predictor(model).signature, model))


def scaled() -> Any:
    """Return a layer that Keras does not have."""
    import keras

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
    import keras

    layer = kind()
    layer.factor = np.float32(2)  # which is no weight
    given = keras.Input((2,), name="x")
    x = layer(given)
    heads = [keras.layers.Dense(1, use_bias=False, name=name)(x) for name in ("total", "gap")]
    return keras.Model(given, heads)


def test_own_parts_several_columns_and_several_labels(
    spark_ml: SparkSession, tmp_path: Path
) -> None:
    import keras

    class OwnLoss(keras.losses.Loss):  # type: ignore[misc]
        def call(self, y: Any, p: Any) -> Any:
            return (keras.ops.reshape(y, (-1, 1)) - p) ** 2

    numbers = spark_ml.range(1000, numPartitions=4).selectExpr("rand(1) as a", "rand(2) as b")
    columns = ("float(a) as a", "b", "2 * (a + b) as total", "2 * (a - b) as gap")
    frame = numbers.selectExpr(*columns, "a < 0.2 as held")
    kind = scaled()
    estimator: Any = KerasEstimator(
        partial(two_headed, kind),
        custom_objects={"Scaled": kind},
        loss=[OwnLoss(), "mse"],
        metrics=[[keras.metrics.MeanAbsoluteError()], ["mae"]],
        optimizer=keras.optimizers.SGD(0.1),
        loss_weights=[1.0, 0.5],
        features_col=["a", "b"],
        label_col=["total", "gap"],
        validation_indicator_col="held",
        batch_size=25,
        epochs=4,
        seed=3,
        num_workers=2,
        checkpoint_dir=str(tmp_path / "checkpoints"),
    )
    estimator.write().save(str(tmp_path / "estimator"))
    model = KerasEstimator.load(str(tmp_path / "estimator")).fit(frame)
    history = model.history
    assert {"loss", "val_loss", "total_loss", "gap_loss"} <= set(history)
    assert history["val_loss"][-1] < 0.01 < history["val_loss"][0]
    weighted = history["total_loss"][-1] + 0.5 * history["gap_loss"][-1]
    assert history["loss"][-1] == pytest.approx(weighted, rel=0.2)  # Keras weighs batches otherwise
    rows = model.summary.feed.rows_used / 4
    assert 700 <= rows <= 900
    model.setOutputMapping({"total": "t", "gap": "g"}).setOutputTypes({"t": "double"})
    model.write().save(str(tmp_path / "model"))
    for each in (model, KerasModel.load(str(tmp_path / "model"))):
        found = each.transform(frame).first()
        assert found.t == pytest.approx(found.total, abs=0.2)
        assert found.g[0] == pytest.approx(found.gap, abs=0.2)
    assert model.getModel().get_layer("total").get_weights()[0].shape == (2, 1)
