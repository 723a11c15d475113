"""Clusters launched at once on one Spark application: they gather one after another."""

from __future__ import annotations

import os
import signal
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


def count(_args: Any, ctx: Any) -> int:
    feed, rows = ctx.get_data_feed(), 0
    while not feed.should_stop():
        rows += len(feed.next_batch(5))
    return rows


def hold_slot(begun: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Spark may end its daemon as a launch ends
    begun.write_text(str(os.getppid()))
    while not begun.with_suffix(".end").exists():
        threading.Event().wait(0.1)


@pytest.mark.smoke
def test_clusters_launched_at_once_gather_in_the_slots_that_others_leave_and_are_fed_by_named_jobs(
    spark_local: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rdd = spark_local.range(400, numPartitions=3).rdd

    def fit(_number: int) -> tuple[str, list[int]]:
        startup = sparkdl.Startup(placement="detached")
        with sparkdl.launch(spark_local, count, nodes=2, startup=startup, **FED) as cluster:
            report = cluster.feed(rdd, epochs=2)
            assert (report.rows_fed, report.rows_unused) == (800, 0)
            return f"sparkdl {cluster.spec.cluster_id}", cluster.results()

    with pytest.raises(
        ConfigError, match=r"9 nodes need 9 task slots.*master local\[9\] .*executor='local'"
    ):
        sparkdl.launch(spark_local, count, nodes=9, **FED)
    slots = [tmp_path / str(i) for i in range(3)]
    others = spark_local.sparkContext.parallelize(slots, 3)
    with ThreadPoolExecutor(3) as pool:
        held = pool.submit(others.foreach, hold_slot)  # of four
        try:
            assert until(lambda: len([*tmp_path.iterdir()]) == 3)
            with pytest.raises(ReservationTimeoutError, match="worker"):
                startup = sparkdl.Startup(timeout_s=2.0)
                sparkdl.launch(spark_local, count, nodes=2, startup=startup, framework="plain")
            # Workers outlive Spark's daemon, which the system may kill. Spark gives them to nodes.
            os.kill(int(slots[0].read_text()), signal.SIGKILL)
            slots.pop().with_suffix(".end").touch()
            fitted = dict(pool.map(fit, range(2)))
        finally:
            for slot in slots:
                slot.with_suffix(".end").touch()
        held.result(60)
    for group, rows in fitted.items():
        assert sum(rows) == 800
        assert max(rows) - min(rows) <= 10
        told = [job for job in jobs_of(spark_local) if job.group == group]
        assert {job.group in job.tags for job in told} == {True}
        assert {job.description for job in told} == {
            f"{group}: nodes",
            f"{group}: feed 'input', epochs 0-1",
        }

    def no_checkpoint(_spec: Any) -> Any:
        raise CheckpointError("unreadable")

    monkeypatch.setattr(launching, "_at_newest_checkpoint", no_checkpoint)
    with pytest.raises(CheckpointError):
        sparkdl.launch(spark_local, count, nodes=2, framework="plain")
    assert not executors._gathering.locked()
