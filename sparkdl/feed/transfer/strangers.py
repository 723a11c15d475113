"""Connections to a node's Flight port that nobody with the token has made, and their end.

Runs in: agent

gRPC keeps a connection that says nothing for two minutes, and one that begins with HTTP/2 for
ever, and pyarrow passes on no option that limits either. Each takes a descriptor, and so does each
segment of a feed. So this looks at the process's own sockets: who has made no call with the token
within `_PATIENCE` looks is hung up on, or within two where descriptors run short. gRPC sees the end
of the connection, and closes it.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import stat
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import unquote

from sparkdl.control.descriptors import OUT_OF_DESCRIPTORS

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
_PATIENCE = 30
"""Looks, not seconds, for this process may stand still. A feeder itself gives up after 20 s."""
_SHORT_PATIENCE = 2
_SHORT_SHARE = 0.9
"""Of the descriptors: where more are in use, strangers are in the way."""
_MAX_LIMIT = 1 << 20
"""What Linux lets a process have by default (fs.nr_open)."""
_MAX_NAMED = 3
_OWN_FDS = "/proc/self/fd"


class Strangers:
    """Watches the connections to one port of this process, in a thread of its own.

    Where there is no `/proc` (it is not Linux), nobody is hung up on.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._ages: Counter[str] = Counter()
        """Strangers, and how many looks have found each."""
        self._sent_away: Counter[str] = Counter()
        """Strangers who were hung up on, by host."""
        self._has_warned = False
        self._has_ended = threading.Event()
        # Held in reserve, for a look must need no descriptor.
        self._hand, self._nothing = socket.socket(), socket.socket()
        self._thread = threading.Thread(target=self._watch, name="sparkdl-strangers", daemon=True)
        if sys.platform == "linux":
            self._thread.start()

    def welcome(self, peer: str) -> None:
        """Note that `peer` has shown the token; as gRPC writes it: `ipv4:127.0.0.1:4711`."""
        with self._lock:
            self._known.add(_plain(unquote(peer.partition(":")[2])))

    def shortage(self) -> str:
        """Return that descriptors have run out, who holds them, and what to change."""
        here = Counter(peer.rpartition(":")[0] for peer in list(self._ages))
        return (
            f"{OUT_OF_DESCRIPTORS}. The limit is {_limit()}. Connections to the feed's port that "
            f"do not show the token: {here.total()} are here{_by_host(here)}, "
            f"{self._sent_away.total()} were ended{_by_host(self._sent_away)}"
        )

    def hang_up(self) -> None:
        """End the watch, and all connections, those of who has shown the token as well."""
        self._end_watch()
        if sys.platform == "linux":
            for fd in map(int, os.listdir(_OWN_FDS)):
                if peer := self._peer(fd):
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
        """Find all connections; end those of strangers who have been here for too long."""
        with self._lock:
            before = set(self._known)
        try:
            fds: Sequence[int] = [int(name) for name in os.listdir(_OWN_FDS)]
            is_short = len(fds) > _SHORT_SHARE * _limit()
        except OSError:  # there is none left to look with
            fds, is_short = range(_limit()), True
        peers = {peer: fd for fd in fds if (peer := self._peer(fd))}
        with self._lock:
            self._known -= before - peers.keys()
            strangers = peers.keys() - self._known
        self._ages = Counter({peer: self._ages[peer] + 1 for peer in strangers})
        patience = _SHORT_PATIENCE if is_short else _PATIENCE
        for peer in strangers:
            if self._ages[peer] >= patience:
                self._hang_up(peers[peer], peer)
        if is_short and not self._has_warned:
            _log.warning("%s", self.shortage())
        self._has_warned = is_short

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
            return _address(sock.getpeername()) if is_ours else ""
        except OSError:  # it listens, or has ended
            return ""
        finally:
            sock.detach()

    def _hang_up(self, fd: int, peer: str) -> None:
        # By a copy, which stays this connection if gRPC closes its own and the number is used anew.
        with suppress(OSError):
            os.dup2(fd, self._hand.fileno(), inheritable=False)
            if self._peer(self._hand.fileno()) == peer:
                self._hand.shutdown(socket.SHUT_RDWR)
                self._sent_away[peer.rpartition(":")[0]] += 1
        with suppress(OSError):
            os.dup2(self._nothing.fileno(), self._hand.fileno(), inheritable=False)


def _limit() -> int:
    """Return how many descriptors this process may have."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_LIMIT if soft == resource.RLIM_INFINITY else min(soft, _MAX_LIMIT)


def _address(name: tuple[str, int]) -> str:
    return _plain(f"[{name[0]}]:{name[1]}")


def _plain(address: str) -> str:
    """Return an address without brackets and scope, as IPv4 if it is one written as IPv6."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]").partition("%")[0].removeprefix("::ffff:")
    return f"{host}:{port}"


def _by_host(counts: Counter[str]) -> str:
    named = ", ".join(f"{host}: {count}" for host, count in counts.most_common(_MAX_NAMED))
    return f" ({named})" if named else ""
