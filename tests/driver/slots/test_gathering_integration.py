"""Clusters launched at once on one Spark application: they gather one after another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.core.errors import CheckpointError, ReservationTimeoutError
from sparkdl.driver.executors import spark as executors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

launching = import_module("sparkdl.driver.launch")
FED: dict[str, Any] = {"framework": "plain", "feeding": sparkdl.Feeding(timeout_s=60)}
OWN_DATA: dict[str, Any] = {"framework": "plain", "feeding": sparkdl.Feeding(fed=False)}


def count(_args: Any, ctx: Any) -> int:
    return sum(len(batch["id"]) for batch in ctx.batches(5))


def meet(_args: Any, ctx: Any) -> int:
    return len(ctx.all_gather(ctx.rank))


def stay(_args: Any, _ctx: Any) -> None:
    threading.Event().wait(300.0)


def test_fed_clusters_that_start_at_once_all_get_their_rows(spark_local: SparkSession) -> None:
    rows = spark_local.range(40, numPartitions=2)

    def fit(_number: int) -> int:
        with sparkdl.launch(spark_local, count, nodes=2, **FED) as cluster:
            cluster.feed(rows)
            return sum(cluster.results())

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(fit, range(3))) == [40, 40, 40]
    assert not executors._gathering.locked()


def test_second_cluster_without_slots_times_out_and_harms_nobody(
    spark_local: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    startup = sparkdl.Startup(timeout_s=5.0)
    first = sparkdl.launch(spark_local, stay, nodes=3, **OWN_DATA)
    with pytest.raises(ReservationTimeoutError, match="worker"):
        sparkdl.launch(spark_local, meet, nodes=2, startup=startup, **OWN_DATA)
    assert sparkdl.run(spark_local, meet, nodes=1, framework="plain") == [1]
    first.abort()

    def no_checkpoint(_spec: Any) -> Any:
        raise CheckpointError("unreadable")

    monkeypatch.setattr(launching, "_at_newest_checkpoint", no_checkpoint)
    with pytest.raises(CheckpointError):
        sparkdl.launch(spark_local, count, nodes=2, framework="plain")
    assert not executors._gathering.locked()
