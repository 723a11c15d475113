"""Local clusters of the plain framework, their processes, and what they print."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import pytest

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.core.settings import Settings
from sparkdl.driver.lifecycle.state import Running
from sparkdl.driver.options import LogLine
from sparkdl.driver.view import ClusterView
from tests.doubles.until import until

SOON_S = 30.0
"""Deadline of what takes a moment; a machine may be slow, so it is no measure of speed."""


def launch(
    map_fun: Callable[[Any, Any], Any], args: Any = None, nodes: int = 2, **options: Any
) -> sparkdl.Cluster:
    """Start a cluster without Spark and, unless `options` say otherwise, without a framework."""
    options = {"framework": "plain", "executor": "local", **options}
    return sparkdl.launch(None, map_fun, args, nodes, **options)


def use_settings(patch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Have clusters use these settings, which `launch` has no arguments for."""
    here = partial(Settings, **settings)
    patch.setattr("sparkdl.driver.launch.Settings", here)


def has_checkpoint(view: ClusterView) -> bool:
    """Whether a cluster trains that would go on at a checkpoint."""
    return isinstance(view.state, Running) and view.state.registry.checkpoint is not None


@dataclass(frozen=True)
class NodeProcesses:
    agent: psutil.Process
    child: psutil.Process


def processes(root: int | None = None, nodes: int = 0) -> dict[str, NodeProcesses]:
    """Return the processes of the nodes that process `root` (this one) has started, by node.

    Args:
        nodes: wait until so many have a child.
    """
    return _Processes(root, _wait_for(root, lambda found: len(found) >= nodes))


class _Processes(dict[str, NodeProcesses]):
    """Processes by node; the child of a node that is missing may be started in a moment."""

    def __init__(self, root: int | None, found: dict[str, NodeProcesses]) -> None:
        super().__init__(found)
        self._root = root

    def __missing__(self, node: str) -> NodeProcesses:
        self.update(_wait_for(self._root, lambda found: node in found))
        return self[node]


def _wait_for(
    root: int | None, is_enough: Callable[[dict[str, NodeProcesses]], bool]
) -> dict[str, NodeProcesses]:
    deadline, never = Deadline.after(SOON_S), threading.Event()
    while not is_enough(found := _processes(root)):
        assert not deadline.has_passed, f"only {sorted(found)} have a child"
        never.wait(0.02)
    return found


def _processes(root: int | None) -> dict[str, NodeProcesses]:
    below = {process.pid for process in psutil.Process(root).children(recursive=True)}
    below.add(psutil.Process(root).pid)
    found: dict[str, NodeProcesses] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, ValueError):  # ended meanwhile
            if parts := _child(process, below):
                found[parts[0]] = NodeProcesses(psutil.Process(parts[1]), process)
    return found


def _child(process: psutil.Process, below: set[int]) -> tuple[str, int] | None:
    """Return the node and the agent of a child; `None` for other processes, and what it forks."""
    parent = process.parent()
    if process.pid not in below or parent is None:
        return None
    if is_fork_server(parent):
        parent = parent.parent()
    elif "sparkdl.node.child" not in process.cmdline():
        return None
    if parent is None or "sparkdl.node.agent" not in parent.cmdline():
        return None  # what a child has forked
    return process.environ()["SPARKDL_NODE"], parent.pid


def is_fork_server(process: psutil.Process) -> bool:
    """Whether it is an agent's fork server, or a fork of it."""
    return any("multiprocessing.forkserver" in word for word in process.cmdline())


def all_gone(them: Iterable[psutil.Process], within_s: float = SOON_S) -> bool:
    """Wait until all of `them` have ended; return whether they have."""
    them = list(them)
    return until(lambda: not any(map(is_alive, them)), within_s)


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs: one that has ended is there until its parent reaps it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@dataclass
class Lines:
    """What nodes print; give it to `launch` as `log_to_driver`."""

    heard: list[LogLine] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, line: LogLine) -> None:
        with self.changed:
            self.heard.append(line)
            self.changed.notify_all()

    def of(self, node: str) -> list[str]:
        with self.changed:
            return [line.text for line in self.heard if line.node == node]

    def wait_for(self, text: str, count: int = 1) -> None:
        with self.changed:
            assert self.changed.wait_for(
                lambda: [line.text for line in self.heard].count(text) >= count, SOON_S
            ), f"{text!r} was not heard {count} times in {self.heard}"
