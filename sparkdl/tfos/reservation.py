"""TensorFlowOnSpark's `reservation`: a meeting point of its own for a program's processes.

Runs in: anywhere

    client                                  server
      │  {type: REG, data: …} ────────────────▶│  ◀── OK
      │  {type: QUERY, data: seconds} ────────▶│  ◀── whether all are there, by then
      │  {type: QINFO} ───────────────────────▶│  ◀── the list
      │  {type: STOP} ────────────────────────▶│  ◀── OK; `done` is true from then on

Messages are MessagePack in WebSocket frames, and each connection shows the server's token before
anything else of it is read. Nodes of sparkdl do not meet here, but at the driver's coordinator; a
`TFCluster` has a server for clients that ask for the nodes, or for the end of a stream.
https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/reservation.py
"""

from __future__ import annotations

import asyncio
import http
import logging
import os
import socket
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from websockets.asyncio.server import Server as WebSocketServer
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.http11 import Request, Response
from websockets.sync.client import ClientConnection, connect

from sparkdl.control.auth import bearer, is_authorized, new_token
from sparkdl.control.values import decode_value, encode_value
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, LaunchError, ProtocolError, ReservationTimeoutError
from sparkdl.core.settings import Environment
from sparkdl.core.world import host_port
from sparkdl.tfos.util import get_ip_address

__all__ = ["Address", "Client", "Reservations", "Server"]

TOKEN_VARIABLE = "SPARKDL_RESERVATION_TOKEN"
_log = logging.getLogger(__name__)
_ANSWER_S = 30.0
_TURN_S = 5.0
"""How long one QUERY may wait at the server, so that a lost connection is noticed."""
_POLL_S = 0.05
_MAX_NBYTES = 1024 * 1024
_MAX_RETRIES = 3
T = TypeVar("T")


class Address(tuple[str, int]):
    """Where a server listens, `(host, port)`, with the token that its clients have to show."""

    token: str

    def __new__(cls, host: str, port: int, token: str) -> Address:
        """Return the address."""
        address = super().__new__(cls, (host, port))
        address.token = token
        return address

    def __reduce__(self) -> tuple[type[Address], tuple[str, int, str]]:
        return Address, (self[0], self[1], self.token)


class Reservations:
    """The nodes that have come, for any thread to look at.

    Args:
        required: how many are awaited.
    """

    def __init__(self, required: int) -> None:
        self.required = required
        self.lock = threading.Condition()
        self.reservations: list[Any] = []

    def add(self, meta: Any) -> None:
        """Add a node; one that comes again under its `executor_id` takes its own place."""
        with self.lock:
            self.reservations = [r for r in self.reservations if not _is_same_node(r, meta)]
            self.reservations.append(meta)
            self.lock.notify_all()

    def done(self) -> bool:
        """Whether all are there."""
        return not self.remaining()

    def get(self) -> list[Any]:
        """Return those that are there."""
        with self.lock:
            return list(self.reservations)

    def remaining(self) -> int:
        """Return how many are not there yet."""
        with self.lock:
            return max(0, self.required - len(self.reservations))


def _is_same_node(one: Any, other: Any) -> bool:
    if not all(isinstance(meta, Mapping) and "executor_id" in meta for meta in (one, other)):
        return False
    return bool((one.get("host"), one["executor_id"]) == (other.get("host"), other["executor_id"]))


class Server:
    """The meeting point: one thread, on the driver.

    Args:
        count: how many nodes are awaited.

    Attributes:
        done: whether a client has asked for the end, or `stop` was called.
        address: where it listens, once it has been started.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"a server waits for one node at least, not {count}")
        self.reservations = Reservations(count)
        self.done = False
        self.address: Address | None = None
        self._token = os.environ.get(TOKEN_VARIABLE) or new_token()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: WebSocketServer | None = None

    def get_server_ip(self) -> str:
        """Return `TFOS_SERVER_HOST`, or this machine's address."""
        return Environment.read().driver_host or get_ip_address()

    def get_server_ports(self) -> list[int]:
        """Return the ports of `TFOS_SERVER_PORT`, which is `0`, a port or a range like `5000-5010`.

        Raises:
            ConfigError: if it is none of these.
        """
        return list(Environment.read().driver_ports)

    def start_listening_socket(self) -> socket.socket:
        """Return a socket that listens on the first of the ports that is free.

        Raises:
            ConfigError: if none is.
        """
        return _listening_socket(self.get_server_ip(), self.get_server_ports())

    def start(self, beside: str | None = None) -> Address:
        """Listen; return where. Give it to `Client`, also through a closure that Spark ships.

        Args:
            beside: the host of a coordinator, which has the first free port of `TFOS_SERVER_PORT`:
                this server takes the next one there, or any where there is none.
        """
        if beside is None:
            sock = self.start_listening_socket()
        else:
            sock = _listening_socket(beside, [*self.get_server_ports(), 0])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="sparkdl-reservation", daemon=True
        )
        self._thread.start()
        self._server = _await_on(self._loop, self._listen(sock))
        host, port = sock.getsockname()[:2]
        _log.info("Listening for reservations at %s:%d", host, port)
        self.address = Address(host, port, self._token)
        return self.address

    def await_reservations(
        self, sc: Any = None, status: Mapping[str, Any] | None = None, timeout: float = 600
    ) -> list[Any]:
        """Wait until all nodes are there, and return them.

        Args:
            sc: accepted for TensorFlowOnSpark's sake; it is left alone.
            status: an entry `error` in it ends the wait.
            timeout: seconds.

        Raises:
            LaunchError: if `status` has an error.
            ReservationTimeoutError: if not all came in time.
        """
        deadline = Deadline.after(timeout)
        with self.reservations.lock:
            while not self.reservations.done():
                if status and "error" in status:
                    raise LaunchError(f"a node could not be started: {status['error']}")
                if deadline.has_passed:
                    missing, required = self.reservations.remaining(), self.reservations.required
                    raise ReservationTimeoutError(
                        f"timed out waiting for reservations to complete: {required - missing} of "
                        f"{required} nodes came within {timeout:g} s"
                    )
                self.reservations.lock.wait(min(1.0, deadline.remaining_s))
        return self.reservations.get()

    def stop(self) -> None:
        """Close all connections and the port; does nothing the second time."""
        self.done = True
        loop, self._loop = self._loop, None
        if loop is None:
            return
        _await_on(loop, self._close())
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(_ANSWER_S)
        if not self._thread.is_alive():
            loop.close()

    async def _listen(self, sock: socket.socket) -> WebSocketServer:
        server: WebSocketServer = await serve(
            self._serve,
            sock=sock,
            process_request=self._check_token,
            max_size=_MAX_NBYTES,
            compression=None,
            open_timeout=_ANSWER_S,
            close_timeout=1.0,
            logger=logging.getLogger("sparkdl.tfos.websockets"),
        )
        return server

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def _check_token(self, connection: ServerConnection, request: Request) -> Response | None:
        if is_authorized(request.headers.get("Authorization"), self._token):
            return None
        return connection.respond(http.HTTPStatus.UNAUTHORIZED, "wrong or missing token\n")

    async def _serve(self, connection: ServerConnection) -> None:
        try:
            async for data in connection:
                message = decode_value(data if isinstance(data, bytes) else data.encode())
                await connection.send(encode_value(await self._answer(message)))
        except (ConnectionClosed, ProtocolError) as error:
            _log.debug("A client's connection ended: %s", error)

    async def _answer(self, message: Any) -> Any:
        given = message if isinstance(message, dict) else {}
        kind, data = given.get("type"), given.get("data")
        if kind == "QUERY":
            return await self._all_there(data if isinstance(data, (int, float)) else 0.0)
        if kind == "QINFO":
            return self.reservations.get()
        if kind == "REG":
            self.reservations.add(data)
        elif kind == "STOP":
            self.done = True
        else:
            return "ERR"
        return "OK"

    async def _all_there(self, within_s: float) -> bool:
        deadline = Deadline.after(min(max(0.0, within_s), _TURN_S))
        while not self.reservations.done() and not deadline.has_passed:
            await asyncio.sleep(_POLL_S)
        return self.reservations.done()


def _listening_socket(host: str, ports: Sequence[int]) -> socket.socket:
    problem = ""  # no exception: its traceback would keep this frame and all its callers' sockets
    for port in ports:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family)
        except OSError as error:
            problem = str(error)
    raise ConfigError(
        f"no server can listen on {host}, ports {ports[0]}-{ports[-1]}: {problem}. Set "
        "TFOS_SERVER_HOST to an address of this machine, and TFOS_SERVER_PORT to a free port "
        "or range"
    )


def _await_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` on another thread's loop, and return its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(_ANSWER_S)


class Client:
    """A node's connection to a `Server`.

    Args:
        server_addr: what `Server.start` returned. For a plain `(host, port)` the token is read from
            the environment variable `SPARKDL_RESERVATION_TOKEN`, which the server reads as well.

    Raises:
        ConfigError: if there is no token.
        LaunchError: if the server does not answer, or refuses the token.
    """

    def __init__(self, server_addr: tuple[str, int]) -> None:
        self.server_addr = server_addr
        token = getattr(server_addr, "token", None) or os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise ConfigError(
                f"the address {tuple(server_addr)} has no token: give the one that Server.start() "
                f"returned, or set {TOKEN_VARIABLE} to the same secret here and at the server"
            )
        self._token = token
        self._held = ExitStack()  # websockets wants a `with` for each of its connections
        self._connection = self._connect()

    def register(self, reservation: Any) -> str:
        """Add this node; return `OK`.

        Args:
            reservation: a dict of plain values, see `sparkdl.control.values`.
        """
        return str(self._request("REG", reservation))

    def get_reservations(self) -> list[Any]:
        """Return the nodes that are there."""
        return list(self._request("QINFO"))

    def await_reservations(self, timeout: float = 600) -> list[Any]:
        """Wait until all nodes are there, and return them.

        Args:
            timeout: seconds.

        Raises:
            ReservationTimeoutError: if not all came in time.
        """
        deadline = Deadline.after(timeout)
        while not self._request("QUERY", min(_TURN_S, deadline.remaining_s)):
            if deadline.has_passed:
                raise ReservationTimeoutError(
                    f"not all nodes had come after {timeout:g} s; there are "
                    f"{len(self.get_reservations())}"
                )
        return self.get_reservations()

    def request_stop(self) -> str:
        """Ask the server's owner to end; return `OK`."""
        return str(self._request("STOP"))

    def close(self) -> None:
        """Close the connection."""
        self._held.close()

    def _connect(self) -> ClientConnection:
        host, port = self.server_addr
        try:
            connection = connect(
                f"ws://{host_port(host, port)}",
                additional_headers={"Authorization": bearer(self._token)},
                max_size=_MAX_NBYTES,
                compression=None,
                proxy=None,
                open_timeout=_ANSWER_S,
                close_timeout=1.0,
            )
            return self._held.enter_context(connection)
        except (OSError, TimeoutError, WebSocketException) as error:
            raise LaunchError(
                f"the reservation server at {host}:{port} does not let this process in: "
                f"{type(error).__name__}: {error}"
            ) from None

    def _request(self, kind: str, data: Any = None) -> Any:
        message = encode_value({"type": kind, "data": data})
        for _ in range(_MAX_RETRIES - 1):
            try:
                return self._ask(message)
            except ConnectionClosed:
                self._held.close()
                self._connection = self._connect()
        return self._ask(message)

    def _ask(self, message: bytes) -> Any:
        self._connection.send(message)
        try:
            answer = self._connection.recv(timeout=_ANSWER_S)
        except TimeoutError:
            raise LaunchError(f"the server at {self.server_addr} did not answer") from None
        return decode_value(answer if isinstance(answer, bytes) else answer.encode())
