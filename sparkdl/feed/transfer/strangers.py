"""Ends connections to a node's Flight port whose peers do not send the token.

Runs in: agent

gRPC keeps a silent connection for two minutes, and one that begins with HTTP/2 for ever; pyarrow
has no option to limit either. Each connection takes a descriptor, as does each segment of a feed.
This thread therefore looks at the process's own sockets, and shuts down a connection without an
authenticated call within `_PATIENCE` looks. gRPC sees its end, and closes it.
"""

from __future__ import annotations

import os
import resource
import socket
import stat
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import unquote

_LOOK_S = 1.0
_PATIENCE = 30
"""Looks, not seconds, because this process may stand still. A feeder itself gives up after 20 s."""
_MAX_LIMIT = 1 << 20
"""The most descriptors that Linux lets a process have by default (fs.nr_open)."""
_OWN_FDS = "/proc/self/fd"


class Strangers:
    """Watches the connections to one port of this process, in a thread of its own.

    Where there is no `/proc` (it is not Linux), no connection is shut down.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._ages: Counter[str] = Counter()
        """How many looks have found each connection without a call."""
        self._has_ended = threading.Event()
        # Held in reserve, so that a look needs no new descriptor: there may be none left.
        self._hand, self._nothing = socket.socket(), socket.socket()
        self._thread = threading.Thread(target=self._watch, name="sparkdl-strangers", daemon=True)
        if sys.platform == "linux":
            self._thread.start()

    def welcome(self, peer: str) -> None:
        """Note that `peer` has shown the token; as gRPC writes it: `ipv4:127.0.0.1:4711`."""
        with self._lock:
            self._known.add(_plain(unquote(peer.partition(":")[2])))

    def hang_up(self) -> None:
        """End the watch, and all connections, authenticated ones as well."""
        self._end_watch()
        if sys.platform == "linux":
            for peer, fd in self._peers().items():
                self._hang_up(fd, peer)

    def close(self) -> None:
        """End the watch."""
        self._end_watch()
        self._hand.close()
        self._nothing.close()

    def _end_watch(self) -> None:
        self._has_ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._has_ended.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        """Find all connections; shut down each that has been without a call for too long."""
        with self._lock:
            # A peer that is welcomed during the look is not among the sockets found: it must stay
            # known.
            before = set(self._known)
        peers = self._peers()
        with self._lock:
            self._known -= before - peers.keys()
            strangers = peers.keys() - self._known
        # Only present peers: a later connection may have the same port, and begins at 0.
        self._ages = Counter({peer: self._ages[peer] + 1 for peer in strangers})
        for peer in strangers:
            if self._ages[peer] >= _PATIENCE:
                self._hang_up(peers[peer], peer)

    def _peers(self) -> dict[str, int]:
        """Return the descriptors of the connections to our port, by who is at the other end."""
        try:
            fds: Iterable[int] = [int(name) for name in os.listdir(_OWN_FDS)]
        except OSError:  # there is none left to look with
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            fds = range(_MAX_LIMIT if soft == resource.RLIM_INFINITY else min(soft, _MAX_LIMIT))
        return {peer: fd for fd in fds if (peer := self._peer(fd))}

    def _peer(self, fd: int) -> str:
        """Return who is at the other end if `fd` is a connection to our port."""
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                return ""
            sock = socket.socket(fileno=fd)
        except OSError:
            return ""
        try:
            own = sock.getsockname()
            is_ours = sock.family in (socket.AF_INET, socket.AF_INET6) and own[1] == self._port
            host, port, *_ = sock.getpeername() if is_ours else ("", 0)
            return _plain(f"{host}:{port}") if is_ours else ""
        except OSError:  # it listens, or has ended
            return ""
        finally:
            # The descriptor belongs to gRPC, so the socket object must not close it.
            sock.detach()

    def _hang_up(self, fd: int, peer: str) -> None:
        # By a copy, which stays this connection if gRPC closes its own and the number is reused.
        with suppress(OSError):
            os.dup2(fd, self._hand.fileno(), inheritable=False)
            if self._peer(self._hand.fileno()) == peer:
                self._hand.shutdown(socket.SHUT_RDWR)
        # The copy would keep the connection open after gRPC has closed its own descriptor.
        with suppress(OSError):
            os.dup2(self._nothing.fileno(), self._hand.fileno(), inheritable=False)


def _plain(address: str) -> str:
    """Return an address without brackets and scope, as IPv4 if it is one written as IPv6."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]").partition("%")[0].removeprefix("::ffff:")
    return f"{host}:{port}"
