"""Executors come and go on a standalone cluster; attached nodes keep theirs, between feeds too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

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


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_gap_between_feeds_and_a_restart_lose_no_row(
    spark_session_on: Callable[..., SparkSession],
    spark_sessions: SparkSessions,
    tmp_path: Path,
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
