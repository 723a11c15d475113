"""Ctrl-C at exactly one place, or two, in what the main thread does; and nodes without processes.

Python raises an interrupt when a function of its own begins, and when one of C has returned. The
profiler is called in just these places, and what it raises is raised there.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sparkdl.control.messages import ChildReady, ChildReturned, Hello
from sparkdl.core.deadline import Deadline
from sparkdl.core.spec import NodeSpec
from sparkdl.driver.ending import Ending
from sparkdl.driver.executors.executor import Launch
from sparkdl.driver.lifecycle import state as states


class Interrupts:
    """Interrupts this thread where it comes to a certain place.

    Args:
        first: the number of the place.
        second: how many places later it is interrupted again; 0 for not at all. The first
            interrupt then comes at the beginning of a function: places are counted by these.

    Attributes:
        has_come: the first of two.
        are_over: whether it got to all of them.
    """

    def __init__(self, first: int, second: int = 0) -> None:
        self._first, self._second = first, second
        self._left = first
        self.has_come = False
        self.are_over = False

    def during(self, call: Callable[[], Any]) -> Any:
        """Call; return what it does, or the interrupt or error that it has raised."""
        tracer = sys.gettrace()  # of coverage, perhaps
        try:
            gc.disable()  # what it finalizes it would at any place
            if self._second:
                sys.settrace(self._trace)
            sys.setprofile(self._profile)
            return call()
        except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 (the test looks at it)
            return error
        finally:
            self._left = 0  # no interrupt comes any more
            sys.settrace(tracer)
            sys.setprofile(None)
            gc.enable()

    def __repr__(self) -> str:
        return f"Interrupts({self._first}, {self._second})"

    def raise_first(self) -> None:
        """Raise the first of two here."""
        sys.settrace(None)
        self.has_come, self._left = True, self._second
        raise KeyboardInterrupt

    def _trace(self, frame: Any, event: str, arg: Any) -> None:
        if not self.has_come and _counts(frame):
            self._left -= 1
            if self._left == 0:
                self.has_come, self._left = True, self._second
                raise KeyboardInterrupt

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        if event not in ("call", "c_return") or self.has_come != bool(self._second):
            return
        if not self.are_over and _counts(frame):
            self._left -= 1
            if self._left == 0:
                self.are_over = True
                raise KeyboardInterrupt


def _counts(frame: Any) -> bool:
    """Whether an interrupt may come here.

    `Thread.start` may leave a thread that never runs, if it is interrupted. That is Python's own,
    and happens before such a thread has begun anything. What is raised in a finalizer or in a weak
    reference's callback Python itself drops.
    """
    while frame is not None:
        if frame.f_code.co_name == "__del__" or "weakref" in frame.f_code.co_filename:
            return False
        if frame.f_code in (threading.Thread.start.__code__, threading.Thread.__init__.__code__):
            return False
        frame = frame.f_back
    return True


class PlayedNodes:
    """An executor whose nodes are there as soon as they are started, and go when they are told."""

    def __init__(self) -> None:
        self.ending: Ending | None = None
        self.has_started = False
        self.closed = threading.Event()
        self._spec: Any = None

    def gathering(self) -> AbstractContextManager[None]:
        return nullcontext()

    def driver_host(self) -> str:
        return "127.0.0.1"

    def start(self, launch: Launch, on_broken: Callable[[Any], object]) -> None:
        self.has_started = True
        self._spec = launch.spec
        for node in launch.spec.nodes:
            agent = f"agent-{node.node_id}"
            hello = Hello(node.node_id, "", agent, "127.0.0.1", 1, "grpc://x", "process")
            self._say(states.AgentJoined(hello))
            self._say(states.AgentReady(agent, ChildReady(0, 9000 + node.node_id)))

    def finish(self) -> None:
        for node in self._spec.nodes:
            said = ChildReturned(0, b"\xc0")
            self._say(states.ResultReported(f"agent-{node.node_id}", said))

    def relaunch(self, nodes: Sequence[NodeSpec]) -> None:
        pass

    def leave_host(self, host: str) -> None:
        pass

    def forget_task(self, node: NodeSpec) -> None:
        pass

    def thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=run, name=name, daemon=True)

    def is_there(self) -> bool:
        return True

    def cancel_feeds(self, feed: str | None = None) -> None:
        """Have the nodes go: the end has come."""
        if self._spec:
            self._say(states.StopRequested(0.0, 1.0))
        self.go()

    def go(self) -> None:
        for node in self._spec.nodes if self._spec else ():
            self._say(states.AgentLeft(f"agent-{node.node_id}", "it was told to go"))

    def close(self, deadline: Deadline) -> None:
        self.closed.set()

    def _say(self, event: states.Event) -> None:
        assert self.ending
        assert self.ending.controller
        self.ending.controller.submit(event)
