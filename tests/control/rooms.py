"""A coordinator on loopback whose listener writes down what it hears, and peers of every kind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeAlias

from websockets.asyncio.client import ClientConnection, connect
from websockets.frames import Frame, Opcode

from sparkdl.control.auth import bearer
from sparkdl.control.messages import FromAgent, Hello, StartFailed, ToAgent, decode_to_agent, encode
from sparkdl.control.server import CoordinatorServer, ServerAddress
from sparkdl.control.tls import Tls

TOKEN = "the-token"
LOOPBACK = "127.0.0.1"
SOON_S = 20.0
"""Deadline of what takes a moment, so that a hang fails; no measure of speed."""
ENDS_SOON_S = 0.05

P = ParamSpec("P")
Peer: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Have an async test run to its end on an event loop of its own."""

    @wraps(test)
    def run(*args: P.args, **options: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **options), 2 * SOON_S))

    return run


def hello(agent_id: str = "a", node_id: int = 0) -> Hello:
    return Hello(node_id, "", agent_id, "h", 42, f"grpc://{agent_id}", "process")


@dataclass
class Heard:
    queue: asyncio.Queue[tuple[Any, ...]] = field(default_factory=asyncio.Queue)
    failure: str | None = ""

    def joined(self, hello: Hello) -> None:
        self.queue.put_nowait(("joined", hello.agent_id))

    def start_failed(self, message: StartFailed) -> None:
        self.queue.put_nowait(("start failed", message))

    def received(self, agent_id: str, message: FromAgent) -> None:
        self.queue.put_nowait(("received", agent_id, message))

    def cause(self) -> str | None:
        return self.failure

    def silent(self, hello: Hello) -> None:
        self.queue.put_nowait(("silent", hello.agent_id))

    def left(self, agent_id: str, reason: str) -> None:
        self.queue.put_nowait(("left", agent_id, reason))

    async def next(self) -> tuple[Any, ...]:
        return await asyncio.wait_for(self.queue.get(), SOON_S)


@dataclass
class Room:
    server: CoordinatorServer
    address: ServerAddress
    heard: Heard

    @asynccontextmanager
    async def agent(self, agent_id: str, node_id: int = 0) -> AsyncIterator[ClientConnection]:
        async with authorized(self.address.url) as connection:
            await connection.send(encode(hello(agent_id, node_id)))
            assert await self.heard.next() == ("joined", agent_id)
            yield connection

    @asynccontextmanager
    async def raw(self, *chunks: bytes) -> AsyncIterator[Peer]:
        reader, writer = await asyncio.open_connection(self.address.host, self.address.port)
        try:
            for chunk in chunks:
                writer.write(chunk)
            yield reader, writer
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()

    @asynccontextmanager
    async def raw_agent(self, agent_id: str) -> AsyncIterator[Peer]:
        """An agent that has joined and from then on does only what the test writes."""
        async with self.raw(handshake(bearer(TOKEN))) as (reader, writer):
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON_S)
            assert answer.startswith(b"HTTP/1.1 101 ")
            writer.write(text_frame(encode(hello(agent_id)).encode()))
            assert await self.heard.next() == ("joined", agent_id)
            yield reader, writer


@asynccontextmanager
async def room(
    lease_s: float = 60.0, tls: Tls | None = None, hello_s: float = 60.0, close_s: float = 2.0
) -> AsyncIterator[Room]:
    """A server on a free port; its deadlines are far away unless the test is about them."""
    heard = Heard()
    server = CoordinatorServer(TOKEN, heard, lease_s, tls=tls, hello_s=hello_s, close_s=close_s)
    address = await server.start(LOOPBACK, (0,))
    try:
        yield Room(server, address, heard)
    finally:
        await asyncio.wait_for(server.stop(), SOON_S)


def authorized(url: str) -> connect:
    return connect(url, additional_headers={"Authorization": bearer(TOKEN)}, proxy=None)


async def receive(connection: ClientConnection) -> ToAgent:
    return decode_to_agent(await asyncio.wait_for(connection.recv(), SOON_S))


def handshake(*authorizations: str) -> bytes:
    lines = [
        "GET / HTTP/1.1", "Host: here", "Upgrade: websocket", "Connection: Upgrade",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13",
        *(f"Authorization: {value}" for value in authorizations),
    ]  # fmt: skip
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def speak(connection: ClientConnection, said: str | bytes) -> None:
    """Say something to which the only answer is the end of the connection."""
    await connection.send(said)
    await asyncio.wait_for(connection.recv(), SOON_S)


def text_frame(payload: bytes) -> bytes:
    return Frame(Opcode.TEXT, payload).serialize(mask=True)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
