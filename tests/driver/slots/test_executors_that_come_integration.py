"""Executors come late to a launch, or come and go while attached nodes keep theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.driver.slots.lost_hosts import executors_of
from tests.doubles.ledger import Plan, lost_and_doubled, train
from tests.doubles.sessions import NO_WORKERS, SparkSessions
from tests.doubles.until import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.executorIdleTimeout": "2s",
    "spark.executor.cores": "2",
}
TRACKING = {
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.timeout": "2s",  # or what `count` shuffled is kept
}
ROWS = 2 * 8 * 40
BACK_S = 180.0
LATE_S = 20.0


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_gap_between_feeds_and_a_restart_lose_no_row(
    spark_session_on: Callable[..., SparkSession], spark_sessions: SparkSessions, tmp_path: Path
) -> None:
    spark = spark_session_on(NO_WORKERS, {**DYNAMIC, **TRACKING})
    spark_sessions.add_worker(str(spark.sparkContext.master), 0, 6)
    rows = spark.range(ROWS, numPartitions=4).withColumnRenamed("id", "row")
    assert rows.count() == ROWS
    assert until(lambda: not executors_of(spark.sparkContext), BACK_S), "idle executors go"
    with sparkdl.launch(
        spark,
        train,
        Plan(every=10, faults=((0, 1, 30, "SIGKILL"),), pause_s=0.02),
        2,
        framework="plain",
        checkpoint_dir=str(tmp_path),
        max_restarts=1,
    ) as cluster:
        assert cluster.spec.placement == "attached"
        cluster.feed(rows)
        with_nodes = 2  # at most: there is no other work
        assert until(lambda: len(executors_of(spark.sparkContext)) <= with_nodes, BACK_S)
        cluster.feed(rows)
        results = cluster.results(BACK_S)
        assert cluster.world.generation == 1
    assert lost_and_doubled(results, ROWS, 2) == (0, 0)


def count(_args: Any, ctx: Any) -> int:
    return sum(len(batch["id"]) for batch in ctx.batches(5))


@pytest.mark.deep
def test_launch_completes_once_workers_have_come_that_started_after_it(
    spark_sessions: SparkSessions,
    spark_session_on: Callable[[str], SparkSession],
    caplog: pytest.LogCaptureFixture,
) -> None:
    spark = spark_session_on(NO_WORKERS)
    url, began_s, began_wall_s = spark.sparkContext.master, time.monotonic(), time.time()
    timers = [
        threading.Timer(after_s, spark_sessions.add_worker, (url, number, 1))
        for number, after_s in enumerate((1.0, LATE_S))
    ]
    for timer in timers:
        timer.start()
    with sparkdl.launch(spark, count, nodes=2, framework="plain") as cluster:
        assert time.monotonic() - began_s > LATE_S
        cluster.feed(spark.range(40))
        assert sum(cluster.results()) == 40
    for timer in timers:
        timer.join()
    (told,) = (each for each in caplog.records if "for executors" in each.message)
    assert told.levelname == "WARNING"
    assert "Waiting up to 600 s for executors: 2 nodes need 2 task slots at once" in told.message
    assert told.created - began_wall_s < LATE_S / 2, "soon, not when it is over"
