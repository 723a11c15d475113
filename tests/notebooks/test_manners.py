"""A cluster in the kernel of a notebook: its text, its progress bar, and the interrupt button."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.gates import Gate
from tests.doubles.nodes import SOON_S, all_gone, processes
from tests.notebooks.kernels import Cell, Kernel

pytestmark = pytest.mark.usefixtures("run_name")

SESSION = """
import os, signal
from pyspark.sql import SparkSession

import sparkdl
from tests.doubles.gates import Gate

spark = (
    SparkSession.builder.master("local[3]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.memory", "768m")
    .config("spark.log.level", "OFF")
    .getOrCreate()
)
rows = spark.range(10_000_000)
options = {"framework": "plain", "feeding": sparkdl.Feeding(memory_nbytes=1 << 20)}

def hang(gate, ctx):
    gate.open()
    signal.pause()

def read_a_little(gate, ctx):
    next(iter(ctx.batches(100)))
    hang(gate, ctx)

"""

FEED = """
with sparkdl.launch(spark, read_a_little, gate, **options) as cluster:
    cluster.feed(rows)
"""
FEED_WITHOUT_WITH = "cluster.feed(rows)"
SHUTDOWN = """
from sparkdl.tfos import TFCluster
cluster = TFCluster.run(spark.sparkContext, hang, gate, 1, framework="plain")
cluster.shutdown()
"""
RUN = "sparkdl.run(spark, hang, gate, framework='plain')"
FIT = """
fit = sparkdl.TFEstimator(lambda args, ctx: hang(gate, ctx)).setFramework("plain").setClusterSize(1)
fit.fit(spark.range(100))
"""
AFTERWARDS = """
import time

running = spark.sparkContext.statusTracker().getActiveJobsIds
for _ in range(100):
    if running():
        time.sleep(0.1)
print("jobs", list(running()))
print("rows", rows.count(), SparkSession.getActiveSession() is not None)
print("ranks", sparkdl.run(spark, lambda args, ctx: ctx.rank, framework="plain"))
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    with Kernel(tmp_path) as kernel:
        yield kernel


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate.at(tmp_path / "gate")


def interrupted(kernel: Kernel, gate: Gate, code: str) -> Cell:
    """Run a cell, interrupt it when a node is at the gate, and look for what is left of it."""
    cell = kernel.begin(code)
    gate.wait()
    nodes = [each for pair in processes(kernel.pid).values() for each in (pair.agent, pair.child)]
    assert nodes
    kernel.interrupt()
    end = kernel.end(cell)
    assert end.reply["status"] == "error", end.text
    assert end.reply["ename"] == "KeyboardInterrupt", end.traceback
    assert all_gone(nodes, within_s=SOON_S)
    return end


def session(gate: Gate) -> str:
    """Return the code that makes a session, and knows the gate."""
    return f"{SESSION}gate = Gate(__import__('pathlib').Path({str(gate.path)!r}))\n"


@pytest.mark.spark
def test_interrupt_ends_the_training_and_the_session_goes_on(kernel: Kernel, gate: Gate) -> None:
    # Spark's own handler of the signal is in force in the cell that makes the session.
    interrupted(kernel, gate, session(gate) + FEED)

    shown = kernel.run("cluster = sparkdl.launch(spark, read_a_little, gate, **options)\ncluster")
    assert re.fullmatch(r"Cluster\(\w+: worker:0; Running\)", shown.result)
    cell = interrupted(kernel, gate, FEED_WITHOUT_WITH)
    assert "nodes" in cell.traceback.splitlines()[-1]
    assert len(re.findall(r"^(File|Cell) ", cell.traceback, re.MULTILINE)) <= 2, cell.traceback
    assert "Traceback" not in cell.text
    assert re.search(r"feed 'input': \d+ rows", cell.text)
    assert "; Stopped)" in kernel.run("cluster").result
    assert "jobs []\nrows 10000000 True\nranks [0]\n" in kernel.run(AFTERWARDS).text
    assert not processes(kernel.pid)


@pytest.mark.deep
@pytest.mark.spark
def test_interrupt_ends_a_run_a_shutdown_and_a_fit(kernel: Kernel, gate: Gate) -> None:
    kernel.run(session(gate))
    for code in (RUN, SHUTDOWN, FIT):
        interrupted(kernel, gate, code)
    assert "jobs []\n" in kernel.run(AFTERWARDS).text
