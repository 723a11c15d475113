"""Agents that stay on Spark's executors for the next launch."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

import sparkdl
from sparkdl.core.options import Placement, Startup
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, all_gone
from tests.doubles.sessions import CLUSTER, SparkSessions


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    yield
    sparkdl.stop_warm()


def tell(args: Any, ctx: NodeContext) -> tuple[int, int]:
    return os.getppid(), os.getpid()


def run(spark: SparkSession, **options: Any) -> dict[psutil.Process, int]:
    """Run two nodes; return the process id of each agent's child."""
    options = {"framework": "plain", "startup": Startup(keep_warm_s=60.0), **options}
    results = sparkdl.run(spark, tell, nodes=2, timeout_s=6 * SOON_S, **options)
    return {psutil.Process(agent): child for agent, child in results}


@pytest.mark.parametrize(
    "placement", ["attached", pytest.param("detached", marks=pytest.mark.deep)]
)
def test_next_launch_uses_the_agents_of_the_last_one_which_hold_no_slot(
    spark_cluster: SparkSession, placement: Placement
) -> None:
    first = run(spark_cluster, startup=Startup(placement=placement))
    waiting = {agent: agent.children()[0] for agent in first}
    assert spark_cluster.sparkContext.statusTracker().getActiveStageIds() == []
    again = run(spark_cluster, startup=Startup(placement=placement))
    assert again == {agent: child.pid for agent, child in waiting.items()}
    others = run(spark_cluster, startup=Startup(placement=placement, preload=["json"]))
    assert not others.keys() & first.keys()
    assert all_gone(first), "who does not fit is of no use any more"
    processes = [*others, *(child for agent in others for child in agent.children())]
    sparkdl.stop_warm()
    assert all_gone(processes)


@pytest.mark.deep
def test_agents_end_for_files_that_are_shipped_meanwhile_and_with_the_session(
    spark_session_on: Callable[[str], SparkSession],
    spark_sessions: SparkSessions,
    tmp_path: Path,
) -> None:
    spark = spark_session_on(CLUSTER)
    first = run(spark)
    archive = tmp_path / "shipped.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("shipped_for_a_test.py", "")
    spark.sparkContext.addPyFile(str(archive))
    others = run(spark)
    assert not others.keys() & first.keys()
    assert all_gone(first)
    assert run(spark).keys() == others.keys(), "what is kept is found again"
    spark_sessions.stop()
    assert all_gone(others)
