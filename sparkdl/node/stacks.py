"""The Python stacks of a child: it writes them when it gets SIGUSR1, even in C code with the GIL.

Runs in: agent

The child's faulthandler writes from within the signal handler, into a file without a name whose
descriptor it has inherited; its log is not touched. Nothing is attached to the process, so no
privileges are needed. https://docs.python.org/3/library/faulthandler.html
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable

import psutil

from sparkdl.core.deadline import Deadline

SIGNAL = signal.SIGUSR1
ANSWER_S = 3.0
"""How long a child may take to begin, before its process is described instead."""
_LOOK_S = 0.05
"""What has not grown for so long is complete: faulthandler writes without waiting in between."""

_REASONS = {
    psutil.STATUS_STOPPED: "is stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waits inside the kernel, for a disk, a device or a network mount",
    psutil.STATUS_ZOMBIE: "has ended",
    psutil.STATUS_DEAD: "has ended",
}


class StackFile:
    """Where one child writes its stacks. The owner calls `close`."""

    def __init__(self) -> None:
        self.fd = _nameless_file()

    def ask(self, loop: asyncio.AbstractEventLoop, pid: int, then: Callable[[str], None]) -> None:
        """Have process `pid` write its stacks; call `then` on the loop with them, or with why not.

        Args:
            pid: of the child that this file was made for.
        """
        if self.fd < 0:
            then("the child has ended")
            return
        start = os.fstat(self.fd).st_size
        deadline = Deadline.after(ANSWER_S)

        def look(size_before: int) -> None:
            if self.fd < 0:
                then("the child has ended")
                return
            size = os.fstat(self.fd).st_size
            if size_before == size > start:
                then(os.pread(self.fd, size - start, start).decode(errors="replace"))
            elif size == start and deadline.has_passed:
                then(_why_silent(pid))
            else:
                loop.call_later(_LOOK_S, look, size)

        try:
            os.kill(pid, SIGNAL)
        except ProcessLookupError:
            then("the child has ended")
            return
        loop.call_later(_LOOK_S, look, start)

    def close(self) -> None:
        """Close the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _why_silent(pid: int) -> str:
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "the child has ended"
    reason = _REASONS.get(status, f"is {status}, and did not answer the signal")
    return f"no Python stacks within {ANSWER_S:g} s: process {pid} {reason}"


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sparkdl-stacks", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="sparkdl-") as file:
        return os.dup(file.fileno())
