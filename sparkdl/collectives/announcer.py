"""`Announcer`: members exchange a few bytes by TCP connections of their own.

gloo passes each operation to a separate thread and back, which takes milliseconds on a busy
machine. Here the calling thread itself writes and reads. Each member sends to rank 0, which answers
all of them with what all have sent: so no member leaves before all have come.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

import msgspec

from sparkdl.core.deadline import Deadline

if TYPE_CHECKING:
    from torch.distributed import Store

_HELLO = struct.Struct("<i32s")
_HELLO_S = 5.0
"""For a hello to come, once a connection has been made."""
_LAST_S = 0.001
"""A last wait after the deadline, for what has arrived already."""


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
        self._sockets: list[socket.socket] = []
        self._ranks: dict[Connection, int] = {}
        self._peer = 0
        self._is_closed = False
        try:
            self._connect(store, host, key)
        except BaseException:
            self.close()
            raise

    def _connect(self, store: Store, host: str, key: bytes) -> None:
        deadline, nonce = Deadline.after(self._timeout_s), secrets.token_bytes(16)
        if self._rank == 0:
            with _listener() as listener:
                store.set("announcer", f"{nonce.hex()} {listener.getsockname()[1]} {host}")
                self._let_in(listener, nonce, key, deadline)
        else:
            told, port, there = store.get("announcer").decode().split(" ", 2)
            link = socket.create_connection((there, int(port)), max(_LAST_S, deadline.remaining_s))
            # Sealed with rank 0's nonce: a recorded hello opens no other connection.
            link.sendall(_HELLO.pack(self._rank, _seal(self._rank, bytes.fromhex(told), key)))
            self._add(0, link)
        # Else a member could end at once, and the store and gloo's connections with it, while
        # another one still connects.
        self.exchange(b"")

    def _let_in(
        self, listener: socket.socket, nonce: bytes, key: bytes, deadline: Deadline
    ) -> None:
        """Accept the other members."""
        missing = set(range(1, self._size))
        while missing:
            listener.settimeout(max(_LAST_S, deadline.remaining_s))
            try:
                link, _ = listener.accept()
            except TimeoutError:
                raise TimeoutError(f"ranks {sorted(missing)} have not connected") from None
            rank = _greeted_by(link, nonce, key)
            if rank in missing:
                missing.remove(rank)
                self._add(rank, link)
            else:
                link.close()

    def _add(self, rank: int, link: socket.socket) -> None:
        # Nagle's algorithm would hold a small message back until the one before is acknowledged.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(None)
        self._sockets.append(link)
        self._ranks[Connection(link.dup().detach())] = rank

    def exchange(self, mine: bytes, is_answer: bool = False) -> list[bytes]:
        """Return what the members have called this with, by rank.

        After an error the connections are closed, and other members need not wait.

        Args:
            mine: of any length.
            is_answer: whether the exchange before asks for this one; the same on all.

        Raises:
            TimeoutError: if not all have called this in time.
            OSError: if a member has gone, or has not done all that this one has.
        """
        if self._is_closed:
            raise OSError("the connections were closed, or an exchange was interrupted")
        try:
            whole = self._exchanged(bytes([is_answer]) + mine)
            found = msgspec.msgpack.decode(whole, type=list[bytes])
            if any(each[0] != is_answer for each in found):
                raise OSError(
                    "a member has not finished what all had agreed on, and does something else"
                )
        except BaseException as error:  # an interrupt as well: half an exchange has no next one
            self.close()
            if isinstance(error, (EOFError, ConnectionError)):  # in the words of gloo
                text = f"the connection with rank {self._peer} was closed by peer"
                raise ConnectionResetError(f"sparkdl.collectives: {text}") from error
            raise
        return [each[1:] for each in found]

    def _exchanged(self, mine: bytes) -> bytes:
        if self._rank:
            self._send(mine)
            return self._heard()[0]
        heard = {0: mine, **self._heard()}
        whole = msgspec.msgpack.encode([heard[rank] for rank in range(self._size)])
        self._send(whole)
        return whole

    def _send(self, message: bytes) -> None:
        for link, rank in self._ranks.items():
            self._peer = rank
            link.send_bytes(message)

    def _heard(self) -> dict[int, bytes]:
        """Return a message from each connection; one that is closed meanwhile is an error."""
        deadline, found = Deadline.after(self._timeout_s), dict[int, bytes]()
        while len(found) < len(self._ranks):
            ready = {*wait([*self._ranks], max(_LAST_S, deadline.remaining_s))}
            if not ready:
                raise TimeoutError(f"ranks {sorted({*self._ranks.values()} - {*found})} wait")
            for link in (each for each in self._ranks if each in ready):
                self._peer = self._ranks[link]
                found[self._peer] = link.recv_bytes()
        return found

    def close(self) -> None:
        """Close the connections, for processes that have inherited them by a fork as well."""
        self._is_closed = True
        for link in self._sockets:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        for own in self._ranks:
            own.close()


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
    link.settimeout(_HELLO_S)
    try:
        hello = b""
        while len(hello) < _HELLO.size and (part := link.recv(_HELLO.size - len(hello))):
            hello += part
        rank, seal = _HELLO.unpack(hello)
    except (OSError, struct.error):
        return None
    return rank if hmac.compare_digest(seal, _seal(rank, nonce, key)) else None
