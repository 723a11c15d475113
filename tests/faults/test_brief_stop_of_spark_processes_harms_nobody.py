"""Processes of Spark are stopped (SIGSTOP) while they feed, and go on (SIGCONT) after a while."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import sparkdl
from sparkdl.core.deadline import Deadline
from tests.doubles.ledger import Plan, lost_and_doubled, slowly, train
from tests.doubles.nodes import processes
from tests.faults.conftest import SparkProcesses

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 2 * 8 * 20
STOP_S = 0.5
BACK_S = 90.0


@pytest.mark.deep  # nodes and agents that stop are in the default run
def test_brief_stop_of_spark_processes_harms_nobody(
    spark_standalone: SparkSession, tmp_path: Path
) -> None:
    """An executor, a worker, a feeder, and the task of a node, one after the other."""
    rows = spark_standalone.range(ROWS, numPartitions=3).withColumnRenamed("id", "row")
    never = threading.Event()
    with sparkdl.launch(
        spark_standalone,
        train,
        Plan(every=10),
        2,
        framework="plain",
        checkpoint_dir=str(tmp_path),
        max_restarts=2,
        startup=sparkdl.Startup(placement="attached"),
    ) as cluster:
        feeding = cluster.feed_async(rows.mapInArrow(slowly, "row long"))
        assert cluster._controller.wait_for(lambda v: v.progress > 3, Deadline.after(BACK_S))
        spark = SparkProcesses.of(processes()["worker:1"].agent)
        feeders = spark.feeders()
        assert feeders
        for stopped in ([spark.executor], [spark.worker], feeders, [spark.task]):
            for process in stopped:
                process.suspend()
            never.wait(STOP_S)
            for process in stopped:
                process.resume()
        assert not feeding.done()
        assert feeding.result(BACK_S).rows_fed == ROWS
        results = cluster.results(BACK_S)
        assert cluster.world.generation == 0
    assert lost_and_doubled(results, ROWS) == (0, 0)
