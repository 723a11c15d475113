"""TensorFlowOnSpark's `reservation`: a meeting point of its own for a program's processes.

Runs in: anywhere

    client                                  server
      │  {type: REG, data: …} ────────────────▶│  ◀── OK
      │  {type: QUERY} ───────────────────────▶│  ◀── whether all are there
      │  {type: QINFO} ───────────────────────▶│  ◀── the list
      │  {type: STOP} ────────────────────────▶│  ◀── OK; `done` is true from then on

Each message is the body of an HTTP request, as MessagePack, and decoded only if the request shows
the server's token. Nodes of sparkdl do not meet here, but at the driver's coordinator; a
`TFCluster` has a server for clients that ask for the nodes, or for the end of a stream.
https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/reservation.py
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from sparkdl.control.auth import bearer, is_authorized, new_token
from sparkdl.control.ports import listening_socket
from sparkdl.control.tls import Tls, Trust
from sparkdl.control.values import decode_value, encode_value
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, LaunchError, ProtocolError, ReservationTimeoutError
from sparkdl.core.settings import Environment
from sparkdl.tfos.util import get_ip_address

__all__ = ["Address", "Client", "Reservations", "Server"]

TOKEN_VARIABLE = "SPARKDL_RESERVATION_TOKEN"
CERT_VARIABLE = "SPARKDL_RESERVATION_CERT"
_log = logging.getLogger(__name__)
_ANSWER_S = 30.0
_POLL_S = 0.1
_MAX_NBYTES = 1024 * 1024
_SERVER = "the TFoS server", "TFOS_SERVER"


class Address(tuple[str, int]):
    """Where a server listens, `(host, port)`, with the token that its clients have to show.

    Attributes:
        trust: what the server shows them; `None` without TLS.
    """

    token: str
    trust: Trust | None

    def __new__(cls, host: str, port: int, token: str, trust: Trust | None = None) -> Address:
        """Return the address."""
        address = super().__new__(cls, (host, port))
        address.token = token
        address.trust = trust
        return address

    def __reduce__(self) -> tuple[type[Address], tuple[str, int, str, Trust | None]]:
        return Address, (self[0], self[1], self.token, self.trust)


class Reservations:
    """The nodes that have come.

    Args:
        required: how many are awaited.
    """

    def __init__(self, required: int) -> None:
        self.required = required
        self._nodes: dict[object, Any] = {}

    def add(self, meta: Any) -> None:
        """Add a node; one that comes again under its `executor_id` takes its own place."""
        is_known = isinstance(meta, Mapping) and "executor_id" in meta
        # A new object equals no other, so such a node takes no other's place.
        name = repr((meta.get("host"), meta["executor_id"])) if is_known else object()
        self._nodes[name] = meta

    def done(self) -> bool:
        """Whether all are there."""
        return not self.remaining()

    def get(self) -> list[Any]:
        """Return the nodes that have registered."""
        return list(self._nodes.values())

    def remaining(self) -> int:
        """Return how many are not there yet."""
        return max(0, self.required - len(self._nodes))


class Server:
    """The meeting point, on the driver; a thread for each request.

    Args:
        count: how many nodes are awaited.
        tls: its certificate and key; `None` for no TLS.

    Attributes:
        done: whether a client has asked for the end, or `stop` was called.
        address: where it listens, once it has been started.
    """

    def __init__(self, count: int, tls: Tls | None = None) -> None:
        if count < 1:
            raise ConfigError(f"a server waits for one node at least, not {count}")
        self.reservations = Reservations(count)
        self.done = False
        self.address: Address | None = None
        self._token = os.environ.get(TOKEN_VARIABLE) or new_token()
        self._tls = tls
        self._http: _HttpServer | None = None

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
        """Return a socket that listens on the first free port.

        Raises:
            ConfigError: if none is.
        """
        return listening_socket(self.get_server_ip(), self.get_server_ports(), *_SERVER)

    def start(self, beside: str | None = None) -> Address:
        """Listen; return where. Give it to `Client`, also through a closure that Spark ships.

        Args:
            beside: the host of a coordinator, which has the first free port of `TFOS_SERVER_PORT`:
                this server takes the next one there, or any where there is none.
        """
        if beside is None:
            sock = self.start_listening_socket()
        else:
            sock = listening_socket(beside, [*self.get_server_ports(), 0], *_SERVER)
        self._http = _HttpServer(self, sock, self._tls)
        threading.Thread(
            target=self._http.serve_forever,
            args=(_POLL_S,),
            name="sparkdl-reservation",
            daemon=True,
        ).start()
        host, port = sock.getsockname()[:2]
        _log.info("Listening for reservations at %s:%d", host, port)
        self.address = Address(host, port, self._token, self._tls.trust if self._tls else None)
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

        def is_over() -> bool:
            if status and "error" in status:
                raise LaunchError(f"a node could not be started: {status['error']}")
            return self.reservations.done()

        return _wait_for(is_over, self.reservations.get, timeout)

    def stop(self) -> None:
        """Close the port; does nothing the second time."""
        self.done = True
        http, self._http = self._http, None
        if http is not None:
            http.shutdown()
            http.server_close()

    def is_authorized(self, header: str | None) -> bool:
        """Whether a request with this header shows the token."""
        return is_authorized(header, self._token)

    def answer(self, message: Any) -> Any:
        """Return the answer to a message."""
        given = message if isinstance(message, dict) else {}
        kind = given.get("type")
        if kind == "QUERY":
            return self.reservations.done()
        if kind == "QINFO":
            return self.reservations.get()
        if kind == "REG":
            self.reservations.add(given.get("data"))
        elif kind == "STOP":
            self.done = True
        else:
            return "ERR"
        return "OK"


class _HttpServer(ThreadingTCPServer):
    """An HTTP server on `sock`; answers each request in a thread."""

    daemon_threads = True

    def __init__(self, owner: Server, sock: socket.socket, tls: Tls | None) -> None:
        super().__init__(sock.getsockname()[:2], _Handler, bind_and_activate=False)
        # The base class has made a socket of its own; `sock` listens already.
        self.socket.close()
        self.socket = sock
        self.owner = owner
        self._context = tls.context() if tls else None

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection; its thread shakes hands, when it reads."""
        sock, address = super().get_request()
        if self._context is not None:
            # Without the handshake, in which a silent client would hold up the accepting thread.
            sock = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the end of one connection, in one line."""
        error = sys.exc_info()[1]
        _log.warning("Refused a connection from %s: %s", client_address, error)


class _Handler(BaseHTTPRequestHandler):
    timeout = _ANSWER_S  # for each read
    server: _HttpServer

    def do_POST(self) -> None:
        """Answer a message."""
        length = self.headers.get("Content-Length", "")
        # Before the body is read: its length is the client's word.
        if not length.isdecimal() or int(length) > _MAX_NBYTES:
            return self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        body = self.rfile.read(int(length))
        if not self.server.owner.is_authorized(self.headers.get("Authorization")):
            return self.send_error(HTTPStatus.UNAUTHORIZED, "wrong or missing token")
        try:
            answer = encode_value(self.server.owner.answer(decode_value(body)))
        except ProtocolError:
            return self.send_error(HTTPStatus.BAD_REQUEST)
        self.send_response(HTTPStatus.OK)
        self.end_headers()
        self.wfile.write(answer)
        return None

    def log_message(self, format: str, *args: Any) -> None:
        """Log a request."""
        _log.debug(format, *args)


def _wait_for(
    is_over: Callable[[], bool], nodes: Callable[[], list[Any]], timeout: float
) -> list[Any]:
    """Return the nodes once `is_over`; raise `ReservationTimeoutError` after `timeout` seconds."""
    deadline, pause = Deadline.after(timeout), threading.Event()
    while not is_over():
        if deadline.has_passed:
            raise ReservationTimeoutError(
                f"timed out waiting for reservations to complete: {len(nodes())} nodes came within "
                f"{timeout:g} s"
            )
        pause.wait(min(_POLL_S, deadline.remaining_s))
    return nodes()


class Client:
    """A node's connection to a `Server`.

    Args:
        server_addr: what `Server.start` returned. For a plain `(host, port)` the environment
            variable `SPARKDL_RESERVATION_TOKEN` holds the token, at client and server.
            `SPARKDL_RESERVATION_CERT` is the path of a TLS server's certificate.

    Raises:
        ConfigError: if there is no token, or the certificate cannot be read.
        LaunchError: if the server does not answer, or refuses the token; also of each method.
    """

    def __init__(self, server_addr: tuple[str, int]) -> None:
        self.server_addr = server_addr
        token = getattr(server_addr, "token", None) or os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise ConfigError(
                f"the address {tuple(server_addr)} has no token: give the one that Server.start() "
                f"returned, or set {TOKEN_VARIABLE} to the same secret here and at the server"
            )
        self._headers = {"Authorization": bearer(token)}
        self._trust = getattr(server_addr, "trust", None) or _trust_from_file()
        # A wrong address or token shows here, and not in a later wait.
        self._request("QUERY")

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
        return _wait_for(lambda: bool(self._request("QUERY")), self.get_reservations, timeout)

    def request_stop(self) -> str:
        """Ask the server's owner to end; return `OK`."""
        return str(self._request("STOP"))

    def close(self) -> None:
        """Do nothing: each request has a connection of its own."""

    def _request(self, kind: str, data: Any = None) -> Any:
        host, port = self.server_addr
        connection = HTTPConnection(host, port, timeout=_ANSWER_S)
        try:
            if self._trust is not None:
                # `HTTPConnection` would connect without TLS.
                connection.sock = self._trust.connect(host, port, _ANSWER_S)
            message = encode_value({"type": kind, "data": data})
            connection.request("POST", "/", message, self._headers)
            answer = connection.getresponse()
            body, problem = answer.read(_MAX_NBYTES), f"{answer.status} {answer.reason}"
        except (OSError, HTTPException) as error:
            body, problem = b"", f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        if not body or not problem.startswith("200 "):
            raise LaunchError(
                f"the reservation server at {host}:{port} does not let this process in: {problem}"
            )
        return decode_value(body)


def _trust_from_file() -> Trust | None:
    path = os.environ.get(CERT_VARIABLE)
    if not path:
        return None
    try:
        return Trust(Path(path).read_bytes(), "")
    except OSError as error:
        raise ConfigError(
            f"{CERT_VARIABLE}={path!r} cannot be read: {error}. Set it to the cluster's "
            "certificate, or unset it"
        ) from None
