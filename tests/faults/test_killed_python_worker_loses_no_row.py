"""Python workers of Spark are killed while they feed: Spark repeats their tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import sparkdl
from sparkdl.core.deadline import Deadline
from tests.doubles.ledger import Plan, lost_and_doubled, slowly, train
from tests.doubles.nodes import all_gone, processes
from tests.faults.conftest import SparkProcesses

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 2 * 8 * 20
BACK_S = 90.0


@pytest.mark.deep  # of an executor tests/driver/executors/test_restart_integration.py does
def test_killed_python_worker_loses_no_row(spark_standalone: SparkSession, tmp_path: Path) -> None:
    """First those that feed; then, which takes a node along, the one of a node's task."""
    rows = spark_standalone.range(ROWS, numPartitions=3).withColumnRenamed("id", "row")
    with sparkdl.launch(
        spark_standalone,
        train,
        Plan(every=5),
        2,
        framework="plain",
        checkpoint_dir=str(tmp_path),
        max_restarts=3,
        startup=sparkdl.Startup(placement="attached"),
    ) as cluster:
        feeding = cluster.feed_async(rows.mapInArrow(slowly, "row long"))
        assert cluster._controller.wait_for(lambda v: v.progress > 3, Deadline.after(BACK_S))
        spark = SparkProcesses.of(processes()["worker:1"].agent)
        feeders = spark.feeders()
        assert feeders
        for process in feeders:
            process.kill()
        assert all_gone(feeders)
        progress = cluster._controller.look(lambda view: view.progress)
        assert cluster._controller.wait_for(
            lambda view: view.progress > progress + 3, Deadline.after(BACK_S)
        )
        assert cluster.world.generation == 0, "no node has been touched"
        spark.task.kill()
        assert feeding.result(BACK_S).rows_fed == ROWS
        results = cluster.results(BACK_S)
        # On a slow machine the kill may be noticed when the last rows have been read: no restart.
    assert lost_and_doubled(results, ROWS) == (0, 0)
