"""Real agents with real children, under a controller and without a cluster's handle."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cloudpickle
import msgspec
import pytest

from sparkdl.control.auth import new_token
from sparkdl.control.values import decode_value
from sparkdl.core.deadline import Deadline
from sparkdl.core.spec import WORKER, ClusterSpec, NodeSpec
from sparkdl.driver.controller import Controller
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.lifecycle.state import AgentRegistry
from sparkdl.driver.view import ClusterView
from sparkdl.node.context import NodeContext
from sparkdl.node.spec import AgentSpec, StatusLine, start_agent
from tests.doubles.nodes import SOON_S, NodeProcesses, all_gone, processes

MapFun = Callable[[Any, NodeContext], Any]
HASTY_AGENT = """\
import sparkdl.node.agent
import sparkdl.node.state
sparkdl.node.state.EXIT_GRACE_S = 0.2
raise SystemExit(sparkdl.node.agent.main())
"""
SPEC = ClusterSpec("c", (NodeSpec(0, WORKER, 0),), framework="plain")
DETACHED = replace(SPEC, placement="detached")


class Node:
    def __init__(self, map_fun: MapFun, spec: ClusterSpec = SPEC) -> None:
        self.payload = cloudpickle.dumps((map_fun, None))
        token = new_token()
        self.controller = Controller(spec, token, Mock(spec_set=Executor))
        url = self.controller.start("127.0.0.1", (0,)).url
        self.agent_spec = AgentSpec(url, token, 0, spec, "process")
        self.agent: subprocess.Popen[bytes] | None = None

    def start(self, executor: int | None = None) -> Node:
        """Start the agent, as a task does if there is an `executor` that it can go over to."""
        if executor is not None:
            self.agent_spec = msgspec.structs.replace(
                self.agent_spec, owner="task", executor_pid=executor
            )
        with tempfile.TemporaryFile() as stderr:
            agent = start_agent(self.agent_spec, self.payload, sys.path, stderr.fileno())
        assert isinstance(agent, subprocess.Popen)
        self.agent = agent
        return self

    def wait(self, is_true: Callable[[ClusterView], bool]) -> states.State:
        assert self.controller.wait_for(is_true, Deadline.after(SOON_S)), self.controller.view
        return self.controller.look(lambda view: view.state)

    def in_map_fun(self) -> NodeProcesses:
        self.wait(lambda view: getattr(view.state, "in_map_fun", frozenset()) == {0})
        return processes()["worker:0"]

    def result(self) -> Any:
        state = self.wait(lambda view: isinstance(view.state, states.Finished))
        assert isinstance(state, states.Finished)
        return decode_value(state.returned[0].result)

    def stop(self, grace_s: float) -> int | None:
        self.controller.submit(states.StopRequested(grace_s, SOON_S))
        self.wait(lambda view: isinstance(view.state, states.Stopped))
        return self.agent.wait(SOON_S) if self.agent else None

    def close(self) -> None:
        self.controller.close()
        if self.agent:
            with self.agent:
                self.agent.kill()


NewNode = Callable[..., Node]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewNode]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ExitStack() as stack:

        def make(map_fun: MapFun, spec: ClusterSpec = SPEC) -> Node:
            new = Node(map_fun, spec)
            stack.callback(new.close)
            return new

        yield make


def hang(args: None, ctx: NodeContext) -> None:
    signal.pause()


def ignore_term(args: None, ctx: NodeContext) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()


def heed_term(args: None, ctx: NodeContext) -> None:
    def leave(*_: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.pause()


@pytest.mark.parametrize("map_fun", [heed_term, ignore_term])
def test_stop_is_term_then_kill_after_the_grace(node: NewNode, map_fun: MapFun) -> None:
    one = node(map_fun).start()
    pair = one.in_map_fun()
    assert one.stop(grace_s=0.3 if map_fun is ignore_term else 60.0) == 0
    assert all_gone([pair.child])


@pytest.mark.parametrize("goes", ["the owner, which holds its input", "the coordinator"])
def test_agent_dies_with_what_it_serves(node: NewNode, goes: str) -> None:
    one = node(ignore_term).start()
    pair = one.in_map_fun()
    assert one.agent
    assert one.agent.stdin
    one.controller.close() if goes == "the coordinator" else one.agent.stdin.close()
    assert all_gone([pair.child])
    assert one.agent.wait(SOON_S) == 0


def is_detached(view: ClusterView) -> bool:
    agents = getattr(view.state, "registry", AgentRegistry(SPEC)).agents
    return any(agent.is_detached for agent in agents.values())


def test_detached_agent_dies_with_its_executor_and_not_with_its_input(node: NewNode) -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as executor:
        one = node(ignore_term, DETACHED).start(executor.pid)
        pair = one.in_map_fun()
        one.wait(is_detached)
        assert one.agent
        assert one.agent.stdin
        assert one.agent.stdout
        lines = [one.agent.stdout.readline() for _ in range(2)]
        status = [msgspec.json.decode(line, type=StatusLine) for line in lines]
        assert [each.is_detached for each in status] == [False, True]
        one.agent.stdin.close()
        for _ in range(2):  # one that has noticed the end of its input answers once at most
            one.controller.fetch_log(0, 1, Deadline.after(SOON_S))
        assert one.agent.poll() is None
        executor.kill()
        assert all_gone([pair.child])
        assert one.agent.wait(SOON_S) == 0


def test_agent_that_still_connects_ends_with_its_owner(node: NewNode) -> None:
    """To a coordinator that takes connections and says nothing, for as long as the lease."""
    one = node(hang)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"ws://127.0.0.1:{silent.getsockname()[1]}"
        one.agent_spec = msgspec.structs.replace(one.agent_spec, url=url)
        one.start()
        assert one.agent
        assert one.agent.stdin
        accepted, _ = silent.accept()
        with accepted:
            one.agent.stdin.close()
            assert one.agent.wait(SOON_S) == 0


def test_child_that_hangs_at_exit_is_killed_and_its_result_counts(
    node: NewNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def leave_thread(args: None, ctx: NodeContext) -> str:
        threading.Thread(target=threading.Event().wait).start()
        return "done"

    hasty = tmp_path / "hasty_agent"
    hasty.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{HASTY_AGENT}'\n")
    hasty.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hasty))
    one = node(leave_thread).start()
    assert one.result() == "done"
    assert one.stop(0) == 0
