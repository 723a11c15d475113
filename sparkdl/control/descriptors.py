"""File descriptors between processes of one machine: files without a name, and how they are sent.

Runs in: feeder, agent, child

A segment reaches a node through Flight if the feeder runs on another machine. On the same machine
the feeder writes the segment and sends its descriptor through a Unix socket, and the stream of
`DoPut` carries the segment's key instead of its rows: rows are copied once on their way, not three
times. The socket has an abstract name (unix(7)), known from the stream's first answer. Another
machine, or a container with a network of its own, cannot connect to it, and uses Flight.

The first message is the token, which the agent answers. A peer that is late is disconnected.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import sys
import tempfile
import threading
import uuid
from array import array
from contextlib import suppress
from pathlib import Path

from sparkdl.control.auth import bearer, is_authorized
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ProtocolError

_log = logging.getLogger(__name__)

_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_MAX_KEY_NBYTES = 256
_CONNECT_S = 5
"""Whole seconds, for a `struct timeval`."""
_TIMEVAL = struct.Struct("@ll")
_WELCOME = b"welcome"
OUT_OF_DESCRIPTORS = (
    "no file descriptors are left, or almost none. Raise `ulimit -n` where the process is started, "
    "and let only the cluster's hosts reach its ports (a network policy)"
)
_JOIN_S = 2.0


def nameless_file(name: str, folder: Path | None = None) -> int:
    """Return the descriptor of a new file without a name; closing the last descriptor deletes it.

    Args:
        name: what `/proc/<pid>/fd` shows for a file in memory.
        folder: on whose disk; in memory without it.
    """
    if folder is None and hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="sparkdl-", dir=folder) as file:
        # A duplicate, because leaving the block closes the file's own descriptor.
        return os.dup(file.fileno())


def receive_with_fds(sock: socket.socket, nbytes: int, max_fds: int) -> tuple[bytes, list[int]]:
    """Read once; return the data, empty at the end of a stream, and the descriptors beside it.

    A descriptor that the kernel dropped, because this process may have no more, is -1.

    `socket.recv_fds` ignores its flags. This function sets close-on-exec, so programs started by
    user code do not inherit the descriptors.
    """
    fds = array("i")
    space = socket.CMSG_LEN(max_fds * fds.itemsize)
    data, extras, flags, _address = sock.recvmsg(nbytes, space, _CLOSE_ON_EXEC)
    for level, kind, body in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            # If the kernel has truncated the data, they may end within a number.
            fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
    if flags & socket.MSG_CTRUNC and not fds:
        fds.append(-1)
    return data, fds.tolist()


def close_fd(fd: int) -> None:
    """Close a descriptor, unless it is -1, which stands for none."""
    if fd >= 0:
        os.close(fd)


class FdReceiver:
    """Receives descriptors from feeders on this machine, for an agent.

    Args:
        token: what feeders show.
        token_timeout_s: for the token, which a feeder sends as soon as it has connected.

    Attributes:
        name: of the socket, empty where there are no abstract names.
    """

    def __init__(self, token: str, token_timeout_s: float = 5.0) -> None:
        self._token_timeout_s = token_timeout_s
        self.name = f"sparkdl-{uuid.uuid4().hex}" if sys.platform == "linux" else ""
        self._token = token
        self._changed = threading.Condition()
        self._fds: dict[str, int] = {}
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self._listener: socket.socket | None = None
        if self.name:
            # Packets, not a stream: each key stays together with its descriptor.
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(f"\0{self.name}")
            self._listener.listen()
            self._thread = threading.Thread(target=self._accept, name="sparkdl-fds", daemon=True)
            self._thread.start()

    def wait_fd(self, key: str, deadline: Deadline) -> int:
        """Wait for the descriptor that was sent under `key`; the caller owns it.

        Raises:
            ProtocolError: if it does not come in time, or the feeder has gone.
            OSError: if it came when this process had no descriptor left for it.
        """
        with self._changed:
            is_here = self._changed.wait_for(
                lambda: key in self._fds or self._is_closed, deadline.wait_s
            )
            if not is_here or key not in self._fds:
                raise ProtocolError(f"the segment {key!r} was announced but did not arrive")
            fd = self._fds.pop(key)
        if fd < 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return fd

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            connections = list(self._connections)
            self._changed.notify_all()
        for sock in (self._listener, *connections):
            if sock is not None:
                # Closing alone would not wake a thread that waits in accept or recv.
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        if self._listener is not None:
            self._thread.join(_JOIN_S)
            self._listener.close()
        self._drop(set(self._fds))

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed, or no descriptors are left: feeders use Flight from now on
                self._listener.close()
                return
            with self._changed:
                if self._is_closed:
                    sock.close()
                    return
                self._connections.add(sock)
            threading.Thread(
                target=self._serve, args=(sock,), name="sparkdl-fds-feeder", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        keys: set[str] = set()
        try:
            if not self._is_known(sock):
                return
            while True:
                data, fds = receive_with_fds(sock, _MAX_KEY_NBYTES, 1)
                if not fds:
                    return
                key = data.decode(errors="replace")
                with self._changed:
                    if self._is_closed:
                        close_fd(fds[0])
                        return
                    # A feeder that sends a key twice must not leave the first descriptor open.
                    close_fd(self._fds.pop(key, -1))
                    self._fds[key] = fds[0]
                    self._changed.notify_all()
                keys.add(key)
        except OSError as error:
            _log.debug("A feeder's connection broke: %s", error)
        finally:
            sock.close()
            with self._changed:
                self._connections.discard(sock)
            # The feeder has gone, so its stream announces none of these segments any more.
            self._drop(keys)

    def _is_known(self, sock: socket.socket) -> bool:
        sock.settimeout(self._token_timeout_s)
        if not is_authorized(sock.recv(_MAX_KEY_NBYTES).decode(errors="replace"), self._token):
            return False
        sock.settimeout(None)
        sock.send(_WELCOME)
        return True

    def _drop(self, keys: set[str]) -> None:
        with self._changed:
            fds = [self._fds.pop(key) for key in keys if key in self._fds]
        for fd in fds:
            close_fd(fd)


class FdSender:
    """A feeder's connection to a node on its own machine."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._prefix = uuid.uuid4().hex
        self._number = 0

    @classmethod
    def connect(cls, name: str, token: str) -> FdSender | None:
        """Return a connection; `None` if the node is not on this machine, or does not want it."""
        if not name or sys.platform != "linux":
            return None
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        try:
            # `settimeout` would make the socket non-blocking, and connect then fails at once when
            # the backlog is full (unix(7)).
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(_CONNECT_S, 0))
            sock.connect(f"\0{name}")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(_CONNECT_S, 0))
            sock.send(bearer(token).encode())
            if sock.recv(len(_WELCOME)) != _WELCOME:  # else descriptors might be lost
                raise ConnectionRefusedError
        except OSError:
            sock.close()
            return None
        return cls(sock)

    def send(self, fd: int) -> str:
        """Send a descriptor, which stays the caller's as well; return its key."""
        self._number += 1
        key = f"{self._prefix}-{self._number}"
        socket.send_fds(self._sock, [key.encode()], [fd])
        return key

    def close(self) -> None:
        self._sock.close()
