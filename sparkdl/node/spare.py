"""A node's children: each is the spare that has imported everything already, if there is one.

Runs in: agent

It decides in `node/spare_state.py`; this file performs. A child knows nothing of its round before
it is given a world (see `node/child.py`), so a spare is a child that has been started early. What
its libraries read from the environment while they are imported is the same for all children of an
agent; what belongs to a round is set in all of them after the import.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil

from sparkdl.control.channel import (
    Checkpointed,
    ChildPipe,
    Consumed,
    Imported,
    Local,
    Raised,
    Reported,
    Running,
)
from sparkdl.core.failure import signal_name
from sparkdl.core.settings import Environment, Settings
from sparkdl.node import spare_state as states
from sparkdl.node.priority import hurry, stand_back, step_forward
from sparkdl.node.resources import free_memory, total_memory
from sparkdl.node.supervisor import Child, ChildSpec

_log = logging.getLogger(__name__)

_KEPT_FREE = 1 / 8
"""Of all memory, beside what the spare takes: as much as the feeds' rows may."""
_ON_YARN = (
    "YARN counts this container's memory and does not say how much is left; give "
    "Startup(spare=True) if spark.executor.memoryOverhead has room for another process with the "
    "framework imported"
)

_END_S = 5.0
"""How long a process may take to end that was sent SIGKILL; one in the kernel's hands may not."""

OnMessage = Callable[[Local, int], None]
OnExit = Callable[[int], None]


@dataclass(frozen=True)
class Spare:
    """A child that has imported its libraries, or is about to, and has not been used."""

    child: Child
    pipe: ChildPipe
    spec: ChildSpec
    has_imported: bool = False

    def use(self, loop: asyncio.AbstractEventLoop, on_message: OnMessage, on_exit: OnExit) -> None:
        """Have it wait no longer for what others leave, and tell `on_exit` and `on_message`."""
        step_forward(self.child.pid)
        self.child.forget_oom_kills()
        self.child.watch(loop, on_exit)
        self.pipe.on_message = on_message


class Children:
    """Starts a node's children, and keeps a spare. Runs on the loop; its owner calls `close`.

    Args:
        say: takes a line for the node's log.
        kept: of an earlier launch; the first child, if it fits.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spec: ChildSpec,
        settings: Settings,
        environment: Environment,
        say: Callable[[str], None],
        kept: Spare | None = None,
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._say = say
        self._kept = kept
        self._spare: Spare | None = None
        self._no_spare = asyncio.Event()
        self._no_spare.set()
        self._timer: asyncio.TimerHandle | None = None
        self._child_nbytes = 0
        is_useful = settings.max_restarts > 0 or settings.keep_warm_s > 0
        is_wanted = is_useful and settings.spare is not False
        self._problem = _ON_YARN if environment.is_yarn and settings.spare is None else ""
        self._state = states.begin(is_wanted)

    def take(self, on_message: OnMessage, on_exit: OnExit) -> tuple[Child, ChildPipe]:
        """Return a child, which is the caller's from here on: the spare, or a new one."""
        if self._spare is not None and (status := self._spare.child.poll()) is not None:
            self._spare_ended(status)
        spare = self._spare or self._kept_that_fits()
        self._handle(states.ChildWanted())
        if spare is None:
            spare = self._start(on_message, on_exit)
        else:
            spare.use(self._loop, on_message, on_exit)
            self._child_nbytes = _resident_nbytes(spare.child.pid)
        return spare.child, spare.pipe

    def hand_over(self) -> Spare | None:
        """Return the spare, or a new one, which is the caller's; none where there is no room."""
        if self._spare is None and not lack_of_memory(self._child_nbytes):
            self._start_spare()
        spare, self._spare = self._spare, None
        self._no_spare.set()
        has_imported = isinstance(self._state, states.Waiting)
        self.end()
        return None if spare is None else replace(spare, has_imported=has_imported)

    def note(self, message: Local, child: Child) -> None:
        """Learn from what the node's child says how far it is."""
        match message:
            case Imported():
                self._child_nbytes = _resident_nbytes(child.pid)
            case Running():
                self._handle(states.MapFunEntered())
            case Reported() | Checkpointed():
                self._stepped()
            case Consumed() if message.steps:
                self._stepped()

    def child_ended(self) -> None:
        """Learn that the node's child has ended."""
        self._handle(states.ChildEnded())

    def end(self) -> None:
        """Kill the spare, and make no other."""
        self._handle(states.NodeEnded())

    async def close(self) -> None:
        """Wait until the spare, which is killed, has ended."""
        self.end()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._no_spare.wait(), _END_S)

    def _stepped(self) -> None:
        if isinstance(self._state, states.Absent):
            self._handle(states.StepTaken())

    def _handle(self, event: states.Event) -> None:
        self._state, actions = states.step(self._state, event, time.monotonic())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for action in actions:
            self._perform(action)
        wait_s = self._state.deadline_s - time.monotonic()
        if not math.isinf(wait_s) and self._timer is None:
            self._timer = self._loop.call_later(
                max(0.0, wait_s), self._handle, states.DeadlinePassed()
            )

    def _perform(self, action: states.Action) -> None:
        match action:
            case states.StartSpare():
                problem = self._problem or lack_of_memory(self._child_nbytes) or self._start_spare()
                if problem:
                    self._handle(states.SpareFailed(problem))
            case states.HurrySpare():
                assert self._spare is not None
                hurry(self._spare.child.pid)
            case states.UseSpare():
                self._spare = None
                self._no_spare.set()
            case states.DropSpare():
                self._drop()
            case states.Tell(reason):
                _log.warning("No spare child: %s", reason)
                self._say(f"no process with imported libraries is kept for a restart: {reason}")

    def _kept_that_fits(self) -> Spare | None:
        kept, self._kept = self._kept, None
        if kept is None or (kept.spec == self._spec and kept.child.poll() is None):
            return kept
        _log.info("The child that was kept is of no use: other GPUs, or it has ended")
        self._spare = kept
        self._no_spare.clear()
        self._drop()
        return None

    def _start(self, on_message: OnMessage, on_exit: OnExit) -> Spare:
        child = Child.spawn(self._spec)
        child.watch(self._loop, on_exit)
        return Spare(child, ChildPipe(self._loop, child.sock, on_message), self._spec)

    def _start_spare(self) -> str:
        """Return why there is none, in words; empty if there is."""
        try:
            self._spare = self._start(self._on_spare_message, self._spare_ended)
        except OSError as error:  # too many processes or descriptors
            return str(error)
        self._no_spare.clear()
        self._spare.child.log.watch(self._loop)
        stand_back(self._spare.child.pid)
        return ""

    def _drop(self) -> None:
        if self._spare is None:  # there was no room
            return
        child, pipe, self._spare = self._spare.child, self._spare.pipe, None
        if child.poll() is None:
            child.watch(self._loop, lambda status: self._no_spare.set())
        else:
            self._no_spare.set()
        child.signal_group(signal.SIGKILL)  # and what it has started
        pipe.close()
        child.close()

    def _on_spare_message(self, message: Local, fd: int) -> None:
        if self._spare is None:
            return  # it is being dropped
        if isinstance(message, Imported):
            self._handle(states.SpareImported())
        elif isinstance(message, Raised):
            self._handle(states.SpareFailed(message.failure.message))

    def _spare_ended(self, status: int) -> None:
        if self._spare is None:
            return
        how = f"ended with code {status}" if status >= 0 else f"was ended by {signal_name(-status)}"
        last = " ".join(self._spare.child.log.tail(1))
        self._handle(states.SpareFailed(f"it {how} {last}".rstrip()))


def lack_of_memory(wanted_nbytes: int) -> str:
    """Return why there is no room for a process of this size, in words; empty if there is."""
    free, kept = free_memory(), int(total_memory() * _KEPT_FREE)
    if free - wanted_nbytes >= kept:
        return ""
    wanted, free, kept = (nbytes >> 20 for nbytes in (wanted_nbytes, free, kept))
    return f"it would take {wanted} MB; {free} MB are free, of which {kept} MB are to stay free"


def _resident_nbytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
