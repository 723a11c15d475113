"""A child dies, and all nodes begin anew in the agents that live; clusters without Spark."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import NodeFailedError, NodeLostError
from sparkdl.core.options import Recovery, Roles
from sparkdl.driver.lifecycle.state import Gathering, Running
from sparkdl.driver.view import ClusterView
from sparkdl.node.context import NodeContext
from tests.doubles.gates import Gate
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


def test_evaluator_is_fed_beside_the_workers_which_go_on_when_it_dies_in_a_feed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(args: Any, ctx: NodeContext) -> int:
        batches = ctx.batches(4)
        while ctx.has_epoch():
            for batch in batches:
                if ctx.job_name == "evaluator" and max(batch["value"]) > 9:
                    os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    with launch(train, nodes=2, max_restarts=1, roles=Roles(evaluator=True)) as cluster:
        trainer = processes()["worker:0"].child.pid  # it ends once it has been fed
        evaluating = cluster.feed_async(range(8), role="evaluator")
        assert evaluating.result(SOON_S).rows == {"evaluator:0": 8}
        report = cluster.feed(range(1000), role="evaluator")
        assert report.rows_used < 1000
        assert report.rows_unused <= 1000  # those that a feeder had in hand are unknown
        assert cluster.feed(range(8)).rows == {"worker:0": 8}
        assert cluster.results(SOON_S) == [trainer, None]
        assert cluster.status() == "Finished"
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    (told,) = (text for text in warnings if "continues without" in text)
    assert "continues without evaluator:0: evaluator:0 (rank" in told
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
        assert cluster._controller.wait_for(
            lambda view: isinstance(view.state, Gathering), Deadline.after(SOON_S)
        )
        assert cluster.world.size == 2
        cluster.shutdown(timeout_s=0.1)
    assert caught.value.note == "the cluster was stopped before all nodes had restarted"
    assert not processes()


ROWS = 480


def collect(args: dict[str, Any], ctx: NodeContext) -> list[int]:
    """Train a model that is the list of its rows; the first node has what there was before."""
    last = ctx.last_checkpoint
    step, rows = 0, list[int]()
    if last:
        step = last.step
        if ctx.rank == 0:
            for part in sorted(Path(last).glob("part-*")):
                rows += json.loads(part.read_text())
    for batch in ctx.batches(4, ["value"], even=True):
        rows += batch["value"].tolist()
        step += 1
        if ctx.generation == 0 and ctx.rank == 1 and step == 12:
            args["no_room"].touch()
            agent_pid = int(os.environ["SPARKDL_AGENT_PID"])
            os.kill(agent_pid, signal.SIGKILL)  # this node is lost
            signal.pause()
        if step % 5 == 0:
            if ctx.generation == 1:
                args["no_room"].unlink(missing_ok=True)
            with ctx.checkpoint(step) as folder:
                (folder / f"part-{ctx.rank}").write_text(json.dumps(rows))
            if ctx.generation == 1 and step == 15:
                args["gate"].wait()
            if ctx.generation == 1 and step == 20:
                signal.pause()  # until all begin anew, one more
    return [ctx.generation, ctx.restarts, ctx.num_workers, *rows]


@pytest.mark.smoke
def test_rows_of_a_world_that_shrinks_or_grows_are_used_once(tmp_path: Path, no_room: Path) -> None:
    gate = Gate.at(tmp_path / "gate")
    options: dict[str, Any] = {"max_restarts": 1, "recovery": Recovery(min_nodes=1, wait_s=1.0)}
    folder = tmp_path / "checkpoints"
    args = {"no_room": no_room, "gate": gate}
    with launch(collect, args, checkpoint_dir=str(folder), **options) as cluster:
        feeding = cluster.feed_async(range(ROWS))
        with gate.wait_until_reached():
            assert cluster.world.size == 1
            assert cluster._controller.wait_for(_all_are_ready, Deadline.after(SOON_S))
        feeding.result(3 * SOON_S)
        results = cluster.results(SOON_S)
    assert [result[:3] for result in results] == [[2, 1, 2]] * 2
    assert sorted(row for result in results for row in result[3:]) == list(range(ROWS))


def _all_are_ready(view: ClusterView) -> bool:
    assert isinstance(view.state, Running)
    agents = view.state.registry.agents
    return len(agents) == 2 and all(agent.child for agent in agents.values())
