"""`KerasEstimator(mode="jobs")`: the nodes' face without nodes, also to Spark's tuning."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.keras_estimator import KerasEstimator
from sparkdl.ml.scoring.model import KerasModel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # Keras' about numpy
    pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer"),
]

ROWS = 40
X = np.random.default_rng(2).normal(size=(ROWS, 3))
Y = X @ np.array([1.0, -2.0, 0.5])


def linear() -> Any:
    import keras

    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros", name="y")]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def noting(notes: Path) -> list[Any]:
    """Return a callback that notes the epochs that it sees."""
    import keras

    class Noting(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with notes.open("a") as file:
                file.write(f"{epoch} {sorted(logs)}\n")

    return [Noting()]


@pytest.mark.deep  # jobs/test_fit.py has it without Spark, the next one a fit that learns
def test_fit_in_jobs_trains_as_one_process_and_scores(
    spark_ml: SparkSession, tmp_path: Path
) -> None:
    parts = [range(12), range(12, ROWS)]  # uneven
    rows = [
        [([float(v) for v in X[n]], float(Y[n]), 1.0 + n % 2, is_held) for n in part]
        for part in parts
        for is_held in (False,)
    ]
    rows[1] += [([float(v) for v in X[n]], float(Y[n]) + 0.1, 1.0, True) for n in range(8)]
    data = spark_ml.createDataFrame(
        spark_ml.sparkContext.parallelize(rows, 2).flatMap(lambda part: part),
        "features array<double>, label double, w double, held boolean",
    )
    estimator: Any = KerasEstimator(
        linear(),
        mode="jobs",
        num_workers=2,
        batch_size=10,
        epochs=9,
        shuffle=False,
        weight_col="w",
        validation_indicator_col="held",
        early_stopping_patience=1,
        early_stopping_min_delta=1e6,  # no epoch improves on the first so much
        checkpoint_dir=str(tmp_path / "checkpoints"),
        callbacks=noting(tmp_path / "notes"),
    )
    estimator.save(str(tmp_path / "estimator"))
    model = KerasEstimator.load(str(tmp_path / "estimator")).fit(data)
    assert model.summary.total_epochs == 2
    assert set(model.history) == {"loss", "mae", "val_loss", "val_mae"}
    assert not list((tmp_path / "checkpoints").iterdir())
    names = ["loss", "mae", "val_loss", "val_mae"]
    assert (tmp_path / "notes").read_text() == f"0 {names}\n1 {names}\n"

    alone, best = linear(), []
    for epoch in range(2):
        for step in range(2):
            chosen = [*range(step * 6, step * 6 + 6), *range(12 + step * 14, 26 + step * 14)]
            weights = np.array([1.0 + n % 2 for n in chosen], np.float32)
            alone.train_on_batch(X[chosen].astype(np.float32), Y[chosen], weights)
        if epoch == 0:
            best = alone.get_weights()  # to which the early stopping goes back
    loss = alone.evaluate(X[:8].astype(np.float32), Y[:8] + 0.1, verbose=0)[0]
    assert model.history["val_loss"][-1] == pytest.approx(loss, rel=1e-4)
    model.save(str(tmp_path / "model"))
    loaded = KerasModel.load(str(tmp_path / "model"))
    assert loaded.summary == model.summary
    assert loaded.summary.seconds > 0
    scored = [row.prediction for row in loaded.transform(data.coalesce(1)).collect()]
    order = [*range(ROWS), *range(8)]
    expected = X[order] @ best[0][:, 0] + best[1][0]
    assert np.allclose(scored, expected, atol=1e-4)
    assert np.allclose(model.getModel().predict(X[order], verbose=0)[:, 0], expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Spark's pool
@pytest.mark.deep
@pytest.mark.parametrize("mode", ["jobs", "nodes"])
def test_spark_tunes_a_regression(spark_ml: SparkSession, mode: Any) -> None:
    import keras

    layer = keras.layers.Dense(1, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((10,)), layer])
    model.compile(keras.optimizers.SGD(1e-6), "mse")
    estimator: Any = KerasEstimator(model, mode=mode, epochs=10)
    choices: Any = {
        "estimator": Pipeline(stages=[estimator]),
        "estimatorParamMaps": ParamGridBuilder().addGrid(estimator.learning_rate, [0.05]).build(),
        "evaluator": RegressionEvaluator(metricName="r2"),
        "seed": 1,
    }
    rows = spark_ml.range(40, numPartitions=1).selectExpr(
        "array_repeat(id / 40, 10) as features", "id / 40 as label"
    )
    if mode == "jobs":
        tuned: Any = TrainValidationSplit(**choices).fit(rows)
        found = tuned.validationMetrics
    else:
        tuned = CrossValidator(**choices, numFolds=2).fit(rows)
        found = tuned.avgMetrics
    gc.collect()  # Spark leaves a pool of threads to it
    assert found[0] > 0.5
    assert tuned.transform(rows).dtypes[-1] == ("prediction", "double")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "jobs", "num_gpus": 1}, "num_gpus: only mode='nodes' has this"),
        ({"sync_every": 2}, "sync_every: only mode='jobs' has this"),
    ],
)
def test_what_the_mode_has_not_is_refused_by_name(
    spark_ml: SparkSession, options: Any, match: str
) -> None:
    data = spark_ml.createDataFrame([([0.0] * 3, 0.0)], "features array<double>, label double")
    with pytest.raises(ConfigError, match=match):
        KerasEstimator(linear(), **options).fit(data)
