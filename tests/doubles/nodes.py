"""Local clusters of the plain framework, their processes, and what they print.

Runs in: the process of pytest
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.driver.lifecycle.state import Running
from sparkdl.driver.logs import LogLine
from sparkdl.driver.view import View

SOON_S = 30.0
"""Deadline of what takes a moment; a machine may be slow, so it is no measure of speed."""


def launch(
    map_fun: Callable[[Any, Any], Any], args: Any = None, nodes: int = 2, **options: Any
) -> sparkdl.Cluster:
    """Start a cluster without Spark and, unless `options` say otherwise, without a framework."""
    options = {"framework": "plain", "executor": "local", **options}
    return sparkdl.launch(None, map_fun, args, nodes, **options)


def has_checkpoint(view: View) -> bool:
    """Whether a cluster trains that would go on at a checkpoint."""
    return isinstance(view.state, Running) and view.state.roster.checkpoint is not None


@dataclass(frozen=True)
class NodeProcesses:
    """The processes of one node."""

    agent: psutil.Process
    child: psutil.Process
    spare: psutil.Process | None = None


def processes(root: int | None = None) -> dict[str, NodeProcesses]:
    """Return the processes of the nodes that process `root` (this one) has started, by node."""
    found: dict[str, NodeProcesses] = {}
    for node, (process, *spares) in _children(root).items():
        agent = process.parent()
        assert agent is not None
        found[node] = NodeProcesses(agent, process, spares[0] if spares else None)
    return found


def _children(root: int | None) -> dict[str, list[psutil.Process]]:
    """Return the children by node; a spare is younger than the child that it stands by for."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.Process(root).children(recursive=True):
        with suppress(psutil.Error):  # ended meanwhile
            parent = process.parent()
            if _is_child(process) and parent is not None and not _is_child(parent):
                found.setdefault(process.environ()["SPARKDL_NODE"], []).append(process)
    return {node: sorted(them, key=psutil.Process.create_time) for node, them in found.items()}


def _is_child(process: psutil.Process) -> bool:
    """Whether it is a child, or has been forked by one."""
    return "sparkdl.node.child" in process.cmdline()


def all_gone(them: Iterable[psutil.Process], within_s: float = SOON_S) -> bool:
    """Wait until all of `them` have ended; return whether they have."""
    deadline, never = Deadline.after(within_s), threading.Event()
    left = list(them)
    while left := [process for process in left if _is_alive(process)]:
        if deadline.has_passed:
            return False
        never.wait(0.02)
    return True


def _is_alive(process: psutil.Process) -> bool:
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
        """Return a node's lines so far."""
        with self.changed:
            return [line.text for line in self.heard if line.node == node]

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until so many lines have been `text`."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: [line.text for line in self.heard].count(text) >= count, SOON_S
            ), f"{text!r} was not heard {count} times in {self.heard}"

    def wait_for_part(self, text: str) -> None:
        """Wait until a line has `text` in it."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: any(text in line.text for line in self.heard), SOON_S
            ), f"{text!r} was not heard in {self.heard}"
