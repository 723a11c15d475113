"""Clusters launched at once on one Spark application: they gather one after another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.core.errors import CheckpointError, ConfigError, ReservationTimeoutError
from sparkdl.driver.executors import spark as executors
from tests.doubles.sessions import jobs_of
from tests.doubles.until import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

launching = import_module("sparkdl.driver.launch")
FED: dict[str, Any] = {"framework": "plain", "feeding": sparkdl.Feeding(timeout_s=60)}
OWN_DATA: dict[str, Any] = {"framework": "plain", "feeding": sparkdl.Feeding(fed=False)}


def count(_args: Any, ctx: Any) -> int:
    feed, rows = ctx.get_data_feed(), 0
    while not feed.should_stop():
        rows += len(feed.next_batch(5))
    return rows


def meet(_args: Any, ctx: Any) -> int:
    return len(ctx.all_gather(ctx.rank))


def hold_slot(begun: Path) -> None:
    begun.touch()
    while not begun.with_name("end").exists():
        threading.Event().wait(0.1)


def test_clusters_that_start_at_once_and_need_every_slot_are_fed_by_jobs_that_say_what_they_are(
    spark_local: SparkSession,
) -> None:
    frame, rdd = spark_local.range(400, numPartitions=5), spark_local.range(41).rdd
    slots = spark_local.sparkContext.defaultParallelism

    def fit(_number: int) -> tuple[str, list[int]]:
        with sparkdl.launch(spark_local, count, nodes=slots, **FED) as cluster:
            report = cluster.feed(frame, epochs=2)
            assert (report.rows_fed, report.rows_unused) == (800, 0)
            cluster.feed(rdd)
            return f"sparkdl {cluster.spec.cluster_id}", cluster.results()

    with pytest.raises(
        ConfigError, match=r"9 nodes need 9 task slots.*master local\[9\] .*executor='local'"
    ):
        sparkdl.launch(spark_local, count, nodes=9, **FED)
    with ThreadPoolExecutor(2) as pool:
        fitted = dict(pool.map(fit, range(2)))
    assert not executors._gathering.locked()
    for group, rows in fitted.items():
        assert sum(rows) == 841
        assert max(rows) - min(rows) <= 10
        told = [job for job in jobs_of(spark_local) if job.group == group]
        assert {job.group in job.tags for job in told} == {True}
        assert {job.description for job in told} == {
            f"{group}: nodes",
            f"{group}: feed 'input', epochs 0-1",
            f"{group}: feed 'input', epoch 2",
        }


def test_cluster_without_slots_times_out_and_harms_nobody(
    spark_local: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = spark_local.sparkContext.parallelize([tmp_path / str(i) for i in range(3)], 3)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(others.foreach, hold_slot)
        try:
            assert until(lambda: len([*tmp_path.iterdir()]) == 3)
            with pytest.raises(ReservationTimeoutError, match="worker"):
                startup = sparkdl.Startup(timeout_s=2.0)
                sparkdl.launch(spark_local, meet, nodes=2, startup=startup, **OWN_DATA)
            assert sparkdl.run(spark_local, meet, nodes=1, framework="plain") == [1]
        finally:
            (tmp_path / "end").touch()
        held.result(60)

    def no_checkpoint(_spec: Any) -> Any:
        raise CheckpointError("unreadable")

    monkeypatch.setattr(launching, "_at_newest_checkpoint", no_checkpoint)
    with pytest.raises(CheckpointError):
        sparkdl.launch(spark_local, count, nodes=2, framework="plain")
    assert not executors._gathering.locked()
