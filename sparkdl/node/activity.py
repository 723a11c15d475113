"""A child's output and progress, for the driver's log, table and hang watch.

Runs in: agent
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from sparkdl.control.channel import Consumed, Local, Reported, Waited
from sparkdl.control.messages import NodeActive
from sparkdl.core.throttle import Throttle
from sparkdl.node.error_lines import Marker, unmarked

PERIOD_S = 0.1
"""Steps go to the coordinator this often at most."""
LAST_LINES = 1000
"""How many of an ended child's last lines the driver keeps."""
_MAX_LOG_PERIOD_S = 10.0
_PIPE_NBYTES = 1024 * 1024
_TAIL_NBYTES = 256 * 1024
_MAX_LINE_CHARS = 4000
_MAX_REST_NBYTES = 64 * 1024


class ChildLog:
    """The pipe that takes a child's stdout and stderr; keeps the last of it in memory.

    No disk takes part, so a full one cannot be what a node fails of. A child that prints faster
    than its agent reads waits for it, as it would in a terminal.

    Args:
        kept_nbytes: kept at least; twice as much at most.
        read_nbytes: read at once at most, so that a burst still fits into one message.
    """

    def __init__(self, kept_nbytes: int = 4 << 20, read_nbytes: int = 1 << 20) -> None:
        # JSON may make six bytes of one, and a message to the driver holds 16 MiB.
        self.kept_nbytes, self.read_nbytes = kept_nbytes, read_nbytes
        # The agent keeps both ends: a pipe without a writer is always readable, so the loop would
        # spin.
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        with suppress(AttributeError, OSError):  # as large as the system has it
            fcntl.fcntl(self._write_fd, fcntl.F_SETPIPE_SZ, _PIPE_NBYTES)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_print: Callable[[], None] = lambda: None
        self._kept = bytearray()
        self._nbytes = 0
        self._offset = 0
        self._rest = b""

    def open_for_child(self) -> int:
        """Return a descriptor to print into; the caller closes it."""
        return os.dup(self._write_fd)

    def watch(
        self, loop: asyncio.AbstractEventLoop, on_print: Callable[[], None] = lambda: None
    ) -> None:
        """Take what comes as it comes, until `close`; `on_print` is called each time."""
        self._loop, self._on_print = loop, on_print
        loop.add_reader(self._read_fd, self._take_and_say)

    def close(self) -> None:
        """Read the output already in the pipe, and nothing later."""
        if self._read_fd < 0:
            return
        self._take()
        if self._loop:
            self._loop.remove_reader(self._read_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)
        self._read_fd = self._write_fd = -1

    def add(self, text: str) -> None:
        """Append lines that are not the child's, as error output."""
        self._take()
        self._keep(Marker()(f"{text}\n").encode(errors="replace"))
        self._on_print()

    def nbytes(self) -> int:
        """Return how much has been printed, in bytes."""
        self._take()
        return self._nbytes

    def tail(self, lines: int = LAST_LINES) -> tuple[str, ...]:
        """Return the last `lines` lines, of the last 256 KiB at most."""
        self._take()
        found = _lines(bytes(self._kept[-_TAIL_NBYTES:]))
        return tuple(deque(map(unmarked, found), maxlen=max(0, lines)))

    def new_lines(self, is_last: bool = False) -> tuple[str, ...]:
        """Return the whole lines since the last call; with `is_last` an unfinished one as well.

        Error lines still have their marks. After a burst, call it until it returns nothing.
        Output dropped by then is left out, and a line says how much.
        """
        self._take()
        gone = self._nbytes - len(self._kept) - self._offset
        lost: tuple[str, ...] = ()
        if gone > 0:
            lost = (f"sparkdl: {gone + len(self._rest)} bytes were printed too fast to be shown",)
            self._offset, self._rest = self._offset + gone, b""
        start = self._offset - (self._nbytes - len(self._kept))
        data = bytes(self._kept[start : start + self.read_nbytes])
        # After a full read more may follow, so the unfinished line is not the last one yet.
        is_last = is_last and len(data) < self.read_nbytes
        self._offset += len(data)
        data = self._rest + data
        cut = data.rfind(b"\n") + 1
        # A line without an end must not be held back for ever.
        if is_last or len(data) - cut > _MAX_REST_NBYTES:
            cut = len(data)
        self._rest = data[cut:]
        return (*lost, *_lines(data[:cut]))

    def _take_and_say(self) -> None:
        self._take()
        self._on_print()

    def _take(self) -> None:
        """Read the pipe; one filling at most, because a child may print without end."""
        for _ in range(_PIPE_NBYTES // 65536):
            try:
                data = os.read(self._read_fd, 65536) if self._read_fd >= 0 else b""
            except BlockingIOError:
                return
            if not data:
                return
            self._keep(data)

    def _keep(self, data: bytes) -> None:
        self._kept += data
        self._nbytes += len(data)
        # Not at each excess: each cut moves all that is kept, so this moves a byte once on average.
        if len(self._kept) > 2 * self.kept_nbytes:
            del self._kept[: -self.kept_nbytes]


def _lines(data: bytes) -> list[str]:
    """Split into lines; of a line that was overwritten by carriage returns, keep the last state."""
    lines = []
    for raw in data.decode(errors="replace").split("\n"):
        states = [part for part in raw.split("\r") if part.strip()]
        if states:
            lines.append(states[-1][:_MAX_LINE_CHARS])
    return lines


def log_period_s(hang_timeout_s: float | None) -> float | None:
    """Return how often the hang watch wants to know whether a child prints; `None` for never."""
    return None if hang_timeout_s is None else min(_MAX_LOG_PERIOD_S, hang_timeout_s / 4)


class Activity:
    """A child's prints, steps and waits. Runs on the agent's loop.

    Args:
        log_period_s: how often to note that the child has printed something; `None` for never.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[NodeActive], None],
        log_period_s: float | None,
    ) -> None:
        self._report = report
        self._now = self._reported = NodeActive(0)
        self._log: ChildLog | None = None
        self._own: dict[str, int] = {}
        """Batches of the files that the child reads itself, by feed."""
        self._changes = Throttle(loop, self._report_now, PERIOD_S)
        self._prints = None
        if log_period_s is not None:
            self._prints = Throttle(loop, self._note_print, log_period_s)

    def begin(self, generation: int, log: ChildLog) -> None:
        """Watch another child."""
        self._now = self._reported = NodeActive(generation)
        self._own.clear()
        self._log = log

    def note(self, message: Local) -> None:
        """Take what the child says."""
        now = self._now
        match message:
            case Reported(step, metrics):
                now = replace(now, step=step, metrics=metrics)
            case Waited(watched_s, rows_s, others_s):
                now = replace(now, watched_s=watched_s, rows_s=rows_s, others_s=others_s)
            case Consumed(feed, is_own=True):
                self._own[feed] = message.given.steps
                now = replace(now, batches=sum(self._own.values()))
            case _:
                return
        self._change(now)

    def printed(self) -> None:
        """Note that the child has printed something."""
        if self._prints is not None:
            self._prints.request()

    def close(self) -> None:
        """Report nothing more."""
        for throttle in (self._changes, self._prints):
            if throttle is not None:
                throttle.cancel()

    def _change(self, now: NodeActive) -> None:
        self._now = now
        if now != self._reported:
            self._changes.request()

    def _report_now(self) -> None:
        self._reported = self._now
        self._report(self._now)

    def _note_print(self) -> None:
        if self._log is not None:
            self._change(replace(self._now, log_nbytes=self._log.nbytes()))
