"""What carries a node dies, and Spark brings another one: the training begins anew with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.driver.executors import map_funs
from tests.driver.executors.test_spark_integration import launch, node_processes, wait_until_gone

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BACK_S = 90.0


def kill_executor(spark: SparkSession, agent: psutil.Process) -> None:
    executor = next(parent for parent in agent.parents() if parent.name() == "java")
    assert "CoarseGrainedExecutorBackend" in " ".join(executor.cmdline())
    executor.kill()


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
