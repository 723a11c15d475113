"""`Announcer`: members exchange a few bytes by TCP connections of their own.

Runs in: child

gloo passes each operation to a separate thread and back, which takes milliseconds on a busy
machine. Here the calling thread itself writes and reads. In each of log2(size) rounds a member
sends all its bytes to one other member and receives as many from another: few connections a member,
and no member leaves before all have come. See Bruck et al., "Efficient Algorithms for All-to-All
Communications in Multiport Message-Passing Systems", IEEE TPDS 8 (11), 1997.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from sparkdl.core.deadline import Deadline

if TYPE_CHECKING:
    from torch.distributed import Store

_HEAD = struct.Struct("<QIB")
"""Before the messages of a round: which exchange, how many bytes, and whether it is an answer."""
_NBYTES = struct.Struct("<I")
"""Before each message."""
_HELLO = struct.Struct("<i32s")
_HELLO_S = 1.0
"""For the rest of a hello that has begun to come."""
_AHEAD_NBYTES = 64 << 10
_LAST_S = 0.001
"""A last wait after the deadline, to read data that has arrived already."""


class Round(NamedTuple):
    """As many messages go to member `target` as come from member `source`."""

    target: int
    source: int
    messages: int


def rounds(rank: int, size: int) -> list[Round]:
    """Return what a member does in each round.

    Before that of step s it knows what s members have said, itself and those behind it.
    """
    steps = [1 << power for power in range((size - 1).bit_length())]
    return [Round((rank - s) % size, (rank + s) % size, min(s, size - s)) for s in steps]


class Announcer:
    """The connections of one member; all members make theirs at the same time.

    Args:
        rank: of this member, of `size`.
        store: reaches the members, and no other group.
        host: under which the other members reach this one.
        key: a secret of the members; connections without it are rejected.
        timeout_s: of connecting, and of each exchange.

    Raises:
        OSError: if a member cannot be reached; `TimeoutError` if one does not come.
    """

    def __init__(
        self, rank: int, size: int, store: Store, host: str, key: bytes, timeout_s: float
    ) -> None:
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._rounds = rounds(rank, size)
        self._to: dict[int, socket.socket] = {}
        self._from: dict[int, socket.socket] = {}
        self._ahead: dict[int, bytes] = {}
        self._count = 0
        self._is_closed = False
        try:
            self._connect(store, host, key)
        except BaseException:
            self.close()
            raise

    def _connect(self, store: Store, host: str, key: bytes) -> None:
        deadline, nonce = Deadline.after(self._timeout_s), secrets.token_bytes(16)
        with _listener() as listener:
            port = listener.getsockname()[1]
            store.set(f"announcer {self._rank}", f"{nonce.hex()} {port} {host}")
            for each in self._rounds:
                told = store.get(f"announcer {each.target}").decode()
                self._to[each.target] = self._greet(told, key, deadline)
            self._let_in(listener, nonce, key, deadline)
        # Else a member could end at once, and the store and gloo's connections with it, while
        # another one still connects.
        self.exchange(bytes(1))

    def _let_in(
        self, listener: socket.socket, nonce: bytes, key: bytes, deadline: Deadline
    ) -> None:
        """Accept the members that send to this one; silent connections do not delay them."""
        missing, silent = {each.source for each in self._rounds}, set[socket.socket]()
        # A connection may be gone between `select` and `accept`, which would then wait for ever.
        listener.settimeout(_HELLO_S)
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ, listener)
            try:
                while missing:
                    ready = selector.select(deadline.remaining_s)
                    if not ready and deadline.has_passed:
                        raise TimeoutError(f"ranks {sorted(missing)} have not connected")
                    for link in (item.data for item, _ in ready):
                        if link is listener:
                            came, _ = listener.accept()
                            selector.register(came, selectors.EVENT_READ, came)
                            silent.add(came)
                            continue
                        selector.unregister(link)
                        silent.remove(link)
                        rank = _greeted_by(link, nonce, key)
                        if rank is not None and rank in missing:
                            missing.remove(rank)
                            self._from[rank] = link
                        else:
                            link.close()
            finally:
                for link in silent:
                    link.close()

    def _greet(self, told: str, key: bytes, deadline: Deadline) -> socket.socket:
        """Connect with a member at the address that it has published."""
        nonce, port, host = told.split(" ", 2)
        link = socket.create_connection((host, int(port)), max(_LAST_S, deadline.remaining_s))
        # Nagle's algorithm would hold a small message back until the one before is acknowledged.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(self._timeout_s)
        # Sealed with the other member's nonce: a recorded hello opens no other connection.
        link.sendall(_HELLO.pack(self._rank, _seal(self._rank, bytes.fromhex(nonce), key)))
        return link

    def exchange(self, mine: bytes, is_answer: bool = False) -> list[bytes]:
        """Return what the members have called this with, by rank.

        After an error the connections are closed, and other members need not wait.

        Args:
            mine: of any length; all of one exchange must fit into the buffers of a socket.
            is_answer: whether the exchange before asks for this one; the same on all.

        Raises:
            TimeoutError: if not all have called this in time.
            OSError: if a member has gone, or has not done all that this one has.
        """
        if self._is_closed:
            raise OSError("the connections were closed, or an exchange was interrupted")
        deadline = Deadline.after(self._timeout_s)
        known = [_NBYTES.pack(len(mine)) + mine]
        self._count += 1
        peer = self._rank
        try:
            for target, source, messages in self._rounds:
                data = b"".join(known[:messages])
                peer = target
                # All write before they read, so a round must fit into the buffers of a socket.
                self._to[target].sendall(_HEAD.pack(self._count, len(data), is_answer) + data)
                peer = source
                known += self._heard(source, is_answer, deadline)
        except BaseException as error:  # an interrupt as well: half an exchange has no next one
            self.close()
            if isinstance(error, ConnectionError):  # in the words of gloo
                text = f"sparkdl.collectives: the connection with rank {peer} was closed by peer"
                raise ConnectionResetError(text) from error
            raise
        first = self._size - self._rank  # `known` begins with this member's
        return [message[_NBYTES.size :] for message in known[first:] + known[:first]]

    def _heard(self, source: int, is_answer: bool, deadline: Deadline) -> list[bytes]:
        """Return the messages of a round from a member, each behind its length."""
        link, data = self._from[source], self._ahead.pop(source, b"")
        data = _read(link, data, _HEAD.size, deadline)
        count, nbytes, theirs = _HEAD.unpack_from(data)
        if (count, theirs) != (self._count, is_answer):
            raise OSError(
                "a member has not finished what all had agreed on, and does something else"
            )
        data = _read(link, data, end := _HEAD.size + nbytes, deadline)
        if data[end:]:  # of its next exchange
            self._ahead[source] = data[end:]
        messages, at = [], _HEAD.size
        while at < end:
            start, at = at, at + _NBYTES.size + _NBYTES.unpack_from(data, at)[0]
            messages.append(data[start:at])
        return messages

    def close(self) -> None:
        """Close the connections, for processes that have inherited them by a fork as well."""
        self._is_closed = True
        for link in (*self._to.values(), *self._from.values()):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()


def _listener() -> socket.socket:
    """Return a socket that listens on all addresses, at a free port."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual)


def _seal(rank: int, nonce: bytes, key: bytes) -> bytes:
    """Return what only a member can say to the one whose nonce this is."""
    return hmac.digest(key, nonce + struct.pack("<i", rank), "sha256")


def _greeted_by(link: socket.socket, nonce: bytes, key: bytes) -> int | None:
    """Return the rank of the member that has connected; `None` for a stranger."""
    try:
        # Not a byte more: what follows belongs to the first exchange.
        hello = _read(link, b"", _HELLO.size, Deadline.after(_HELLO_S), ahead=0)
    except OSError:
        return None
    rank, seal = _HELLO.unpack(hello)
    return rank if hmac.compare_digest(seal, _seal(rank, nonce, key)) else None


def _read(
    link: socket.socket, data: bytes, nbytes: int, deadline: Deadline, ahead: int = _AHEAD_NBYTES
) -> bytes:
    """Return `nbytes` bytes, and up to `ahead` more; `data` are the first of them."""
    while len(data) < nbytes:
        link.settimeout(max(_LAST_S, deadline.remaining_s))
        part = link.recv(nbytes - len(data) + ahead)
        if not part:
            raise ConnectionResetError("closed")
        data += part
    return data
