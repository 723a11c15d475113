"""Two fed clusters at once on a Spark application that has slots for one: both get their turn."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.core.errors import CheckpointError
from sparkdl.core.options import Feeding, Startup
from sparkdl.driver.slots.queue import gate_of
from tests.doubles.nodes import use_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

launching = import_module("sparkdl.driver.launch")


def count(_args: Any, ctx: Any) -> int:
    return sum(len(batch["id"]) for batch in ctx.batches(5))


def fail(_args: Any, ctx: Any) -> None:
    raise ValueError("a bad row")


@pytest.mark.deep  # clusters that are shut down give their slots back as well, see below
@pytest.mark.parametrize("ends", ["failed", "finished"])
def test_next_launch_gets_the_slots_of_a_cluster_that_has_ended_and_was_not_shut_down(
    spark_local: SparkSession,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    ends: str,
) -> None:
    """As programs do that catch what `inference` raises, and run the next cluster."""
    use_settings(monkeypatch, settle_s=2.0)  # the launch returns before it has failed
    map_fun: Any = fail if ends == "failed" else (lambda args, ctx: ctx.rank)
    options: dict[str, Any] = {
        "framework": "plain",
        "feeding": Feeding(fed=False),
        "startup": Startup(timeout_s=60),
    }
    ended = sparkdl.launch(spark_local, map_fun, nodes=4, **options)
    try:
        assert sparkdl.run(spark_local, lambda args, ctx: ctx.rank, nodes=4, **options) == [
            0,
            1,
            2,
            3,
        ]
        (told,) = (each for each in caplog.records if "Waiting for its turn" in each.message)
        assert told.levelname == "WARNING"
        assert f"held by {ended.spec.cluster_id} (4 nodes" in told.message
        assert ended.status() == ends.capitalize()
        spark_local.range(4).collect()  # the slots are free for anybody
    finally:
        ended.abort()


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
