"""`KerasEstimator` on Spark and real data: pipelines, evaluators, tuning, saving and loading."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.ml.feature import StandardScaler, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as f

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.ml.estimators.keras_estimator import KerasEstimator
from sparkdl.ml.scoring.model import KerasModel

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # Keras' about numpy
]

FEATURES = 10


@pytest.fixture
def patients(spark_cluster: SparkSession) -> DataFrame:
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
    return spark_cluster.createDataFrame(rows, schema).repartition(2)


def stages(estimator: Any) -> list[Any]:
    assembler = VectorAssembler(inputCols=[f"f{i}" for i in range(FEATURES)], outputCol="raw")
    scaler = StandardScaler(inputCol="raw", outputCol="features", withMean=True)
    return [assembler, scaler, estimator]


def classifier() -> Any:
    """Make a model of one probability."""
    import keras

    return keras.Sequential(
        [
            keras.Input((FEATURES,), name="features"),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


@pytest.mark.parametrize(
    "loads", ["here", pytest.param("in a process without its code", marks=pytest.mark.deep)]
)
def test_pipeline_of_two_workers_trains_scores_and_is_loaded(
    patients: DataFrame, tmp_path: Path, loads: str
) -> None:
    train, test = patients.randomSplit([0.8, 0.2], seed=3)
    wrong = train.withColumn("label", 1 - f.col("label")).withColumn("weight", f.lit(0.0))
    has_board = find_spec("tensorboard") is not None
    estimator = KerasEstimator(
        classifier,
        loss="binary_crossentropy",
        metrics=["accuracy"],
        optimizer="adam",
        learning_rate=0.02,
        probability_col="probability",
        validation_indicator_col="held",
        weight_col="weight",
        num_workers=2,
        epochs=30,
        early_stopping_patience=2,
        early_stopping_min_delta=0.002,
        seed=7,
        cache=True,
        log_dir=str(tmp_path / "logs") if has_board else None,
    )
    fitted = Pipeline(stages=stages(estimator)).fit(train.union(wrong))
    model: Any = fitted.stages[-1]
    assert isinstance(model, KerasModel)
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} <= model.history.keys()
    assert 3 <= model.summary.total_epochs < 30  # the early stopping has ended it
    assert any((tmp_path / "logs").rglob("events.out.tfevents.*")) == has_board
    scored = fitted.transform(test).coalesce(2).cache()
    assert scored.dtypes[-2:] == [("probability", "vector"), ("prediction", "double")]
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored)
    auc = BinaryClassificationEvaluator(rawPredictionCol="probability").evaluate(scored)
    assert accuracy > 0.85
    assert auc > 0.93

    folder = str(tmp_path / "pipeline")
    fitted.write().overwrite().save(folder)
    if loads == "here":
        loaded: Any = PipelineModel.load(folder)
        assert loaded.stages[-1].history == model.history
        assert loaded.transform(test).select("prediction").count() == test.count()
        return
    code = (
        "from pyspark.sql import SparkSession; from pyspark.ml import PipelineModel;"
        "spark = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false')"
        ".getOrCreate();"
        f"model = PipelineModel.load({folder!r}); stage = model.stages[-1];"
        f"rows = spark.createDataFrame([[0.0] * {FEATURES}] * 3,"
        f" [f'f{{i}}' for i in range({FEATURES})]);"
        "print(len(stage.history['loss']), model.transform(rows).select('prediction').collect())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    epochs, _, rows = done.stdout.strip().splitlines()[-1].partition(" ")
    assert int(epochs) == model.summary.total_epochs
    assert rows.count("Row(prediction=") == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Spark's pool
def test_cross_validator_tunes_a_regression(patients: DataFrame, tmp_path: Path) -> None:
    import keras

    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    estimator: Any = KerasEstimator(
        model, epochs=8, batch_size=16, label_col="f0", model_dir=str(tmp_path / "models")
    )
    grid = ParamGridBuilder().addGrid(estimator.learning_rate, [0.05]).build()
    tuned = CrossValidator(
        estimator=Pipeline(stages=stages(estimator)),
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(labelCol="f0", metricName="r2"),
        numFolds=2,
        seed=1,
    ).fit(patients.limit(200).coalesce(2).cache())
    gc.collect()  # Spark leaves a pool of threads to it
    assert tuned.avgMetrics[0] > 0.5
    scored = tuned.transform(patients)
    assert scored.dtypes[-1] == ("prediction", "double")
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".keras"]


def test_estimators_are_saved_and_loaded(spark_local: SparkSession, tmp_path: Path) -> None:
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), keras.losses.Huber(2.0))
    by_content: Any = KerasEstimator(
        model, optimizer=keras.optimizers.Adam(0.1), loss=keras.losses.Huber(), epochs=4
    )
    by_content.write().overwrite().save(str(tmp_path / "content"))
    found: Any = KerasEstimator.load(str(tmp_path / "content"))
    assert (found.uid, found.getEpochs()) == (by_content.uid, 4)
    assert found.getLoss() == by_content.getLoss()
    assert found.getOptimizer()["config"]["learning_rate"] == pytest.approx(0.1)
    assert found._made == by_content._made
    by_function: Any = KerasEstimator(classifier, loss="mse")
    by_function.save(str(tmp_path / "function"))
    assert KerasEstimator.load(str(tmp_path / "function"))._made().input_shape == (None, FEATURES)


def test_fit_goes_on_at_its_last_checkpoint_when_a_worker_is_killed(
    patients: DataFrame, tmp_path: Path
) -> None:
    epochs = 15
    estimator: Any = KerasEstimator(
        classifier,
        loss="binary_crossentropy",
        num_workers=2,
        epochs=epochs,
        max_restarts=1,
        checkpoint_dir=str(tmp_path),
    )
    data = Pipeline(stages=stages(estimator)[:2]).fit(patients).transform(patients)
    killed: list[int] = []

    def kill() -> None:
        deadline = Deadline.after(120)
        while not killed and not deadline.has_passed:
            # The driver knows of the first one, since the second is there.
            if len(list(tmp_path.glob("fit-*/step-*/manifest.json"))) > 1:
                child = next(c for c in psutil.Process().children(True) if _is_child(c))
                child.kill()
                killed.append(child.pid)
            threading.Event().wait(0.05)

    killer = threading.Thread(target=kill)
    killer.start()
    model: Any = estimator.fit(data)
    killer.join()
    assert killed
    assert 0 < len(model.summary.history["loss"]) < epochs  # those after the restart
    assert not list(tmp_path.iterdir())


def _is_child(process: psutil.Process) -> bool:
    try:
        return "sparkdl.node.child" in process.cmdline()
    except psutil.Error:
        return False


def test_null_behind_the_rows_that_are_looked_at_ends_the_training(
    spark_local: SparkSession,
) -> None:
    late = spark_local.range(5000).selectExpr(
        f"array_repeat(0.5d, {FEATURES}) as features", "if(id = 4990, null, 1.0d) as label"
    )
    with pytest.raises(FeedTypeError, match=r"column 'label' holds a null.*dropna"):
        KerasEstimator(classifier, loss="mse").fit(late)


def halving(notes: Path) -> list[Any]:
    """Return a callback that halves the learning rate in each epoch, and notes it."""
    import keras

    class Halving(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.5 ** (epoch + 1)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with notes.open("a") as file:
                file.write(f"{epoch} {float(self.model.optimizer.learning_rate)} {sorted(logs)}\n")

    return [Halving()]


class Unpicklable:
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Do nothing."""


@pytest.mark.parametrize("mode", ["nodes", "jobs"])
def test_callbacks_of_the_user_run_and_the_trained_model_and_its_summary_are_kept(
    spark_local: SparkSession, tmp_path: Path, mode: str
) -> None:
    import keras

    rows = spark_local.range(40, numPartitions=2).selectExpr(
        f"array_repeat(id / 40, {FEATURES}) as features", "id / 40 as label"
    )
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    notes = tmp_path / "notes"
    callbacks: Any = halving(notes) if mode == "jobs" else partial(halving, notes)
    estimator: Any = KerasEstimator(model, epochs=3, mode=mode, callbacks=callbacks)
    estimator.save(str(tmp_path / "estimator"))
    found: Any = KerasEstimator.load(str(tmp_path / "estimator"))
    fitted: Any = found.fit(rows)
    assert notes.read_text() == "0 0.5 ['loss']\n1 0.25 ['loss']\n2 0.125 ['loss']\n"
    trained = fitted.getModel()
    assert isinstance(trained, keras.Model)
    expected = trained.predict(np.full((1, FEATURES), 0.5), verbose=0)[0, 0]
    scored = fitted.transform(rows.where("id = 20")).collect()
    assert scored[0].prediction == pytest.approx(expected, rel=1e-5)
    fitted.save(str(tmp_path / "model"))
    loaded = KerasModel.load(str(tmp_path / "model"))
    assert loaded.summary == fitted.summary
    assert loaded.summary.seconds > 0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: KerasEstimator(classifier, gone=1), "no parameter 'gone'"),
        (lambda: KerasEstimator(classifier, batchSize=1), "did you mean 'batch_size'"),
        (lambda: KerasEstimator(classifier, epochs=-1), "epochs=-1 must be at least 1"),
        (lambda: KerasEstimator(classifier, mode="job"), "mode='job' cannot be: choose one of"),
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


def test_model_of_several_outputs_maps_them(spark_local: SparkSession) -> None:
    import msgspec

    from sparkdl.ml.estimators.keras_model import as_content
    from sparkdl.ml.scoring.predict import keras_predictor
    from tests.ml.models import two_in_two_out

    model = two_in_two_out()
    stage: Any = KerasModel(as_content(model), keras_predictor(model).signature)
    assert msgspec.json.decode(msgspec.json.encode(stage._signature), type=type(stage._signature))
    frame = spark_local.range(4, numPartitions=1).select(
        f.array(f.col("id") * 1.0, f.lit(1.0)).alias("l"), f.col("id").alias("r")
    )
    stage.setInputMapping({"l": "left", "r": "right"})
    with pytest.raises(ConfigError, match="outputs sum, twice: setOutputMapping"):
        stage.transform(frame)
    scored = stage.setOutputMapping({"sum": "s"}).transform(frame)
    assert all(np.allclose(row.s, [2 * row.r, 1 + row.r]) for row in scored.collect())
