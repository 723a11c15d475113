"""TensorFlowOnSpark's `reservation`: a meeting point for the processes of a program.

Nodes of sparkdl meet at the driver's coordinator instead. A `TFCluster` has a server for clients
that ask for the nodes, or for the end of a stream: `python -m sparkdl.tfos.reservation HOST PORT`
asks for it, as `stop_streaming.py` of TensorFlowOnSpark's examples does.
https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/reservation.py
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError, connection as mp_connection, current_process
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from sparkdl.control.ports import listening_socket
from sparkdl.control.values import decode_value, encode_value
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, LaunchError, ProtocolError, ReservationTimeoutError
from sparkdl.core.settings import Environment
from sparkdl.tfos.util import get_ip_address

__all__ = ["Client", "Reservations", "Server"]

TOKEN_VARIABLE = "SPARKDL_RESERVATION_TOKEN"
_log = logging.getLogger(__name__)
_POLL_S = 0.1
_MAX_NBYTES = 1024 * 1024


class Reservations:
    """The nodes that have registered.

    Args:
        required: how many are awaited.
    """

    def __init__(self, required: int) -> None:
        self.required = required
        self._nodes: list[Any] = []

    def add(self, meta: Any) -> None:
        """Add a node."""
        self._nodes.append(meta)

    def done(self) -> bool:
        """Whether all nodes have registered."""
        return not self.remaining()

    def get(self) -> list[Any]:
        """Return the nodes that have registered."""
        return list(self._nodes)

    def remaining(self) -> int:
        """Return how many nodes have not registered yet."""
        return max(0, self.required - len(self._nodes))


class Server:
    """The meeting point, on the driver.

    Args:
        count: how many nodes are awaited.

    Attributes:
        done: whether a client has asked for the end, or `stop` was called.
        address: `(host, port)`, once it has been started.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"count={count}: must be 1 or more nodes")
        self.reservations = Reservations(count)
        self.done = False
        self.address: tuple[str, int] | None = None
        self._listening: tuple[socket.socket, threading.Thread] | None = None

    def start(self, beside: str | None = None) -> tuple[str, int]:
        """Listen on the first free port of `TFOS_SERVER_PORT`, and return the address.

        Args:
            beside: the host of a coordinator, which may have the only one: then any other is taken.

        Raises:
            ConfigError: if none is free.
        """
        environment = Environment.read()
        host = beside or environment.driver_host or get_ip_address()
        ports = [*environment.driver_ports, *([0] if beside else [])]
        sock = listening_socket(host, ports, "the TFoS server", "TFOS_SERVER")
        self.address = sock.getsockname()[:2]
        thread = threading.Thread(
            target=self._listen, args=(sock,), name="sparkdl-reservation", daemon=True
        )
        self._listening = (sock, thread)
        thread.start()
        return self.address

    def await_reservations(
        self, sc: Any = None, status: Mapping[str, Any] | None = None, timeout: float = 600
    ) -> list[Any]:
        """Wait until all nodes have registered, and return them.

        Args:
            sc, status: accepted for TensorFlowOnSpark's sake.
            timeout: seconds.

        Raises:
            ReservationTimeoutError: if not all came in time.
        """
        return _wait_for(self.reservations.done, self.reservations.get, timeout)

    def stop(self) -> None:
        """Close the port; does nothing the second time."""
        self.done = True
        listening, self._listening = self._listening, None
        if listening is not None:
            sock, thread = listening
            # Closing a socket does not wake the thread that waits for its next connection.
            with suppress(OSError):
                socket.create_connection(sock.getsockname()[:2], 1.0).close()
            thread.join()

    def _listen(self, sock: socket.socket) -> None:
        with sock:
            while self._listening is not None:
                peer, _ = sock.accept()
                # A thread each, so that a silent peer delays no other.
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        """Answer one message of a peer that knows the token."""
        with suppress(OSError, EOFError, ProtocolError), Connection(peer.detach()) as connection:
            try:
                deliver_challenge(connection, _token())
                answer_challenge(connection, _token())
            except AuthenticationError:
                _log.warning("Rejected a client without this server's %s", TOKEN_VARIABLE)
                return
            message = decode_value(connection.recv_bytes(_MAX_NBYTES))
            connection.send_bytes(encode_value(self._answer(message)))

    def _answer(self, message: Any) -> Any:
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


class Client:
    """A process's connection to a `Server`.

    Another program than the server's needs the same secret in the environment variable
    `SPARKDL_RESERVATION_TOKEN`.

    Args:
        server_addr: `(host, port)`, as `Server.start` returned it.

    Raises:
        LaunchError: if the server does not answer, or rejects the token; also of each method.
    """

    def __init__(self, server_addr: tuple[str, int]) -> None:
        self.server_addr = server_addr
        # A wrong address or token shows here, and not in a later wait.
        self._request("QUERY")

    def register(self, reservation: Any) -> str:
        """Add this node; return `OK`.

        Args:
            reservation: a dict of plain values, see `sparkdl.control.values`.
        """
        return str(self._request("REG", reservation))

    def get_reservations(self) -> list[Any]:
        """Return the nodes that have registered."""
        return list(self._request("QINFO"))

    def await_reservations(self, timeout: float = 600) -> list[Any]:
        """Wait until all nodes have registered, and return them.

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
        try:
            with mp_connection.Client((host, port), authkey=_token()) as connection:
                connection.send_bytes(encode_value({"type": kind, "data": data}))
                return decode_value(connection.recv_bytes(_MAX_NBYTES))
        except (OSError, EOFError, AuthenticationError) as error:
            raise LaunchError(
                f"the reservation server at {host}:{port} did not answer: "
                f"{type(error).__name__}: {error}. Check that it runs, and in other programs that "
                f"{TOKEN_VARIABLE} is the same secret here and there"
            ) from error


def _token() -> bytes:
    """Return the secret of server and clients; unless it is set, one of this process alone."""
    text = os.environ.get(TOKEN_VARIABLE)
    return text.encode() if text else bytes(current_process().authkey)


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


if __name__ == "__main__":
    Client((sys.argv[1], int(sys.argv[2]))).request_stop()
