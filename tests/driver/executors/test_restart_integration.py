"""What carries a node dies, and Spark brings another one: the training begins anew with it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.driver.controller import View
from sparkdl.driver.state import Running
from tests.driver.executors import map_funs
from tests.driver.executors.test_spark_integration import (
    executor_of,
    launch,
    node_processes,
    wait_until_gone,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BACK_S = 90.0


def kill_executor(spark: SparkSession, agent: psutil.Process) -> None:
    executor_of(agent.pid).kill()


def kill_agent(spark: SparkSession, agent: psutil.Process) -> None:
    agent.kill()


def cancel_jobs(spark: SparkSession, agent: psutil.Process) -> None:
    spark.sparkContext.cancelAllJobs()


@pytest.mark.parametrize(
    ("placement", "happens"),
    [
        ("attached", kill_agent),
        ("attached", cancel_jobs),
        ("attached", kill_executor),
        ("detached", kill_executor),
    ],
)
def test_lost_node_is_replaced(
    spark_cluster: SparkSession,
    placement: str,
    happens: Callable[[SparkSession, psutil.Process], None],
) -> None:
    with launch(
        spark_cluster,
        map_funs.wait_in_the_first_world,
        placement=placement,
        input_mode="own",
        max_restarts=2,
    ) as cluster:
        agents, children = node_processes(cluster)
        happens(spark_cluster, psutil.Process(min(agents)))
        results = cluster.results(BACK_S)
        assert "was lost" in cluster.status()
    assert [result[0] for result in results] == [0, 1]
    assert all(1 <= result[1] == result[2] <= 2 for result in results)
    wait_until_gone(agents | children)
    assert spark_cluster.range(3).count() == 3


def test_rows_of_a_lost_executor_are_fed_again_and_no_others(
    spark_cluster: SparkSession, tmp_path: Path
) -> None:
    """It takes a node, and the tasks that feed, with it."""
    frame = spark_cluster.range(0, 300, 1, numPartitions=4)
    with (
        launch(
            spark_cluster,
            map_funs.use_rows,
            {"stops_at": 14},
            max_restarts=2,
            checkpoint_dir=str(tmp_path),
        ) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        feeding = pool.submit(cluster.feed, frame, 2)
        saved = cluster._controller.wait_for(
            lambda view: has_checkpoint(view, 12), Deadline.after(BACK_S)
        )
        assert saved, cluster.status()
        agents, _ = node_processes(cluster)
        kill_executor(spark_cluster, psutil.Process(min(agents)))
        report = feeding.result(BACK_S)
        results = cluster.results(BACK_S)
    assert (report.rows_fed, report.rows_used, report.epochs) == (600, 600, 2)
    assert report.rows_covered == 2 * 12 * 8
    assert sorted(row for rows in results for row in rows) == sorted(2 * list(range(300)))


def has_checkpoint(view: View, step: int) -> bool:
    made = view.state.roster.checkpoint if isinstance(view.state, Running) else None
    return made is not None and made.step >= step
