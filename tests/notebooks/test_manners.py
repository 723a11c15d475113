"""A cluster in the kernel of a notebook: its text, its progress bar, and the interrupt button."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

from tests.doubles.gates import Gate
from tests.doubles.nodes import SOON_S, all_gone, processes

pytestmark = pytest.mark.usefixtures("run_name")

DEADLINE_S = 120.0


@dataclass(frozen=True)
class Cell:
    """What became of a cell: its reply, and what was shown while it ran."""

    reply: dict[str, Any]
    shown: list[dict[str, Any]]

    @property
    def text(self) -> str:
        return "".join(m["content"]["text"] for m in self.shown if m["msg_type"] == "stream")

    @property
    def traceback(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(self.reply.get("traceback", ())))

    @property
    def result(self) -> str:
        (found,) = (m for m in self.shown if m["msg_type"] == "execute_result")
        text: str = found["content"]["data"]["text/plain"]
        return text


class Kernel:
    """A kernel of its own process, of this Python."""

    def __init__(self, folder: Path) -> None:
        environment = os.environ | {"IPYTHONDIR": str(folder), "JUPYTER_PLATFORM_DIRS": "1"}
        self._manager = KernelManager(connection_file=str(folder / "kernel.json"))
        self._manager.start_kernel(env=environment, cwd=str(folder))
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=DEADLINE_S)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        ensure_event_loop().close()  # which the two have used

    @property
    def pid(self) -> int:
        provisioner: Any = self._manager.provisioner
        return int(provisioner.pid)

    def begin(self, code: str) -> str:
        cell: str = self._client.execute(code)
        return cell

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def end(self, cell: str) -> Cell:
        shown = []
        end_s = time.monotonic() + DEADLINE_S
        while True:
            message = self._client.get_iopub_msg(timeout=max(0.0, end_s - time.monotonic()))
            shown.append(message)
            is_its = message["parent_header"].get("msg_id") == cell
            if is_its and message["content"].get("execution_state") == "idle":
                break
        while True:
            reply = self._client.get_shell_msg(timeout=DEADLINE_S)
            if reply["parent_header"].get("msg_id") == cell:
                return Cell(reply["content"], shown)

    def run(self, code: str) -> Cell:
        """Run a cell, which must not fail."""
        cell = self.end(self.begin(code))
        assert cell.reply["status"] == "ok", cell.traceback
        return cell


NODES = """
import signal

import sparkdl
from tests.doubles.gates import Gate

spark, rows = None, range(10_000_000)
options = {"framework": "plain", "feeding": sparkdl.Feeding(memory_nbytes=1 << 20)}

def hang(gate, ctx):
    gate.open()
    signal.pause()

def read_a_little(gate, ctx):
    next(iter(ctx.batches(100)))
    hang(gate, ctx)

"""
SESSION = """
from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.master("local[3]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.memory", "768m")
    .config("spark.log.level", "OFF")
    .getOrCreate()
)
rows = spark.range(10_000_000)
"""
ALONE = "options['executor'] = 'local'\n"

FEED = """
with sparkdl.launch(spark, read_a_little, gate, **options) as cluster:
    cluster.feed(rows)
"""
FEED_WITHOUT_WITH = """
cluster = sparkdl.launch(spark, read_a_little, gate, **options)
cluster.feed(rows)
"""
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
print("ranks", sparkdl.run(spark, lambda args, ctx: ctx.rank, **options))
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


def nodes(gate: Gate) -> str:
    """Return the code that says what nodes run, and knows the gate."""
    return f"{NODES}gate = Gate(__import__('pathlib').Path({str(gate.path)!r}))\n"


def test_interrupt_ends_the_training_and_the_next_one_runs(kernel: Kernel, gate: Gate) -> None:
    cell = interrupted(kernel, gate, nodes(gate) + ALONE + FEED_WITHOUT_WITH)
    assert "nodes" in cell.traceback.splitlines()[-1]
    assert len(re.findall(r"^(File|Cell) ", cell.traceback, re.MULTILINE)) <= 2, cell.traceback
    assert "Traceback" not in cell.text
    assert re.search(r"feed 'input': \d+ rows", cell.text)
    assert "; Stopped)" in kernel.run("cluster").result
    assert "ranks [0]\n" in kernel.run(AFTERWARDS.splitlines()[-1]).text
    assert not processes(kernel.pid)


@pytest.mark.deep
@pytest.mark.spark
def test_interrupt_ends_a_feed_a_run_a_shutdown_and_a_fit_and_the_session_goes_on(
    kernel: Kernel, gate: Gate
) -> None:
    # Spark's own handler of the signal is in force in the cell that makes the session.
    interrupted(kernel, gate, nodes(gate) + SESSION + FEED_WITHOUT_WITH)
    for code in (FEED, RUN, SHUTDOWN, FIT):
        interrupted(kernel, gate, code)
    assert "jobs []\nrows 10000000 True\nranks [0]\n" in kernel.run(AFTERWARDS).text
