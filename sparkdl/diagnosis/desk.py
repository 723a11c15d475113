"""The driver's endpoint for reports of tasks on executors; they take the agents' way to it.

Runs in: driver

It keeps every report, so that one executor whose task never ends does not hide the others.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sparkdl.control.ports import listening_socket
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError
from sparkdl.core.world import host_port
from sparkdl.diagnosis.facts import Facts

_HELLO_S = 15.0
_MAX_NBYTES = 1 << 20
# Ways between all pairs would grow with their square: each executor tries the next few in a ring.
_PEERS = 8
_BACKLOG = 1024


@dataclass
class Visitor:
    """An executor, represented by its first task that connects.

    Attributes:
        hello: the facts sent on connecting.
        port: the port at which other executors try to reach it; 0 for none.
        facts: the full report; `None` until it arrives.
    """

    hello: Facts
    port: int
    facts: Facts | None = None
    has_left: bool = False


@dataclass
class Desk:
    """Listens, in a thread of its own, from `open` to `close`.

    Args:
        expected: how many tasks there will be.
        wait_s: how long the first of them wait for the last.
    """

    expected: int
    wait_s: float
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    address: tuple[str, int] = ("", 0)
    tasks: int = 0
    """That have come, several for each executor."""
    visitors: dict[str, Visitor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="sparkdl-doctor", daemon=True)
        self._all_there = asyncio.Event()
        self._all_told = asyncio.Event()
        self._is_told = threading.Event()
        self._server: asyncio.Server | None = None
        self._visits: set[asyncio.Task[None]] = set()
        self._order: list[str] = []

    @property
    def url(self) -> str:
        """The address, for people; empty if it could not listen."""
        return host_port(*self.address) if self.address[0] else ""

    def open(self, host: str, ports: tuple[int, ...]) -> None:
        """Listen where the coordinator of a cluster would.

        Raises:
            ConfigError: if that cannot be, with the coordinator's own words.
        """
        try:
            sock = listening_socket(host, ports, "the coordinator", "SPARKDL_DRIVER")
        except ConfigError:
            self._loop.close()
            raise
        self.address = (host, sock.getsockname()[1])
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(sock), self._loop).result(_HELLO_S)

    def begin(self) -> None:
        """Start the inspection on the executors that have connected; wait for no more."""
        if not self._thread.is_alive():
            self._is_told.set()
            return
        with suppress(RuntimeError):  # it has just been closed
            self._loop.call_soon_threadsafe(self._go)

    def wait(self, deadline: Deadline) -> bool:
        """Wait until all connected executors have reported; return false at the deadline."""
        return self._is_told.wait(deadline.wait_s)

    def close(self) -> None:
        """Hang up on everybody."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_HELLO_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_HELLO_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _open(self, sock: socket.socket) -> None:
        self._server = await asyncio.start_server(
            self._visit, sock=sock, limit=_MAX_NBYTES, backlog=_BACKLOG
        )
        # The first executors wait no longer, even if some never come.
        self._loop.call_later(self.wait_s, self._go)

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for visit in self._visits:
            visit.cancel()
        await asyncio.gather(*self._visits, return_exceptions=True)

    def _go(self) -> None:
        if not self._all_there.is_set():  # who comes late has no peers: they may have left
            self._order = [name for name, visitor in self.visitors.items() if visitor.port]
            self._all_there.set()
        self._look_who_has_told()

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._visits.add(task)
        visitor: Visitor | None = None
        try:
            visitor = await self._meet(reader, writer)
            if visitor is not None:
                visitor.facts = msgspec.convert(await _hear(reader), Facts)
                self._look_who_has_told()
                # Its task, and so its listener, must stay until the others have tried to reach it.
                await self._all_told.wait()
                _say(writer, {})
            await writer.drain()
        except (OSError, TypeError, ValueError, asyncio.TimeoutError, msgspec.MsgspecError):
            pass  # a stranger or a lost executor: counted as silent
        finally:
            self._visits.discard(task)
            writer.close()
            if visitor is not None and visitor.facts is None:
                visitor.has_left = True
                self._look_who_has_told()

    async def _meet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Visitor | None:
        """Let a task in; return its executor, if it is the task that looks around there."""
        hello = await asyncio.wait_for(_hear(reader), _HELLO_S)
        # In constant time, and before anything else of the message is used.
        if not hmac.compare_digest(str(hello.pop("token", "")), self.token):
            return None
        port = int(hello.pop("port", 0))
        facts = msgspec.convert(hello, Facts)
        self.tasks += 1
        is_first = facts.executor not in self.visitors  # also where it comes after `wait_s`
        if is_first:
            self.visitors[facts.executor] = Visitor(facts, port)
        if self.tasks >= self.expected:
            self._go()
        await self._all_there.wait()
        _say(writer, {"is_first": is_first, "peers": self._peers_of(facts.executor)})
        return self.visitors[facts.executor] if is_first else None

    def _peers_of(self, name: str) -> list[list[Any]]:
        """Return where the next executors in the order listen, none where this one does not."""
        if name not in self._order:
            return []
        place = self._order.index(name)
        others = self._order[place + 1 :] + self._order[:place]
        them = [self.visitors[other] for other in others[:_PEERS]]
        return [[visitor.hello.address, visitor.port] for visitor in them]

    def _look_who_has_told(self) -> None:
        # Executors that have left count as done, or the wait for them would not end.
        is_done = all(v.facts is not None or v.has_left for v in self.visitors.values())
        if self._all_there.is_set() and is_done:
            self._all_told.set()
            self._is_told.set()


async def _hear(reader: asyncio.StreamReader) -> dict[str, Any]:
    found: Any = json.loads(await reader.readline() or b"null")
    if not isinstance(found, dict):
        raise ConnectionError("the peer does not speak the doctor's protocol")
    return found


def _say(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
