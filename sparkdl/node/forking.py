"""Finds the zygote of an executor and asks it to fork, for agents and for their starters.

Runs in: driver, feeder, agent, zygote

A zygote (`node/zygote.py`) listens at an abstract Unix socket (unix(7)), so that no file is left
behind however it ends. The name holds a digest of everything that must be the same: a key of the
driver, the executor's process, the environment, the framework. Processes need not agree on a
zygote: if anything differs, the name does, and another zygote is used. The agent makes the socket
and the zygote inherits it. Of several agents, one therefore starts a zygote, and all reach it.

A connection is a process: its first message says what to fork, the answers are `Forked` and, in the
end, `Exited`.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from sparkdl.control.descriptors import nameless_file, peer_of
from sparkdl.core.deadline import Deadline
from sparkdl.core.failure import UNKNOWN_STATUS
from sparkdl.version import __version__

CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")
"""Abstract names, and waiting for a process that is no child."""

MAX_NBYTES = 1 << 16
MAX_FDS = 3
BACKLOG = 128
_ANSWER_S = 10.0
"""How long a zygote may take to accept a request: it may be importing, or stand still."""
_START_S = 5.0
"""How long to try to reach a zygote: a new one, or one that is just ending."""
_OF_A_WORKER = ("PYTHON_WORKER_FACTORY_", "SPARK_PYTHON_RUNTIME", "PYTHON_UNIX_DOMAIN_", "OLDPWD")
"""Variables by which one Python worker reaches Spark's JVM; an agent has no use for them."""


class Plan(msgspec.Struct, frozen=True):
    """The parameters of a new zygote.

    Attributes:
        owner_pid: the executor's process; the zygote ends with it.
        first_fd: a connection that came before; -1 if there is none.
        problem: why this zygote forks nothing.
    """

    framework: str
    preload: tuple[str, ...]
    owner_pid: int
    listener_fd: int
    output_fd: int
    first_fd: int = -1
    problem: str = ""


class Request(msgspec.Struct, frozen=True):
    """The only message to a zygote. Descriptors come with it.

    Attributes:
        kind: `hold` forks nothing.
        node, environment, agent_pid: of a child.
        keep_s: how long the zygote waits without processes.
    """

    kind: str
    keep_s: float | None = None
    node: str = ""
    environment: dict[str, str] = {}
    agent_pid: int = 0


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages of a zygote."""


class Forked(Answer, frozen=True):
    """The process exists."""

    pid: int


class Exited(Answer, frozen=True):
    """The process has ended: `status` is that of `subprocess.Popen.returncode`."""

    status: int


class Unsafe(Answer, frozen=True):
    """Nothing was forked, because of `problem`."""

    problem: str


decode_answer = msgspec.json.Decoder(Forked | Exited | Unsafe).decode


@dataclass(frozen=True)
class Place:
    """Where agents of one driver and one executor find the zygote that fits them.

    Attributes:
        name: of its listening socket.
    """

    name: str
    framework: str
    preload: tuple[str, ...]
    owner_pid: int

    @classmethod
    def of(
        cls,
        key: str,
        owner_pid: int | None,
        environment: Mapping[str, str],
        framework: str,
        preload: Sequence[str],
    ) -> Place | None:
        """Return the place for processes that are started here with `environment`, if any may be.

        Args:
            key: the driver's secret.
        """
        if not (CAN_FORK and key and owner_pid is not None):
            return None
        own = {k: v for k, v in environment.items() if not k.startswith(_OF_A_WORKER)}
        same = [key, owner_pid, __version__, sys.executable, os.getcwd(), sorted(own.items())]
        text = msgspec.json.encode([*same, framework, list(preload)])
        name = f"\0sparkdl-zygote-{hashlib.sha256(text).hexdigest()[:32]}"
        return cls(name, framework, tuple(preload), owner_pid)

    def connect(self, request: Request, fds: Sequence[int] = ()) -> socket.socket:
        """Return a connection to the zygote, after starting one if there is none.

        Raises:
            OSError: if neither is possible.
        """
        deadline = Deadline.after(_START_S)
        # Between a zygote's end and the next one's start, or while two agents compete to start one,
        # a connection is refused. So the loop tries until the deadline.
        while True:
            try:
                return _connect(self.name, request, fds)
            except ConnectionRefusedError:
                if deadline.has_passed:
                    raise
                self._start()

    def fork_agent(self, stderr: int) -> ForkedAgent | None:
        """Return an agent that a zygote of an earlier launch has forked; `None` if there is none.

        Args:
            stderr: becomes its standard error.
        """
        with ExitStack() as ours, ExitStack() as theirs:
            ends = [*os.pipe(), *os.pipe()]
            stdin = ours.enter_context(open(ends[1], "wb"))
            stdout = ours.enter_context(open(ends[2], "rb"))
            # With copies of its ends here, the agent's pipes would stay open after its end.
            for fd in (ends[0], ends[3]):
                theirs.callback(os.close, fd)
            try:
                fds = (ends[0], ends[3], stderr)
                sock = ours.enter_context(_connect(agents_name(self.name), Request("agent"), fds))
                answer = decode_answer(sock.recv(MAX_NBYTES))
                if isinstance(answer, Forked):
                    agent = ForkedAgent(answer.pid, sock, stdin, stdout)
                    # From here on the agent's owner closes them.
                    ours.pop_all()
                    return agent
            except (OSError, msgspec.MsgspecError):  # none is there, or it has just ended
                pass
        return None

    def _start(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(self.name)
            except OSError:
                os.sched_yield()  # another agent of this executor was faster, and listens at once
                return
            # Before the zygote runs: connections wait in the backlog while its Python starts.
            listener.listen(BACKLOG)
            output = nameless_file("sparkdl-zygote")
            fds = (listener.fileno(), output)
            plan = Plan(self.framework, self.preload, self.owner_pid, *fds)
            try:
                subprocess.Popen(
                    zygote_command(plan),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=fds,
                    # It serves other agents, too, so signals for this agent's group must not reach
                    # it.
                    start_new_session=True,
                )
            finally:
                os.close(output)


def zygote_command(plan: Plan) -> list[str]:
    """Return the command that starts a zygote."""
    body = msgspec.json.encode(plan).decode()
    return [sys.executable, "-u", "-m", "sparkdl.node.zygote", body]


def agents_name(name: str) -> str:
    """Return where the zygote that listens at `name` forks agents, once it can."""
    return f"{name}-agents"


def _connect(name: str, request: Request, fds: Sequence[int]) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(_ANSWER_S)
        sock.connect(name)
        # Abstract names have no permissions: any user of the host may have bound this one.
        if peer_of(sock).uid != os.geteuid():
            raise ConnectionAbortedError("another user listens there")
        socket.send_fds(sock, [msgspec.json.encode(request)], list(fds))
    except BaseException:
        sock.close()
        raise
    return sock


class ForkedAgent:
    """An agent that a zygote has forked; used like the `subprocess.Popen` of one's own.

    Its owner waits for it, and closes `stdin` and `stdout`.

    Attributes:
        returncode: as of `Popen`; `UNKNOWN_STATUS` if the zygote ended before.
    """

    def __init__(self, pid: int, sock: socket.socket, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._lock = threading.Lock()  # several threads may wait, and the status comes once
        self._pidfd = os.pidfd_open(pid)
        self._socket = sock

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended.

        Raises:
            subprocess.TimeoutExpired: if it has not, in so many seconds.
        """
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("sparkdl.node.agent", timeout or 0.0)
        return status

    def kill(self) -> None:
        """End it at once."""
        # The lock, because `_look` closes the pidfd, and its number may be given to another file.
        with self._lock, suppress(ProcessLookupError):
            if self.returncode is None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            pidfd = os.dup(self._pidfd)  # another thread may close it while this one waits
        try:
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            has_ended = ended.poll(None if timeout is None else timeout * 1000)
        finally:
            os.close(pidfd)
        with self._lock:
            if has_ended and self.returncode is None:
                self.returncode = self._status()
                os.close(self._pidfd)
                self._socket.close()
            return self.returncode

    def _status(self) -> int:
        """Receive the exit status, which the zygote sends a moment after the end."""
        try:
            answer = decode_answer(self._socket.recv(MAX_NBYTES))
        except (OSError, msgspec.MsgspecError):
            # The zygote has ended first, and only the parent learns a status.
            return UNKNOWN_STATUS
        return answer.status if isinstance(answer, Exited) else UNKNOWN_STATUS
