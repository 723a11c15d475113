"""Zygotes that stay on Spark's executors for the next launch."""

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

_zygotes: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    yield
    for zygote in _zygotes:
        if zygote.is_running():
            zygote.kill()
    assert all_gone(_zygotes)
    _zygotes.clear()


def tell(args: Any, ctx: NodeContext) -> int:
    return os.getppid()


def run(spark: SparkSession, **startup: Any) -> set[psutil.Process]:
    """Run two nodes; return the zygotes that have forked their children."""
    kept = Startup(**{"keep_warm_s": 60.0, **startup})
    results = sparkdl.run(
        spark, tell, nodes=2, timeout_s=6 * SOON_S, framework="plain", startup=kept
    )
    found = {psutil.Process(zygote) for zygote in results}
    _zygotes.update(found)
    assert all("sparkdl.node.zygote" in zygote.cmdline() for zygote in found)
    return found


@pytest.mark.parametrize(
    "placement", ["attached", pytest.param("detached", marks=pytest.mark.deep)]
)
def test_next_launch_uses_the_zygotes_of_the_last_one_which_hold_no_slot(
    spark_cluster: SparkSession, placement: Placement
) -> None:
    first = run(spark_cluster, placement=placement)
    assert spark_cluster.sparkContext.statusTracker().getActiveStageIds() == []
    assert run(spark_cluster, placement=placement) <= first
    assert not run(spark_cluster, placement=placement, preload=["json"]) & first


@pytest.mark.deep
def test_zygotes_are_others_for_files_that_are_shipped_meanwhile_and_end_with_the_session(
    spark_session_on: Callable[[str], SparkSession], spark_sessions: SparkSessions, tmp_path: Path
) -> None:
    spark = spark_session_on(CLUSTER)
    first = run(spark)
    archive = tmp_path / "shipped.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("shipped_for_a_test.py", "")
    spark.sparkContext.addPyFile(str(archive))
    others = run(spark)
    assert not others & first
    assert run(spark) <= others, "what stays is found again"
    spark_sessions.stop()
    assert all_gone(first | others)
