"""A child dies, and all nodes begin anew in the agents that live; clusters without Spark."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import NodeFailedError, NodeLostError
from sparkdl.core.options import Roles
from sparkdl.driver.lifecycle.state import Gathering
from sparkdl.driver.view import ClusterView
from sparkdl.node.context import NodeContext
from tests.doubles.map_funs import hang
from tests.doubles.nodes import SOON_S, launch, processes


def test_what_fails_at_the_same_row_twice_is_not_started_a_third_time() -> None:
    def trip(args: Any, ctx: NodeContext) -> None:
        for batch in ctx.batches(4, ["value"]):
            if 9 in batch["value"]:
                raise RuntimeError("nine")

    with (
        pytest.raises(NodeFailedError, match="the same way at the same step twice") as caught,
        launch(trip, nodes=1, max_restarts=9) as cluster,
    ):
        cluster.feed(range(100))
    assert [failure.step for failure in caught.value.failures] == [3]
    assert caught.value.root_cause.generation == 1


def test_training_goes_on_without_an_evaluator_that_dies_and_its_feed_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(args: Any, ctx: NodeContext) -> int:
        for _ in ctx.batches(4):
            if ctx.job_name == "evaluator":
                os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    with launch(train, nodes=2, max_restarts=1, roles=Roles(evaluator=True)) as cluster:
        trainer = processes()["worker:0"].child.pid  # it ends once it has been fed
        report = cluster.feed(range(1000), role="evaluator")
        assert report.rows_used < 1000
        assert report.rows_unused <= 1000  # those that a feeder had in hand are unknown
        cluster.feed(range(8))
        assert cluster.results(SOON_S) == [trainer, None]
        assert cluster.status() == "Finished"
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    (told,) = (text for text in warnings if "goes on without" in text)
    assert "goes on without evaluator:0: evaluator:0 (rank" in told
    assert not any("restart" in text for text in warnings)


@pytest.fixture
def no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; while it is there no agent can be started."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # an agent that is killed leaves its files
    file, script = tmp_path / "no-room", tmp_path / "python"
    script.write_text(f'#!/bin/sh\ntest -e {file} && exit 1\nexec {sys.executable} "$@"\n')
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    return file


def test_shutdown_during_a_restart_ends_it_and_tells_why_there_was_one(no_room: Path) -> None:
    with (
        pytest.raises(NodeLostError, match=r"worker:1 .* was lost") as caught,
        launch(hang, max_restarts=1) as cluster,
    ):
        no_room.touch()
        processes(nodes=2)["worker:1"].agent.kill()
        assert cluster._controller.wait_for(_is_gathering, Deadline.after(SOON_S))
        assert cluster.world.size == 2
        cluster.shutdown(timeout_s=0.1)
    assert caught.value.note == "the cluster was stopped before all nodes had restarted"
    assert not processes()


def _is_gathering(view: ClusterView) -> bool:
    return isinstance(view.state, Gathering)
