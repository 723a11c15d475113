"""Spark's own progress bar: hidden beside what is printed, shown beside the user's own jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark import InheritableThread

from sparkdl.core.jobs import named_jobs
from sparkdl.driver.executors.console import ConsoleBar
from tests.doubles.gates import Gate
from tests.doubles.screen import on_screen, written_by

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def active_job(spark: SparkSession, gate: Path, is_ours: bool) -> Iterator[None]:
    waits = Gate.at(gate)

    def run() -> None:
        with named_jobs(spark, "sparkdl c", "a job") if is_ours else nullcontext():
            spark.sparkContext.parallelize([1], 1).foreach(lambda _: waits.wait())

    job = InheritableThread(target=run, session=spark)
    job.start()
    with waits.wait_until_reached():
        yield
    job.join()


def test_bar_is_unwanted_beside_our_jobs_alone_and_beside_lines_of_nodes(
    spark_local: SparkSession, tmp_path: Path
) -> None:
    silent = ConsoleBar(spark_local.sparkContext, is_printing=False)
    printing = ConsoleBar(spark_local.sparkContext, is_printing=True)
    assert not silent.is_there, "it is off in tests"
    with active_job(spark_local, tmp_path / "ours", is_ours=True):
        assert silent.is_unwanted()
        with active_job(spark_local, tmp_path / "theirs", is_ours=False):
            assert not silent.is_unwanted()
            assert printing.is_unwanted()
        assert silent.is_unwanted()


def test_there_is_no_bar_over_spark_connect() -> None:
    bar = ConsoleBar(None, is_printing=True)
    assert not bar.is_there
    bar.hide()


PROGRAM = """
import threading
from pyspark.sql import SparkSession
import sparkdl

spark = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")

def train(args, ctx):
    for batch in ctx.batches(100):
        print("read", flush=True)
    for i in range(15):
        threading.Event().wait(0.2)
        print("trains on", flush=True)

for log in (True, False):
    seen = sparkdl.Observe(log_to_driver=log)
    with sparkdl.launch(spark, train, None, 2, framework="plain", observe=seen) as cluster:
        cluster.feed(spark.range(1000, numPartitions=4))
        for i in range(15):
            threading.Event().wait(0.2)
            print("of the program", flush=True)
spark.stop()
"""


@pytest.mark.deep  # a JVM of its own, whose standard error is a terminal
@pytest.mark.spark
def test_on_a_terminal_each_line_stands_alone() -> None:
    written = written_by(PROGRAM, 100)
    assert "[Stage" not in written, "all jobs are ours"
    lines = on_screen(written)
    told = [line for line in lines if "trains on" in line or "of the program" in line]
    assert set(told) == {"[worker:0] trains on", "[worker:1] trains on", "of the program"}
    assert sum("feed 'input': " in line and "1000" in line for line in lines) == 2, lines
