"""Training as Spark jobs: it equals one process, whatever is killed meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession, functions

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.keras_estimator import KerasEstimator
from sparkdl.ml.jobs.fit import spread
from sparkdl.ml.jobs.work import num_steps
from tests.doubles.sessions import jobs_of
from tests.ml.train_fns import network, network_that_kills

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(400)]

SIZES = (40, 0, 33)  # rows of the partitions
BATCH = 7
STEPS = num_steps(SIZES, BATCH * len(SIZES))
RNG = np.random.default_rng(3)
X = RNG.normal(size=(sum(SIZES), 4)).astype(np.float32)
Y = np.sin(X @ np.arange(4, dtype=np.float32)) + X[:, 0]
W = RNG.uniform(0.5, 2.0, len(X)).astype(np.float32)


def data_of(spark: SparkSession) -> DataFrame:
    """The rows, and each of them once more, to validate with."""
    ends = np.cumsum((0, *SIZES))
    parts = [
        [
            ([float(v) for v in X[row]], float(Y[row]), float(W[row]), marked)
            for marked in (False, True)
            for row in range(ends[n], ends[n + 1])
        ]
        for n in range(len(SIZES))
    ]
    rows = spark.sparkContext.parallelize(parts, len(parts)).flatMap(lambda part: part)
    schema = "features array<float>, label float, weight float, held boolean"
    return spark.createDataFrame(rows, schema)


def fit(data: DataFrame, made: Any = network) -> Any:
    options: Any = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "seed": 5}
    options |= {"validation_indicator_col": "held", "num_workers": len(SIZES)}
    options["weight_col"] = "weight"
    return KerasEstimator(made, mode="jobs", **options).fit(data)


def alone() -> tuple[list[Any], dict[str, list[float]]]:
    """Train in this process on the very mini-batches that the partitions make together."""
    import keras

    ends = np.cumsum((0, *SIZES))
    keras.utils.set_random_seed(5)
    model = network()
    history: dict[str, list[float]] = {"loss": [], "mae": []}
    for _epoch in range(2):
        logs, sizes = [], []
        for step in range(STEPS):
            rows = np.concatenate(
                [
                    np.arange(ends[n] + step * size // STEPS, ends[n] + (step + 1) * size // STEPS)
                    for n, size in enumerate(SIZES)
                ]
            )
            logs.append(model.train_on_batch(X[rows], Y[rows], W[rows], return_dict=True))
            sizes.append(len(rows))
        for name, values in history.items():
            values.append(float(np.average([each[name] for each in logs], weights=sizes)))
    return model.get_weights(), history


def check(fitted: Any) -> None:
    weights, history = alone()
    for mine, theirs in zip(fitted.getModel().get_weights(), weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
    for name, values in history.items():
        np.testing.assert_allclose(fitted.history[name], values, rtol=1e-4)
    losses, held = fitted.history["loss"], fitted.history["val_loss"]
    assert losses[1] < losses[0]
    assert held[0] < losses[0]
    assert len(held) == 2


@pytest.mark.deep  # the training below equals one process as well
def test_it_equals_one_process_also_when_a_worker_and_an_executor_are_killed(
    spark_cluster: SparkSession, tmp_path: Path
) -> None:
    killed = fit(data_of(spark_cluster), network_that_kills(str(tmp_path)))
    assert len(list(tmp_path.iterdir())) > 9  # both have been killed, and more was done after
    check(killed)


@pytest.mark.smoke
def test_it_equals_one_process_and_each_job_says_what_it_is(spark_ml: SparkSession) -> None:
    before = max((job.number for job in jobs_of(spark_ml)), default=-1)
    check(fit(data_of(spark_ml)))
    jobs = [job for job in jobs_of(spark_ml) if job.number > before]
    named = {job.description.partition(": ")[2] for job in jobs}
    assert {f"training, epoch 1, step {n} of {STEPS}" for n in range(STEPS)} < named
    assert {"keep training rows", "remove the rows"} < named
    assert "" not in named


def test_rows_are_sorted_after_a_shuffle_brings_them_in_any_order(spark_ml: SparkSession) -> None:
    rows = [(float(n), Vectors.dense(float(n % 7), 1.0)) for n in range(200)]
    found = spread(spark_ml.createDataFrame(rows, ["a.b", "v"]), 3)
    hashed = functions.xxhash64("`a.b`", vector_to_array(functions.col("v")))
    seen = found.select(functions.spark_partition_id(), hashed).collect()
    assert len(seen) == 200
    assert {part for part, _ in seen} == {0, 1, 2}
    assert seen == sorted(seen)


def test_text_is_refused(spark_ml: SparkSession) -> None:
    text = data_of(spark_ml).withColumn("features", functions.lit("a"))
    with pytest.raises(ConfigError, match="of type string: training as Spark jobs takes"):
        fit(text)
