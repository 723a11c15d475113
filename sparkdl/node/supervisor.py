"""A child process: started, watched, asked for its stacks, ended.

Runs in: agent
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess

import psutil

from sparkdl.control.descriptors import nameless_file
from sparkdl.core.deadline import Deadline
from sparkdl.core.failure import Failure
from sparkdl.frameworks.framework import framework_named
from sparkdl.node.activity import ChildLog
from sparkdl.node.forks import exit_status, prepare_fork, start_fork
from sparkdl.node.resources import oom_kills

_log = logging.getLogger(__name__)

_STACKS_SIGNAL = signal.SIGUSR1
_ANSWER_S = 3.0
"""How long a child may take to begin, before its process is described instead."""
_LOOK_S = 0.05
"""A stack that has not grown for so long is complete: faulthandler writes without pauses."""

_REASONS = {
    psutil.STATUS_STOPPED: "is stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "waits inside the kernel, for a disk, a device or a network mount",
    psutil.STATUS_ZOMBIE: "has ended",
    psutil.STATUS_DEAD: "has ended",
}


@dataclass(frozen=True)
class ChildSpec:
    """The start parameters of a child.

    Attributes:
        environment: added to the agent's own.
        preload: modules that it imports after the framework.
        node: the node expected to own it; the child learns its final place later.
    """

    framework: str
    environment: Mapping[str, str]
    preload: tuple[str, ...] = ()
    node: str = ""


class Child:
    """One running child. The agent's side of its pipe is `sock`; the owner calls `close`.

    Attributes:
        pid: its process id, which is its group's as well; 0 while a fork server imports.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self.log = ChildLog()
        self.stacks = StackFile()
        self.sock, self._theirs = socket.socketpair()
        self._log_fd = self.log.open_for_child()
        self._spec = spec
        self.pid = 0
        self._status: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._fork: BaseProcess | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_exit: Callable[[int], None] = lambda status: None
        # The kernel counts for the whole cgroup, since its beginning.
        self._oom_kills_before = oom_kills()
        self._has_swept = False

    @classmethod
    def spawn(cls, spec: ChildSpec) -> Child:
        """Start the child in a process group of its own, so that all it starts ends with it."""
        child = cls(spec)
        try:
            child._spawn()
        except BaseException:
            child.close()
            raise
        return child

    @classmethod
    def fork(
        cls, loop: asyncio.AbstractEventLoop, spec: ChildSpec, on_exit: Callable[[int], None]
    ) -> Child:
        """Have the fork server fork the child once its imports are done.

        Args:
            on_exit: see `watch`.
        """
        child = cls(spec)
        child._loop, child._on_exit = loop, on_exit
        environment = {**spec.environment, "SPARKDL_NODE": spec.node}
        fds = (child._theirs.fileno(), child.stacks.fd, child._log_fd)
        try:
            child._fork = prepare_fork(spec.framework, spec.preload, environment, fds)
        except OSError:
            child.close()
            raise
        # In a thread, since it waits for the imports.
        start = functools.partial(child._start_fork, loop, child._fork)
        threading.Thread(target=start, name="sparkdl-fork", daemon=True).start()
        return child

    def _start_fork(self, loop: asyncio.AbstractEventLoop, fork: BaseProcess) -> None:
        with suppress(OSError, EOFError):  # the server has been killed: so is its fork
            self.pid = start_fork(fork)
        with suppress(RuntimeError):  # the agent has ended, and the fork with it
            loop.call_soon_threadsafe(self._started, loop, fork)

    def _started(self, loop: asyncio.AbstractEventLoop, fork: BaseProcess) -> None:
        if self._status is not None:  # it was ended before it began
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)
            return
        self._close_theirs()
        if not self.pid:
            self._end(-signal.SIGKILL)
            return

        def end() -> None:
            loop.remove_reader(fork.sentinel)
            self._end(exit_status(fork))

        loop.add_reader(fork.sentinel, end)

    def _end(self, status: int) -> None:
        self._status = status
        self._on_exit(status)

    def _spawn(self) -> None:
        spec, fds = self._spec, (self._theirs.fileno(), self.stacks.fd)
        # SIGUSR1 ends a process without a handler. The child therefore inherits a mask that blocks
        # it, and unblocks it once faulthandler is installed; an earlier signal waits until then.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {_STACKS_SIGNAL})
        try:
            self._process = subprocess.Popen(
                _command(spec, *fds),
                stdin=subprocess.DEVNULL,
                stdout=self._log_fd,
                stderr=self._log_fd,
                env={**os.environ, **spec.environment, "SPARKDL_NODE": spec.node},
                pass_fds=fds,
                # killpg reaches all that the child starts; Ctrl-C at a local driver does not.
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            self._close_theirs()
        self.pid = self._process.pid

    def _close_theirs(self) -> None:
        """Close the child's ends, or the pipes would not end with the child."""
        if self._log_fd >= 0:
            self._theirs.close()
            os.close(self._log_fd)
            self._log_fd = -1

    def watch(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[int], None]) -> None:
        """Call `on_exit` on the loop with `Popen.returncode` when the spawned child has ended."""
        process, self._on_exit = self._process, on_exit
        assert process is not None
        watch_pid(loop, self.pid, lambda: self._end(process.wait()), process.wait)

    def signal_group(self, number: int) -> None:
        """Send a signal to the child and everything that it has started.

        Once the child has been waited for, one signal still goes out, to the processes it left
        behind. No further one does: the system may have reused the group's number.
        """
        if not self.pid:  # it is to be forked: this is the end that it would have had
            if self._loop and self._status is None:
                self._status = -number
                self._loop.call_soon(self._on_exit, -number)
            return
        if self._has_swept:
            return
        # Signal the group once more after the child has ended, for processes it has left there.
        # Then never again: the number may become that of another group.
        self._has_swept = self._status is not None
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            _log.debug("The process group %d has ended already", self.pid)
            if self._fork is not None and self._status is None:  # or has not begun
                with suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def failure(self, status: int) -> Failure:
        """Describe a child that has ended with `status`, as of `poll`, and without a word."""
        spec, now_s, oom_killed = self._spec, time.time(), oom_kills() - self._oom_kills_before
        failure = Failure(spec.node, "signal", "", now_s, pid=self.pid)
        if status >= 0:
            return replace(failure, kind="exit", exit_code=status)
        # The kernel names no process: it only counts the kills of the cgroup.
        if status == -signal.SIGKILL and oom_killed:
            failure = replace(failure, kind="oom")
        # JAX and TensorFlow abort natively when a peer is lost, so only the log shows the cause.
        framework, log = framework_named(spec.framework), "\n".join(self.log.tail())
        is_consequence = status == -signal.SIGABRT and framework.is_peer_lost_in(log)
        return replace(failure, signal_number=-status, is_consequence=is_consequence)

    def close(self) -> None:
        """Release the resources of a child that has ended."""
        self._close_theirs()
        self.sock.close()
        self.log.close()
        self.stacks.close()


def watch_pid(
    loop: asyncio.AbstractEventLoop,
    pid: int,
    on_exit: Callable[[], None],
    wait: Callable[[], object] | None = None,
) -> Callable[[], None]:
    """Call `on_exit` once on the loop when process `pid` ends: pidfd_open(2), or a thread.

    Returns what ends the watch; a thread cannot be ended.

    Why not asyncio's child watcher? The executor's JVM is watched as well, and is no child.

    Args:
        wait: waits for a child of this process, in the thread: nothing else may reap it.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return loop.call_soon(on_exit).cancel
    # AttributeError without pidfd_open (macOS); OSError where the kernel lacks it or a sandbox
    # forbids it.
    except (AttributeError, OSError):
        waits = wait or (lambda: _wait_for_stranger(pid))
        threading.Thread(
            target=_wait_in_thread, args=(loop, waits, on_exit), name="sparkdl-wait", daemon=True
        ).start()
        return lambda: None

    def end() -> None:
        # False for a second call, which could close another file that has been given this number.
        if loop.remove_reader(fd):
            os.close(fd)

    def ready() -> None:
        end()
        on_exit()

    loop.add_reader(fd, ready)
    return end


def _wait_in_thread(
    loop: asyncio.AbstractEventLoop, wait: Callable[[], object], on_exit: Callable[[], None]
) -> None:
    wait()
    with suppress(RuntimeError):  # the loop is closed: nothing waits for it
        loop.call_soon_threadsafe(on_exit)


def _wait_for_stranger(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait()


def _command(spec: ChildSpec, channel_fd: int, stacks_fd: int) -> Sequence[str]:
    numbers = [str(n) for n in (channel_fd, stacks_fd, os.getpid())]
    return [sys.executable, "-m", "sparkdl.node.child", *numbers, spec.framework, *spec.preload]


class StackFile:
    """A file for one child's Python stacks, written on SIGUSR1. The owner calls `close`.

    Its faulthandler writes from within the signal handler, even in C code with the GIL, into a file
    without a name whose descriptor it has inherited; its log is not touched. Nothing is attached to
    the process, so no privileges are needed. https://docs.python.org/3/library/faulthandler.html
    """

    def __init__(self) -> None:
        self.fd = nameless_file("sparkdl-stacks")

    def ask(self, loop: asyncio.AbstractEventLoop, pid: int, then: Callable[[str], None]) -> None:
        """Let process `pid` write its stacks; call `then` on the loop with them or the problem.

        Args:
            pid: of the child that this file was made for.
        """
        if self.fd < 0:
            then("the child has ended")
            return
        if not pid:
            then("the child does not exist yet: the framework is being imported for it")
            return
        start = os.fstat(self.fd).st_size
        deadline = Deadline.after(_ANSWER_S)

        def look(size_before: int) -> None:
            if self.fd < 0:
                then("the child has ended")
                return
            # The handler does not say when it is done. A size that stays the same between two looks
            # does.
            size = os.fstat(self.fd).st_size
            if size_before == size > start:
                then(os.pread(self.fd, size - start, start).decode(errors="replace"))
            elif size == start and deadline.has_passed:
                then(_why_silent(pid))
            else:
                loop.call_later(_LOOK_S, look, size)

        try:
            os.kill(pid, _STACKS_SIGNAL)
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
    """Return why a child has not written its stacks."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "the child has ended"
    reason = _REASONS.get(status, f"is {status}, and did not answer the signal")
    return f"no Python stacks within {_ANSWER_S:g} s: process {pid} {reason}"
