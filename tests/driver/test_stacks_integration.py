"""What a cluster's children are doing, asked by the driver; and trainings that stand still."""

from __future__ import annotations

import ctypes
import signal
import threading
from typing import Any

import pytest

from sparkdl.core.errors import NodeFailedError
from sparkdl.core.options import Feeding, Recovery
from sparkdl.driver.options import Observe
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, Lines, launch, processes


def sleep_with_the_gil(args: Any, ctx: NodeContext) -> None:
    """Sleep in C code, and let nobody else have the interpreter."""
    print("in map_fun", flush=True)
    ctypes.PyDLL(None).sleep(600)


def test_stacks_are_told_of_children_that_hold_the_gil_and_of_those_that_are_stopped() -> None:
    lines = Lines()
    with launch(sleep_with_the_gil, observe=Observe(on_log=lines)) as cluster:
        lines.wait_for("in map_fun", 2)
        them = processes()
        them["worker:1"].child.send_signal(signal.SIGSTOP)
        stacks = cluster.stacks()
        assert list(stacks) == ["worker:0", "worker:1"]
        assert "in sleep_with_the_gil" in stacks["worker:0"]
        assert f"process {them['worker:1'].child.pid} is stopped (SIGSTOP)" in stacks["worker:1"]
        assert not any("sleep_with_the_gil" in line for line in cluster.logs(0))
        cluster.abort()


def stand_still(args: str, ctx: NodeContext) -> int:
    """Take three steps on rank 0 and two on rank 1, then none, in the first world."""
    if ctx.generation > 0:
        return ctx.generation
    for step in range(3 - ctx.rank):
        ctx.report(step=step, loss=0.5)
    threading.Event().wait()  # which goes on waiting when the signal for the stacks comes
    return -1


def test_training_that_stands_still_fails_if_wanted_and_names_who_is_behind() -> None:
    recovery = Recovery(hang_timeout_s=0.5, on_hang="fail")
    with (
        pytest.raises(NodeFailedError, match=r"worker:1 \(rank 1, pid") as caught,
        launch(stand_still, recovery=recovery, feeding=Feeding(fed=False)) as cluster,
    ):
        cluster.wait(SOON_S)
    (failure,) = caught.value.failures
    assert failure.kind == "hang"
    assert failure.host
    assert "hung: it made no progress" in str(caught.value)
    assert "while worker:0 (rank 0) is at step 2" in str(caught.value)
    assert "in stand_still" in str(caught.value)
