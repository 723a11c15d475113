"""Agents that are kept for the next launch: whom they fit, and how a starter takes one.

Runs in: driver, feeder, agent, child

An agent that is kept listens on a Unix socket of an abstract name (unix(7)), so that no file is
left behind however it ends. The name holds a digest of what only agents and starters of one driver
and one executor know, and both ends ask the kernel whose process the other one is. The starter says
what it needs, and sends along what becomes the agent's standard input, output and error.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import BinaryIO

import msgspec

from sparkdl.control.descriptors import close_fd, peer_of, receive_with_fds
from sparkdl.core.errors import ProtocolError
from sparkdl.version import __version__

_log = logging.getLogger(__name__)

CAN_KEEP = sys.platform == "linux" and hasattr(os, "pidfd_open")
"""Abstract names, and waiting for a process that is no child."""

_PLACES = 64
"""Agents that are kept for one driver on one executor at most, each with a name of its own."""
_MEET_S = 10.0
_LENGTH = struct.Struct("!I")
_MAX_NBYTES = 4 << 20
_NUM_FDS = 3
_CHUNK_NBYTES = 1 << 16
_OF_A_WORKER = ("PYTHON_WORKER_FACTORY_", "SPARK_PYTHON_RUNTIME", "PYTHON_UNIX_DOMAIN_", "OLDPWD")
"""What Spark tells one Python worker: how to reach its JVM. It means nothing to an agent."""


class Fit(msgspec.Struct, frozen=True):
    """What an agent and its child have been started with, or what a launch needs.

    Attributes:
        version: sparkdl's.
        executable: the interpreter.
        folder: the working directory.
        environment: all variables but those of one Python worker; PYTHONPATH is `sys.path`.
        framework, preload: what the child has imported.
    """

    version: str
    executable: str
    folder: str
    environment: dict[str, str]
    framework: str
    preload: tuple[str, ...] = ()

    @classmethod
    def of(cls, environment: Mapping[str, str], framework: str, preload: Sequence[str] = ()) -> Fit:
        """Return what a process has, or will have, that is started here with `environment`."""
        own = {
            name: value for name, value in environment.items() if not name.startswith(_OF_A_WORKER)
        }
        return cls(__version__, sys.executable, os.getcwd(), own, framework, tuple(preload))


def misfit(has: Fit, needs: Fit) -> str:
    """Return in words why an agent cannot serve a launch; empty if it can.

    Variables are named, their values are not: some are secret.
    """
    for what in ("version", "executable", "folder", "framework", "preload"):
        before, now = getattr(has, what), getattr(needs, what)
        if before != now:
            return f"{_WORDS[what]} is {now!r} now, and was {before!r}"
    names = has.environment.keys() | needs.environment.keys()
    others = sorted(n for n in names if has.environment.get(n) != needs.environment.get(n))
    if "PYTHONPATH" in others:
        return "sys.path is another one"
    return f"other environment variables: {', '.join(others)}" if others else ""


_WORDS = {
    "version": "sparkdl's version",
    "executable": "the interpreter",
    "folder": "the working directory",
    "framework": "the framework",
    "preload": "preload",
}


def changed_since(began_s: float) -> str:
    """Return the file of a module that was imported and has changed since; empty if none has.

    Args:
        began_s: Unix time before the first import.
    """
    for module in list(sys.modules.values()):
        try:  # to ask the module would run one that is to be run when it is first used
            path = object.__getattribute__(module, "__dict__").get("__file__")
        except AttributeError:
            continue
        if not isinstance(path, str) or not os.path.isabs(path):
            continue
        if _changed_s(path) > began_s:
            return path
    return ""


def _changed_s(path: str) -> float:
    """Return when a file, or the archive that it is in, was changed; infinite if it is gone."""
    while path:
        try:
            return os.stat(path).st_ctime  # unlike st_mtime, no installer sets it
        except NotADirectoryError:  # in a zip file
            path = os.path.dirname(path)
        except OSError:
            break
    return float("inf")


class Needs(msgspec.Struct, frozen=True):
    """The first message, of the starter; three descriptors come with it."""

    key: str
    fit: Fit


class Answer(msgspec.Struct, frozen=True):
    """What the agent answers: why it is of no use; empty if it has been taken."""

    problem: str = ""


def listen(key: str, owner_pid: int) -> socket.socket | None:
    """Return a socket at which a starter finds this agent; `None` if there are too many agents."""
    sock = socket.socket(socket.AF_UNIX)
    for place in range(_PLACES):
        try:
            sock.bind(_name(key, owner_pid, place))
        except OSError:
            continue
        sock.listen()
        return sock
    sock.close()
    return None


def receive_needs(sock: socket.socket, key: str) -> tuple[Fit, list[int]]:
    """Return what a starter needs, and the three descriptors, which are the caller's.

    Raises:
        OSError: if it says nothing for long.
        ProtocolError: if it is another user's, or belongs to another driver.
    """
    if peer_of(sock).uid != os.geteuid():
        raise ProtocolError("another user asks for this agent")
    sock.settimeout(_MEET_S)
    data, fds = receive_with_fds(sock, _CHUNK_NBYTES, _NUM_FDS)
    try:
        needs = msgspec.json.decode(_rest(sock, data), type=Needs)
        if not secrets.compare_digest(needs.key, key) or len(fds) != _NUM_FDS or -1 in fds:
            raise ProtocolError("this agent belongs to another driver")
    except BaseException:
        for fd in fds:
            close_fd(fd)
        raise
    return needs.fit, fds


def answer(sock: socket.socket, problem: str) -> None:
    """Tell the starter whether it has the agent."""
    sock.sendall(_framed(Answer(problem)))


def take(key: str, owner_pid: int, fit: Fit, stderr: int) -> WarmAgent | None:
    """Return an agent that has been kept and fits; `None` if there is none.

    Args:
        owner_pid: the process with which it would end.
        stderr: becomes its standard error.
    """
    if not (CAN_KEEP and key):
        return None
    for place in range(_PLACES):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_MEET_S)
            try:
                sock.connect(_name(key, owner_pid, place))
                agent = _meet(sock, key, fit, stderr)
            except (OSError, msgspec.MsgspecError, ProtocolError):  # or taken by another one
                continue
            if agent is not None:
                return agent
    return None


def _meet(sock: socket.socket, key: str, fit: Fit, stderr: int) -> WarmAgent | None:
    if peer_of(sock).uid != os.geteuid():
        return None
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    with ExitStack() as ours:
        stdin = ours.enter_context(open(ours_in, "wb"))
        stdout = ours.enter_context(open(ours_out, "rb"))
        try:
            data = _framed(Needs(key, fit))
            sent = socket.send_fds(sock, [data], [theirs_in, theirs_out, stderr])
            if sent < len(data):  # to send nothing would fail where the answer is there already
                sock.sendall(data[sent:])
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        told, pid = msgspec.json.decode(_rest(sock, b""), type=Answer), peer_of(sock).pid
        if told.problem:
            _log.warning("Agent %d, kept warm, cannot be used: %s", pid, told.problem)
            return None
        agent = WarmAgent(pid, os.pidfd_open(pid), stdin, stdout)
        ours.pop_all()
        return agent


class WarmAgent:
    """An agent that somebody else has started; used like the `subprocess.Popen` of one's own.

    Attributes:
        returncode: once it has ended, 255: only its parent learns more.
    """

    def __init__(self, pid: int, pidfd: int, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._pidfd = pidfd

    def __del__(self) -> None:
        os.close(self._pidfd)

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended.

        Raises:
            subprocess.TimeoutExpired: if it has not, in so many seconds.
        """
        status = self._look(None if timeout is None else timeout * 1000)
        if status is None:
            raise subprocess.TimeoutExpired("sparkdl.node.agent", timeout or 0.0)
        return status

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _look(self, wait_ms: float | None) -> int | None:
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            if ended.poll(wait_ms):
                self.returncode = 255
        return self.returncode


def _name(key: str, owner_pid: int, place: int) -> str:
    text = f"{key} {owner_pid} {place}"
    return f"\0sparkdl-warm-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _framed(message: msgspec.Struct) -> bytes:
    body = msgspec.json.encode(message)
    return _LENGTH.pack(len(body)) + body


def _rest(sock: socket.socket, data: bytes) -> bytes:
    """Return the body of a frame, of which `data` has been read already."""
    while len(data) < _LENGTH.size or len(data) < _LENGTH.size + _nbytes(data):
        more = sock.recv(_CHUNK_NBYTES)
        if not more:
            raise ProtocolError("the other end hung up")
        data += more
    return data[_LENGTH.size :]


def _nbytes(data: bytes) -> int:
    (nbytes,) = _LENGTH.unpack_from(data)
    if nbytes > _MAX_NBYTES:
        raise ProtocolError(f"a message of {nbytes} bytes")
    return int(nbytes)
