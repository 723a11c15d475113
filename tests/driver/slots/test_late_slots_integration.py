"""Launches where slots come late, or where only their number is known."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from tests.doubles.programs import output_of
from tests.doubles.sessions import NO_WORKERS, SparkSessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LATE_S = 20.0


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
        for number, after_s in enumerate((1.0, _LATE_S))
    ]
    for timer in timers:
        timer.start()
    with sparkdl.launch(spark, count, nodes=2, framework="plain") as cluster:
        assert time.monotonic() - began_s > _LATE_S
        cluster.feed(spark.range(40))
        assert sum(cluster.results()) == 40
    for timer in timers:
        timer.join()
    (told,) = (each for each in caplog.records if "for executors" in each.message)
    assert told.levelname == "WARNING"
    assert "Waiting up to 600 s for executors: 2 nodes need 2 task slots at once" in told.message
    assert told.created - began_wall_s < _LATE_S / 2, "soon, not when it is over"


@pytest.mark.deep
@pytest.mark.spark
def test_connect_server_with_a_slot_for_each_node_feeds_them_and_one_with_fewer_is_refused() -> (
    None
):
    program = "tests.driver.slots.connect_program"
    said = output_of(sys.executable, "-m", program, timeout_s=240)
    refused, fed = (line for line in said.splitlines() if " nodes: " in line)
    assert fed == "2 nodes: detached 40"
    assert refused.startswith(
        "3 nodes: 3 nodes need 3 task slots at once, and the Spark Connect server has 2. Ask for "
        "fewer nodes (nodes=, num_executors=), or stop the server and start it with the master "
        "local[3] instead of local[2]"
    )
