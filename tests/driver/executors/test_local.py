"""Nodes as processes of this machine: how they start, are fed, and end with who started them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import LaunchError
from sparkdl.core.options import Feeding, Roles
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.driver.executors import local
from sparkdl.driver.executors.local import LocalExecutor
from sparkdl.feed.transfer.messages import FeederError
from tests.doubles.feeds import numbers
from tests.doubles.map_funs import hang
from tests.doubles.nodes import SOON_S, all_gone, launch, processes

DRIVERS = Path(__file__).parents[2] / "doubles" / "drivers"


def test_agent_that_cannot_start_fails_the_launch_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"  # in the place of the agents' interpreter
    script.write_text("#!/bin/sh\necho no such library >&2; exit 3\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(LaunchError, match="of worker:0 ended with exit code 3: no such library"):
        launch(hang, nodes=1)


def test_nodes_inside_a_spark_task_share_out_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ClusterSpec("c", plan_nodes(4, Roles(ps=1, chief="chief", evaluator=True)))
    monkeypatch.setattr(local, "assigned_gpus", lambda: ("4", "5", "6", "7"))
    assert [(node.name, gpus) for node, gpus in local._with_gpus(spec, spec.nodes)] == [
        ("ps:0", ()),
        ("chief:0", ("4", "5")),
        ("evaluator:0", ()),
        ("worker:0", ("6", "7")),
    ]
    monkeypatch.setattr(local, "assigned_gpus", lambda: None)
    assert {gpus for _node, gpus in local._with_gpus(spec, spec.nodes)} == {None}


def test_agent_that_ends_late_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # an agent that is killed leaves its files
    cluster = launch(hang, nodes=1, feeding=Feeding(fed=False))
    executor = cluster._executor
    assert isinstance(executor, LocalExecutor)
    them = processes()
    stopped = them["worker:0"]
    stopped.agent.suspend()
    cluster._controller.close()
    executor.close(Deadline.after(0.5))
    assert all_gone([process for pair in them.values() for process in (pair.agent, pair.child)])
    cluster.abort()


def test_cluster_that_nobody_keeps_ends_with_the_program() -> None:
    program = [sys.executable, str(DRIVERS / "forgets_shutdown.py")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        them = [psutil.Process(pid) for pid in json.loads(run.stdout.readline())]
        assert len(them) == 4, "two of each node"
        assert run.wait(SOON_S) == 0
    assert all_gone(them)


def test_partition_of_which_the_reading_was_cancelled_has_not_ended() -> None:
    cancelled = threading.Event()
    batches = local._until(cancelled, iter([numbers(0, 10), numbers(10, 20)]))
    assert next(batches).num_rows == 10
    cancelled.set()
    with pytest.raises(FeederError, match="it was cancelled"):
        next(batches)
