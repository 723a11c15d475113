"""The coordinator's WebSocket server: accepts agents and passes on their messages.

Runs in: driver

It decides nothing. A connection is refused before any message is read unless it carries the token;
its first message must be a `Hello`, soon; every message must be one of `FromAgent`. When too many
unauthenticated connections are open, the oldest is closed.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ReferenceType, WeakSet, ref

from websockets.asyncio.server import Server as WebSocketServer, ServerConnection, broadcast, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State

from sparkdl.control.auth import CAUSE_PATH, FINISHED, is_authorized
from sparkdl.control.lease import CLOSE_S, driver_keep_alive, is_host_silent
from sparkdl.control.messages import (
    MAX_MESSAGE_NBYTES,
    FromAgent,
    Hello,
    StartFailed,
    ToAgent,
    decode_from_agent,
    encode,
)
from sparkdl.control.ports import BACKLOG, listening_socket
from sparkdl.control.tls import HANDSHAKE_S, Tls
from sparkdl.core.errors import ProtocolError
from sparkdl.core.options import Recovery
from sparkdl.core.world import host_port

_log = logging.getLogger(__name__)

MAX_STRANGERS = 256
"""Connections without a token that are kept; the oldest goes first. Agents of a launch come at
once, and send it soon."""
_PING_TIMED_OUT = 1011
POLICY_VIOLATION = 1008


class Listener(Protocol):
    """The receiver of the server's events, called on the event loop."""

    def joined(self, hello: Hello) -> None:
        """An agent has connected."""

    def start_failed(self, message: StartFailed) -> None:
        """A node cannot start: its task has said so, and goes."""

    def received(self, agent_id: str, message: FromAgent) -> None:
        """An agent that joined has sent a message."""

    def left(self, agent_id: str, reason: str) -> None:
        """The connection of an agent that joined has ended."""

    def silent(self, hello: Hello) -> None:
        """The host of an agent that joined does not answer; its connection has ended."""

    def cause(self) -> str | None:
        """Return why the cluster has failed; empty if it has not; None if it has finished."""


@dataclass(frozen=True)
class ServerAddress:
    host: str
    port: int
    is_encrypted: bool = False

    @property
    def url(self) -> str:
        scheme = "wss" if self.is_encrypted else "ws"
        return f"{scheme}://{host_port(self.host, self.port)}"


class CoordinatorServer:
    """Accepts agents. All methods run on the event loop that started it.

    Args:
        hello_s: seconds to wait for an agent's first message.
        close_s: for the end of a connection that the server closes; less with a short lease.

    Attributes:
        tls: the certificate it presents; `None` without TLS.
    """

    def __init__(
        self,
        token: str,
        listener: Listener,
        lease_s: float,
        host_timeout_s: float = Recovery.host_timeout_s,
        tls: Tls | None = None,
        hello_s: float = 10.0,
        close_s: float = CLOSE_S,
    ) -> None:
        self._token = token
        self.tls = tls
        self._listener = listener
        self._keep = driver_keep_alive(lease_s, host_timeout_s)
        self._hello_s, self._close_s = hello_s, close_s
        # Weak, because websockets owns connections and tasks, and does not report their end here.
        self._accepting: WeakSet[asyncio.Task[Any]] = WeakSet()
        """asyncio's tasks that perform a TLS handshake for a new connection."""
        self._strangers: deque[ReferenceType[ServerConnection]] = deque()
        """The last ones that were accepted, the oldest first; agents by now, perhaps."""
        self._connections: dict[str, ServerConnection] = {}
        self.address: ServerAddress | None = None
        self._server: WebSocketServer | None = None

    async def start(self, host: str, ports: tuple[int, ...]) -> ServerAddress:
        """Listen on `host` at the first of `ports` that is free; 0 is any."""
        encryption: dict[str, Any] = {}
        if self.tls is not None:
            handshake_s = min(HANDSHAKE_S, self._hello_s)
            encryption = {"ssl": self.tls.context(), "ssl_handshake_timeout": handshake_s}
        sock = listening_socket(host, ports, "the coordinator", "SPARKDL_DRIVER")
        self._server = await serve(
            self._serve_agent,
            sock=sock,
            process_request=self._on_request,
            create_connection=self._accept,  # type: ignore[arg-type]
            max_size=MAX_MESSAGE_NBYTES,
            backlog=BACKLOG,
            # Messages are small, and zlib takes memory and time for each agent.
            compression=None,
            open_timeout=self._hello_s,
            ping_interval=self._keep.ping_interval,
            ping_timeout=self._keep.ping_timeout,
            close_timeout=min(self._close_s, self._keep.close_timeout),
            logger=logging.getLogger("sparkdl.control.websockets"),
            **encryption,
        )
        self.address = ServerAddress(host, sock.getsockname()[1], self.tls is not None)
        return self.address

    def send(self, agent_id: str, message: ToAgent) -> None:
        """Send a message; `left` reports an agent that has gone, not this."""
        connection = self._connections.get(agent_id)
        if connection is not None:
            # `broadcast` never waits: a slow agent must not hold up the driver's loop.
            broadcast((connection,), encode(message))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            # `wait_closed` would wait for each handshake that a silent peer has begun.
            for task in self._accepting:
                task.cancel()
            for stranger in self._strangers:
                _hang_up(stranger())  # or the server would wait for its handshake
            await self._server.wait_closed()

    def _accept(self, *args: Any, **options: Any) -> ServerConnection:
        connection = _Connection(*args, **options)
        if task := asyncio.current_task():
            self._accepting.add(task)
        self._strangers.append(ref(connection))
        if len(self._strangers) > MAX_STRANGERS:
            _hang_up(self._strangers.popleft()())
        return connection

    def _on_request(self, connection: ServerConnection, request: Request) -> Response | None:
        """Refuse a request without the token; answer that of a feeder."""
        headers = request.headers.get_all("Authorization")
        # `headers[…]` raises for a header that comes twice.
        if len(headers) != 1 or not is_authorized(headers[0], self._token):
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "wrong or missing token\n")
        if request.path == CAUSE_PATH:
            cause = self._listener.cause()
            if cause is None:
                return connection.respond(FINISHED, "map_fun has returned on every node\n")
            return connection.respond(http.HTTPStatus.OK, cause)
        return None

    async def _serve_agent(self, connection: ServerConnection) -> None:
        hello = await self._hello(connection)
        if hello is None:
            return
        self._connections[hello.agent_id] = connection
        self._keep.watch_host(connection.transport.get_extra_info("socket"))
        self._listener.joined(hello)
        reason, is_silent = "its connection closed", False
        try:
            async for data in connection:
                self._listener.received(hello.agent_id, decode_from_agent(data))
        except ConnectionClosed as closed:
            is_silent = is_host_silent(closed)
            reason = self._why(closed, hello.host)
        except ProtocolError as error:
            reason = str(error)
            await connection.close(POLICY_VIOLATION, "not a message")
        finally:
            del self._connections[hello.agent_id]
            self._listener.left(hello.agent_id, reason)
            if is_silent:
                self._listener.silent(hello)

    async def _hello(self, connection: ServerConnection) -> Hello | None:
        """Return the first message; none if it is no agent's, and all is done."""
        try:
            first = await asyncio.wait_for(connection.recv(), self._hello_s)
            hello = decode_from_agent(first)
            if isinstance(hello, StartFailed):
                self._listener.start_failed(hello)
                return None
            # A second connection with this id would get the messages of the first.
            if not isinstance(hello, Hello) or hello.agent_id in self._connections:
                raise ProtocolError("the first message was not a new agent's Hello")
            return hello
        except (ProtocolError, asyncio.TimeoutError) as error:
            _log.warning(
                "Rejected a connection from %s: %s. If no node is missing, it was another "
                "program: let only the cluster's hosts reach this port",
                connection.remote_address,
                error,
            )
            await connection.close(POLICY_VIOLATION, "a Hello was expected")
        except ConnectionClosed:
            pass
        return None

    def _why(self, closed: ConnectionClosed, host: str) -> str:
        if is_host_silent(closed):
            return f"{host} has not answered for {self._keep.host_timeout:g} s"
        if closed.rcvd is None and closed.sent and closed.sent.code == _PING_TIMED_OUT:
            return f"it has sent no data for {self._keep.ping_timeout:g} s"
        return f"its connection broke: {closed}"


class _Connection(ServerConnection):
    """Its pings are alike: the library draws them from `random`, whose state is the user's."""

    async def ping(self, data: Any = None) -> Any:
        return await super().ping(data or "alive")


def _hang_up(stranger: ServerConnection | None) -> None:
    # It is CONNECTING until its request, with the token, has been answered.
    if stranger and stranger.state is State.CONNECTING and hasattr(stranger, "transport"):
        stranger.transport.abort()
