"""A Spark worker of a standalone cluster is killed, and takes the executor of a node along."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.core.options import Placement
from tests.doubles.ledger import Plan, lost_and_doubled, train
from tests.doubles.nodes import has_checkpoint, processes
from tests.doubles.sessions import SparkSessions
from tests.faults.conftest import SparkProcesses

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 2 * 8 * 60
BACK_S = 90.0


def kill_worker(agent: psutil.Process) -> None:
    """Kill the Spark worker of a node, and its executor."""
    spark = SparkProcesses.of(agent)
    spark.worker.kill()
    spark.executor.kill()


@pytest.mark.deep  # of an executor alone tests/driver/executors/test_restart_integration.py does
@pytest.mark.parametrize(("placement", "nodes"), [("attached", 2), ("detached", 3)])
def test_killed_spark_worker_loses_no_row(
    placement: Placement,
    nodes: int,
    spark_standalone: SparkSession,
    spark_sessions: SparkSessions,
    tmp_path: Path,
) -> None:
    """Of six slots there are three left, for the nodes and for feeding."""
    rows = spark_standalone.range(ROWS, numPartitions=3).withColumnRenamed("id", "row")
    with sparkdl.launch(
        spark_standalone,
        train,
        Plan(every=10, pause_s=0.05),
        nodes,
        framework="plain",
        checkpoint_dir=str(tmp_path),
        max_restarts=9,
        recovery=sparkdl.Recovery(min_nodes=1, wait_s=3.0),
        startup=sparkdl.Startup(placement=placement),
    ) as cluster:
        feeding = cluster.feed_async(rows)
        assert cluster._controller.wait_for(has_checkpoint, Deadline.after(BACK_S))
        kill_worker(processes()["worker:1"].agent)
        feeding.result(2 * BACK_S)
        results = cluster.results(BACK_S)
    assert lost_and_doubled(results, ROWS) == (0, 0)
    spark_sessions.stop()  # with one worker it is of no use to other tests
