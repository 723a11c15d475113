"""A node's child: one process after another, each with its pipe, log and port.

Runs in: agent
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from sparkdl.control.channel import Beat, ChildPipe, Local, Start
from sparkdl.control.descriptors import nameless_file
from sparkdl.control.lease import beat_s
from sparkdl.core.deadline import Deadline
from sparkdl.core.failure import Failure
from sparkdl.core.settings import Environment, visible_gpus
from sparkdl.core.world import FIRST_TIME, Resume, World
from sparkdl.frameworks.framework import framework_named
from sparkdl.node.error_lines import Marker, unmarked
from sparkdl.node.forks import CAN_FORK, exit_status, prepare_fork, start_fork
from sparkdl.node.gpus import share_gpus
from sparkdl.node.no_spark import FILES
from sparkdl.node.resources import oom_kills, own_host, reserve_port
from sparkdl.node.spec import AgentSpec

_log = logging.getLogger(__name__)

_STACKS_SIGNAL = signal.SIGUSR1
_ANSWER_S = 3.0
"""How long a child may take to begin, before its process is described instead."""
_STRANGER_S = 0.2
_LOOK_S = 0.05
"""A stack that has not grown for so long is complete: faulthandler writes without pauses."""

LAST_LINES = 1000
"""How many of an ended child's last lines the driver keeps."""
_PIPE_NBYTES = 1024 * 1024
_MAX_LINE_CHARS = 2000
_MAX_REST_NBYTES = 64 * 1024


class ChildLog:
    """The pipe that takes a child's stdout and stderr; keeps the last of it in memory.

    No disk takes part, so a full one cannot be what a node fails of. A child that prints faster
    than its agent reads waits for it, as it would in a terminal.

    Args:
        kept_chars: of lines that wait to be handed on, at most.
        read_chars: handed on at once, so that a burst still fits into one message.
    """

    def __init__(self, kept_chars: int = 4 << 20, read_chars: int = 1 << 20) -> None:
        # JSON may make six bytes of one, and a message to the driver holds 16 MiB.
        self.kept_chars, self.read_chars = kept_chars, read_chars
        # The agent keeps both ends: a pipe without a writer would have the loop spin.
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        with suppress(AttributeError, OSError):  # as large as the system has it
            fcntl.fcntl(self._write_fd, fcntl.F_SETPIPE_SZ, _PIPE_NBYTES)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_print: Callable[[], None] = lambda: None
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._new: deque[str] = deque()
        self._nbytes = self._new_chars = self._lost_chars = 0
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
        if self._read_fd < 0:
            return
        self._take()
        if self._loop:
            self._loop.remove_reader(self._read_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)
        self._read_fd = self._write_fd = -1

    def add(self, text: str) -> None:
        self._take()
        self._keep(Marker()(f"{text}\n").encode(errors="replace"))
        self._on_print()

    def nbytes(self) -> int:
        self._take()
        return self._nbytes

    def tail(self, lines: int = LAST_LINES) -> tuple[str, ...]:
        self._take()
        found = [*self._last, *_lines(self._rest)]
        return tuple(map(unmarked, found[-lines:])) if lines > 0 else ()

    def new_lines(self, is_last: bool = False) -> tuple[str, ...]:
        """Return the whole lines since the last call; with `is_last` an unfinished one as well.

        Error lines still have their marks. After a burst, call it until it returns nothing.
        Output dropped by then is left out, and a line says how much.
        """
        self._take()
        if is_last:
            self._finish(self._rest)
            self._rest = b""
        found, chars = list[str](), 0
        if self._lost_chars:
            found.append(f"sparkdl: {self._lost_chars} characters dropped: printed too fast")
            self._lost_chars = 0
        while self._new and chars < self.read_chars:
            found.append(self._new.popleft())
            chars += len(found[-1])
        self._new_chars -= chars
        return tuple(found)

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
        self._nbytes += len(data)
        data = self._rest + data
        cut = data.rfind(b"\n") + 1
        # A line without an end must not be held back for ever.
        if len(data) - cut > _MAX_REST_NBYTES:
            cut = len(data)
        self._rest = data[cut:]
        self._finish(data[:cut])

    def _finish(self, data: bytes) -> None:
        for line in _lines(data):
            self._last.append(line)
            self._new.append(line)
            self._new_chars += len(line)
        while self._new_chars > self.kept_chars:
            lost = len(self._new.popleft())
            self._new_chars, self._lost_chars = self._new_chars - lost, self._lost_chars + lost


def _lines(data: bytes) -> list[str]:
    """Split into lines; of a line that was overwritten by carriage returns, keep the last state."""
    lines = []
    for raw in data.decode(errors="replace").split("\n"):
        states = [part for part in raw.split("\r") if part.strip()]
        if states:
            lines.append(states[-1][:_MAX_LINE_CHARS])
    return lines


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
        self.sock, self._child_end = socket.socketpair()
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
        self._group_killed = False

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
        fds = (child._child_end.fileno(), child.stacks.fd, child._log_fd)
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
        spec, fds = self._spec, (self._child_end.fileno(), self.stacks.fd)
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
            self._child_end.close()
            os.close(self._log_fd)
            self._log_fd = -1

    def watch(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[int], None]) -> None:
        """Call `on_exit` on the loop with `Popen.returncode` when the spawned child has ended."""
        process, self._on_exit = self._process, on_exit
        assert process is not None
        watch_end(loop, process.wait, lambda: self._end(process.wait()))

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
        if self._group_killed:
            return
        # Signal the group once more after the child has ended, for processes it has left there.
        # Then never again: the number may become that of another group.
        self._group_killed = self._status is not None
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
        self._close_theirs()
        self.sock.close()
        self.log.close()
        self.stacks.close()


def watch_end(
    loop: asyncio.AbstractEventLoop, wait: Callable[[], object], on_end: Callable[[], None]
) -> None:
    """Call `on_end` once on the loop when `wait` has returned, which has a thread of its own.

    Why not asyncio's child watcher? The executor's JVM is watched as well, and is no child. Why no
    pidfd? Older kernels and other systems than Linux have none.
    """

    def run() -> None:
        wait()
        with suppress(RuntimeError):  # the loop is closed: nothing waits for it
            loop.call_soon_threadsafe(on_end)

    threading.Thread(target=run, name="sparkdl-wait", daemon=True).start()


def wait_for_stranger(pid: int) -> None:
    """Wait until a process that is no child has ended, though its parent may not have noticed."""
    never = threading.Event()
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            never.wait(_STRANGER_S)


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
            # The handler does not say when it is done: an unchanged size does.
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
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _why_silent(pid: int) -> str:
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "the child has ended"
    state = "stopped (SIGSTOP)" if status == psutil.STATUS_STOPPED else status
    return f"no Python stacks within {_ANSWER_S:g} s: process {pid} is {state}"


class NodeChild:
    """The child of a node. It runs once this is made; the owner calls `close`.

    Args:
        payload: the file with the user's code.
        on_message: takes the child's messages, with a descriptor or -1.
        on_exit: takes `Popen.returncode`, after the last message.

    Attributes:
        host: the node's address.
        generation: the generation of `process`, the child started last.
        rank: in the last world given to a child of this node; -1 before the first one.
        resume: where that world began.
    """

    def __init__(
        self,
        agent_spec: AgentSpec,
        payload: Path,
        on_message: Callable[[Local, int], None],
        on_exit: Callable[[int], None],
    ) -> None:
        spec, node = agent_spec.spec, agent_spec.node
        self._spec, self._payload = agent_spec, payload
        self._on_message, self._exited = on_message, on_exit
        self.host = own_host(agent_spec.address, Environment.read())
        self._gpus = share_gpus(spec.gpus_of(node), agent_spec.gpus, node.name)
        environment = {"PYTHONUNBUFFERED": "1", FILES: agent_spec.spark_files}
        environment |= self._gpus.environment
        self._child_spec = ChildSpec(spec.framework, environment, spec.preload, node.name)
        # YARN counts pages that processes share for each of them, and ends a container by the sum.
        has_server = CAN_FORK and not Environment.read().is_yarn
        self._forks = has_server and spec.settings.can_restart
        self.rank, self.resume = -1, FIRST_TIME
        self._start(0)
        self._beat()

    def restart(self, generation: int) -> None:
        self.process.close()
        self._port.close()
        # Another port in each round: the last one may have been lost to another process.
        self._start(generation)

    def begin(self, world: World, resume: Resume) -> None:
        node, framework = self._spec.node, framework_named(self._spec.spec.framework)
        self.rank, self.resume = world.member(node.node_id).rank, resume
        own = {"SPARKDL_NODE": node.name, "SPARKDL_AGENT_PID": str(os.getpid())}
        about = (world, node.node_id, self._spec.spec, resume, str(self._payload), own)
        # Some servers want a descriptor of the port that is the only one.
        port = os.dup(self._port.fileno()) if framework.shares_port else self._port.detach()
        self.send(Start(*about), port)

    @property
    def gpus(self) -> tuple[str, ...]:
        return visible_gpus(self._gpus.environment) or ()

    @property
    def port(self) -> int:
        return int(self._port.getsockname()[1])

    def send(self, message: Local, fd: int = -1) -> None:
        self._pipe.send(message, fd)

    def say(self, text: str) -> None:
        self.process.log.add(f"sparkdl: {text}")

    def close(self) -> None:
        self._beating.cancel()
        self._pipe.close()
        self.process.close()
        self._port.close()
        self._gpus.close()

    def _start(self, generation: int) -> None:
        self.generation = generation
        self._port = reserve_port(self.host, Environment.read())
        loop = asyncio.get_running_loop()
        process = self._fork(loop) if self._forks else None
        if process is None:
            process = Child.spawn(self._child_spec)
            process.watch(loop, self._on_exit)
        self.process = process
        self._pipe = ChildPipe(loop, self.process.sock, self._on_message)
        if self._gpus.note:
            self.say(self._gpus.note)

    def _fork(self, loop: asyncio.AbstractEventLoop) -> Child | None:
        try:
            return Child.fork(loop, self._child_spec, self._on_exit)
        except OSError as error:  # the path of its socket may be too long, for example
            _log.warning("The fork server is not available, so restarts are slower: %s", error)
            self._forks = False
            return None

    def _on_exit(self, status: int) -> None:
        self._pipe.close()  # reads the child's last words first
        self._exited(status)

    def _beat(self) -> None:
        self.send(Beat())
        wait_s = beat_s(self._spec.spec.settings.lease_s)
        self._beating = asyncio.get_running_loop().call_later(wait_s, self._beat)
