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
from sparkdl.ml.jobs.fit import fit_in_jobs, spread
from sparkdl.ml.jobs.work import num_steps
from tests.doubles.sessions import jobs_of
from tests.ml.train_fns import adam, loss_fn, loss_that_kills, model_fn

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

SIZES = (40, 0, 33)  # rows of the partitions
BATCH = 7
RNG = np.random.default_rng(3)
X = RNG.normal(size=(sum(SIZES), 4)).astype(np.float32)
Y = np.sin(X @ np.arange(4, dtype=np.float32)) + X[:, 0]


def data_of(spark: SparkSession) -> DataFrame:
    ends = np.cumsum((0, *SIZES))
    parts = [
        [([float(v) for v in X[row]], float(Y[row])) for row in range(ends[n], ends[n + 1])]
        for n in range(len(SIZES))
    ]
    rows = spark.sparkContext.parallelize(parts, len(parts)).flatMap(lambda part: part)
    return spark.createDataFrame(rows, "x array<float>, y float")


@pytest.fixture
def data(spark_ml: SparkSession) -> DataFrame:
    return data_of(spark_ml)


def alone(optimizer_fn: Any, epochs: int, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    """Train in this process on the very mini-batches that the partitions make together."""
    import torch

    ends = np.cumsum((0, *sizes))
    steps = num_steps(sizes, BATCH * len(sizes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_fn()
    optimizer = optimizer_fn(model.parameters())
    for _ in range(epochs):
        for step in range(steps):
            rows = np.concatenate(
                [
                    np.arange(ends[n] + step * size // steps, ends[n] + (step + 1) * size // steps)
                    for n, size in enumerate(sizes)
                ]
            )
            optimizer.zero_grad()
            batch = {"x": torch.from_numpy(X[rows]), "y": torch.from_numpy(Y[rows])}
            loss_fn(model, batch).backward()
            optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def same(model: Any, expected: list[Any]) -> bool:
    found = [parameter.detach().numpy() for parameter in model.parameters()]
    return all(np.allclose(a, b, atol=2e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.deep  # the training below equals one process as well
def test_it_equals_one_process_also_when_a_worker_and_an_executor_are_killed(
    spark_cluster: SparkSession, tmp_path: Path
) -> None:
    data = data_of(spark_cluster)
    options: Any = {"batch_size": BATCH, "shuffle": False}
    loss = loss_that_kills(str(tmp_path))
    killed = fit_in_jobs(data, model_fn, loss, adam, epochs=2, validation=data, **options)
    assert len(list(tmp_path.iterdir())) > 9  # both have been killed, and more was done after
    assert same(killed.model, alone(adam, 2))
    assert killed.history["loss"][-1] < killed.history["loss"][0]
    assert killed.history["val_loss"][0] < killed.history["loss"][0]
    assert killed.iterations == 2 * num_steps(SIZES, BATCH * len(SIZES))


def test_it_equals_one_process_and_each_job_says_what_it_is(data: DataFrame) -> None:
    before = max((job.number for job in jobs_of(data.sparkSession)), default=-1)
    options: Any = {"batch_size": BATCH, "shuffle": False, "validation": data}
    found = fit_in_jobs(data, model_fn, loss_fn, adam, epochs=2, **options)
    steps = num_steps(SIZES, BATCH * len(SIZES))
    jobs = [job for job in jobs_of(data.sparkSession) if job.number > before]
    named = {job.description.partition(": ")[2] for job in jobs}
    assert {f"training, epoch 1, step {n} of {steps}" for n in range(steps)} < named
    assert {"keep training rows", "remove the rows"} < named
    assert "" not in named
    assert found.iterations == 2 * steps
    assert [len(values) for values in found.history.values()] == [2, 2]
    assert found.history["val_loss"][1] < found.history["loss"][0]
    assert same(found.model, alone(adam, 2))


def test_rows_are_sorted_behind_a_shuffle_which_brings_them_in_any_order(
    spark_ml: SparkSession,
) -> None:
    rows = [(float(n), Vectors.dense(float(n % 7), 1.0)) for n in range(200)]
    found = spread(spark_ml.createDataFrame(rows, ["a.b", "v"]), 3)
    hashed = functions.xxhash64("`a.b`", vector_to_array(functions.col("v")))
    seen = found.select(functions.spark_partition_id(), hashed).collect()
    assert len(seen) == 200
    assert {part for part, _ in seen} == {0, 1, 2}
    assert seen == sorted(seen)


def test_what_cannot_work_is_refused(data: DataFrame) -> None:
    from pyspark.sql import functions as f

    for options, match in (
        ({"epochs": 0}, "epochs=0 must be at least 1"),
        ({"columns": ["z"]}, "no column 'z'"),
    ):
        with pytest.raises(ConfigError, match=match):
            fit_in_jobs(data, model_fn, loss_fn, adam, **options)
    with pytest.raises(ConfigError, match="no training rows"):
        fit_in_jobs(data.where("y > 100"), model_fn, loss_fn, adam)
    with pytest.raises(ConfigError, match="no validation rows"):
        fit_in_jobs(data, model_fn, loss_fn, adam, validation=data.where("y > 100"))
    text = data.withColumn("y", f.col("y").cast("string"))
    with pytest.raises(ConfigError, match="'y' is of type string: training as Spark jobs takes"):
        fit_in_jobs(text, model_fn, loss_fn, adam)
