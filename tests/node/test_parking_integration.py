"""Agents that stay for the next launch, on this machine: who is used again, who ends, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import sparkdl
from sparkdl.core.errors import NodeFailedError
from sparkdl.core.options import Startup
from sparkdl.node import warm
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, all_gone, launch

pytestmark = pytest.mark.skipif(not warm.CAN_KEEP, reason="agents are kept on Linux alone")


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    yield
    sparkdl.stop_warm()


def tell(args: Any, ctx: NodeContext) -> dict[str, Any]:
    if args == "fail":
        raise ValueError("as asked")
    return {
        "agent": os.getppid(),
        "child": os.getpid(),
        "node": os.environ["SPARKDL_NODE"],
        "args": args,
        "mode": os.environ.get("MODE"),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "policies": sorted({os.sched_getscheduler(int(t)) for t in os.listdir("/proc/self/task")}),
    }


def run(args: Any = None, keep_warm_s: float = 60.0, **options: Any) -> list[dict[str, Any]]:
    with launch(tell, args, startup=Startup(keep_warm_s=keep_warm_s), **options) as cluster:
        results: list[dict[str, Any]] = cluster.results(3 * SOON_S)
    return results


def agents(results: list[dict[str, Any]]) -> set[psutil.Process]:
    return {psutil.Process(result["agent"]) for result in results}


def waiting_child(agent: psutil.Process) -> psutil.Process:
    (child,) = agent.children()
    return child


def test_next_launch_uses_agents_and_children_of_the_last_one_until_something_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = agents(run("first"))
    children = {waiting_child(agent).pid for agent in first}
    for agent in first:
        ports = [c for c in agent.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert not ports, "an agent that is kept listens at no port"
    again = run("again")
    assert agents(again) == first
    assert {result["child"] for result in again} == children
    assert [result["node"] for result in again] == ["worker:0", "worker:1"]
    assert {result["args"] for result in again} == {"again"}
    for result in again:  # nothing is left of how it stood back
        assert result["policies"] == [os.sched_getscheduler(0)]
        assert result["oom"] == Path("/proc/self/oom_score_adj").read_text()

    waiting = [waiting_child(agent) for agent in first]
    monkeypatch.setenv("MODE", "other")
    others = run(startup=Startup(keep_warm_s=0.0))
    assert {result["mode"] for result in others} == {"other"}
    assert not first & {
        psutil.Process(result["agent"]) for result in others if psutil.pid_exists(result["agent"])
    }
    assert all_gone([*first, *waiting]), "who does not fit is of no use any more"


def test_nothing_is_kept_after_a_failure_or_an_abort() -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(NodeFailedError, match="as asked"):
        run("fail")
    with launch(tell, startup=Startup(keep_warm_s=60.0)) as cluster:
        cluster.wait(3 * SOON_S)
        cluster.abort()
    assert all_gone(set(psutil.Process().children(recursive=True)) - before)


def kill_child(agent: psutil.Process) -> None:
    waiting_child(agent).kill()


def stop_all(agent: psutil.Process) -> None:
    sparkdl.stop_warm()


@pytest.mark.parametrize("end", [kill_child, pytest.param(stop_all, marks=pytest.mark.deep)])
def test_agent_that_is_kept_ends_with_its_child_and_when_it_is_told_to(
    end: Callable[[psutil.Process], None],
) -> None:
    (agent,) = agents(run(nodes=1))
    child = waiting_child(agent)
    end(agent)
    assert all_gone([agent, child])
    sparkdl.stop_warm()  # there is nothing more to do


def test_agent_that_is_not_needed_in_time_ends() -> None:
    (result,) = run(nodes=1, startup=Startup(keep_warm_s=0.2))
    assert not psutil.pid_exists(result["agent"]) or all_gone([psutil.Process(result["agent"])])


DRIVER = """
import json, sys
from tests.node.test_parking_integration import agents, run, waiting_child
them = agents(run())
print(json.dumps([p.pid for agent in them for p in (agent, waiting_child(agent))]), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["killed", pytest.param("ends", marks=pytest.mark.deep)])
def test_agents_that_are_kept_end_with_their_driver(how: str) -> None:
    command = [sys.executable, "-c", DRIVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdin is not None
        them = [
            psutil.Process(int(pid)) for pid in driver.stdout.readline().strip("[]\n").split(",")
        ]
        assert len(them) == 4
        if how == "killed":
            driver.kill()
        driver.stdin.close()
        assert all_gone(them)
