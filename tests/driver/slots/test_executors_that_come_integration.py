"""Executors come late to a launch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from tests.doubles.sessions import NO_WORKERS, SparkSessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LATE_S = 20.0


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
        for number, after_s in enumerate((1.0, LATE_S))
    ]
    for timer in timers:
        timer.start()
    with sparkdl.launch(spark, count, nodes=2, framework="plain") as cluster:
        assert time.monotonic() - began_s > LATE_S
        cluster.feed(spark.range(40))
        assert sum(cluster.results()) == 40
    for timer in timers:
        timer.join()
    (told,) = (each for each in caplog.records if "for executors" in each.message)
    assert told.levelname == "WARNING"
    assert "Waiting up to 600 s for executors: 2 nodes need 2 task slots at once" in told.message
    assert told.created - began_wall_s < LATE_S / 2, "soon, not when it is over"
