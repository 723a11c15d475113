"""A Spark worker of a standalone cluster gets the notice of its end, as a spot instance does."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.driver.lifecycle.state import Running
from sparkdl.driver.slots.lost_hosts import executors_of
from sparkdl.driver.view import View
from tests.doubles import sessions
from tests.doubles.ledger import Plan, lost_and_doubled, train
from tests.doubles.nodes import all_gone, processes
from tests.doubles.sessions import SparkSessions
from tests.doubles.until import until
from tests.faults.conftest import SparkProcesses

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTING = "spark.decommission.enabled"
ROWS = 2 * 8 * 1200
BACK_S = 90.0
NOTICED_S = 90.0
"""Two minutes are the longest notice of a cloud; it takes some five seconds here."""


@pytest.fixture
def spark_spot(
    spark_session_on: Callable[..., SparkSession], spark_sessions: SparkSessions
) -> SparkSession:
    """A session on two workers, each with an executor of three cores; notices are on."""
    session = spark_session_on(sessions.NO_WORKERS, {SETTING: "true"})
    for number in range(2):
        options = f"-D{SETTING}=true"
        spark_sessions.add_worker(
            str(session.sparkContext.master), number, 3, SPARK_WORKER_OPTS=options
        )
    assert until(lambda: len(executors_of(session.sparkContext)) == 2, 2 * BACK_S)
    return session


def is_in_second_world(view: View) -> bool:
    return isinstance(view.state, Running) and view.state.world.generation == 1


def warn(process: psutil.Process) -> None:
    """Give the notice of the end of a Spark worker, or of an executor alone."""
    process.send_signal(signal.SIGPWR)


def train_on(spark: SparkSession, nodes: int, folder: Path) -> sparkdl.Cluster:
    """Launch nodes that train slowly, and make a checkpoint only where one is asked for."""
    plan = Plan(every=10_000, pause_s=0.1, is_slow_once=True)
    options: dict[str, Any] = {"checkpoint_dir": str(folder), "max_restarts": 1}
    options["startup"] = sparkdl.Startup(placement="attached")
    return sparkdl.launch(spark, train, plan, nodes, framework="plain", **options)


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_nodes_of_a_worker_that_drains_checkpoint_and_move_within_the_notice(
    spark_spot: SparkSession, tmp_path: Path
) -> None:
    rows = spark_spot.range(ROWS, numPartitions=4).withColumnRenamed("id", "row")
    with train_on(spark_spot, 2, tmp_path) as cluster:
        feeding = cluster.feed_async(rows)
        before = processes(nodes=2)
        spark = {name: SparkProcesses.of(node.agent) for name, node in before.items()}
        drained = spark["worker:1"].worker
        warn(drained)
        assert cluster._controller.wait_for(is_in_second_world, Deadline.after(NOTICED_S))
        status = cluster.status()
        moved = [node.agent for name, node in before.items() if spark[name].worker == drained]
        assert all_gone(moved)
        drained.kill()
        feeding.result(2 * BACK_S)
        results = cluster.results(BACK_S)
        assert cluster.world.generation == 1, "the death of the worker was noticed"
        assert [m.node.name for m in cluster.world.members] == ["worker:0", "worker:1"]
    assert "restart" not in status
    assert lost_and_doubled(results, ROWS) == (0, 0)
