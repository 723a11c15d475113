"""What a cluster's children are doing, asked by the driver; and trainings that stand still."""

from __future__ import annotations

import ctypes
import logging
import signal
import threading
from typing import Any

import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import NodeFailedError
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, Lines, launch, processes


def sleep_with_the_gil(args: Any, ctx: NodeContext) -> None:
    """Sleep in C code: worker:1 without letting anybody else have the interpreter."""
    print("in map_fun", flush=True)
    library = ctypes.PyDLL(None) if ctx.rank == 1 else ctypes.CDLL(None)
    library.sleep(600)


def test_stacks_are_told_of_children_that_hold_the_gil_and_of_those_that_are_stopped() -> None:
    lines = Lines()
    with launch(sleep_with_the_gil, nodes=3, on_log=lines) as cluster:
        lines.wait_for("in map_fun", 3)
        them = processes()
        them["worker:2"].child.send_signal(signal.SIGSTOP)
        stacks = cluster.stacks()
        assert list(stacks) == ["worker:0", "worker:1", "worker:2"]
        for node in ("worker:0", "worker:1"):
            assert "in sleep_with_the_gil" in stacks[node]
        assert f"process {them['worker:2'].child.pid} is stopped (SIGSTOP)" in stacks["worker:2"]
        again = cluster.stacks()
        assert again["worker:1"].count("Current thread") <= 1, "each answer stands alone"
        assert not any("sleep_with_the_gil" in line for line in cluster.logs(1))
        cluster.abort()


def stand_still(args: str, ctx: NodeContext) -> int:
    """Take three steps on rank 0 and two on rank 1, then none, in the first world."""
    if ctx.generation > 0:
        return ctx.generation
    for step in range(3 - ctx.rank):
        ctx.report(step=step, loss=0.5)
    threading.Event().wait()  # which goes on waiting when the signal for the stacks comes
    return -1


def test_training_that_stands_still_is_told_of_with_all_stacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with launch(stand_still, hang_timeout=1.0, input_mode="own") as cluster:
        controller = cluster._controller
        logged = [record for record in caplog.records if "no step, no row" in record.message]
        deadline = Deadline.after(SOON_S)
        while not logged and not deadline.has_passed:
            controller.wait_for(lambda view: False, Deadline.after(0.05))
            logged = [record for record in caplog.records if "no step, no row" in record.message]
        (found,) = logged
        assert found.levelno == logging.WARNING
        assert "behind: worker:1 (rank 1) at step 1; ahead: worker:0 (rank 0) at step 2" in (
            found.message
        )
        assert "Stacks of worker:0:" in found.message
        assert found.message.count("in stand_still") == 2
        assert cluster.status() == "Running"
        assert "2, loss 0.5" in cluster._repr_mimebundle_()["text/html"]
        cluster.abort()


def test_training_that_stands_still_fails_if_wanted_and_names_who_is_behind() -> None:
    with (
        pytest.raises(NodeFailedError, match=r"worker:1 \(rank 1, pid") as caught,
        launch(stand_still, hang_timeout=0.5, hang_action="fail", input_mode="own") as cluster,
    ):
        cluster.wait(SOON_S)
    (failure,) = caught.value.failures
    assert failure.kind == "hang"
    assert failure.host
    assert "hung: it made no progress" in str(caught.value)
    assert "while worker:0 (rank 0) is at step 2" in str(caught.value)
    assert "in stand_still" in str(caught.value)


def test_training_that_stands_still_begins_anew_if_wanted() -> None:
    with launch(
        stand_still, hang_timeout=0.5, hang_action="restart", max_restarts=1, input_mode="own"
    ) as cluster:
        assert cluster.results(3 * SOON_S) == [1, 1]
