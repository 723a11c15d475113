"""Two fed clusters at once on a Spark application that has slots for one: both get their turn."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.core.errors import CheckpointError
from sparkdl.driver.slots.queue import gate_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

launching = import_module("sparkdl.driver.launch")


def count(_args: Any, ctx: Any) -> int:
    return sum(len(batch["id"]) for batch in ctx.batches(5))


def test_parallel_clusters_take_turns_and_give_their_slots_back(
    spark_local: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = spark_local.range(40, numPartitions=2)

    def fit(_number: int) -> int:
        # Without turns both would get their two nodes, and no slot of four be left for feeding.
        with sparkdl.launch(
            spark_local, count, nodes=2, framework="plain", feeding=sparkdl.Feeding(timeout_s=60)
        ) as cluster:
            cluster.feed(rows)
            return sum(cluster.results())

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(fit, range(3))) == [40, 40, 40]
    gate = gate_of(spark_local.sparkContext.applicationId)
    assert not gate._inside

    def no_checkpoint(_spec: Any) -> Any:
        raise CheckpointError("unreadable")

    monkeypatch.setattr(launching, "_at_newest_checkpoint", no_checkpoint)
    with pytest.raises(CheckpointError):
        sparkdl.launch(spark_local, count, nodes=2, framework="plain")
    assert not gate._inside  # also of what failed before anything was started
