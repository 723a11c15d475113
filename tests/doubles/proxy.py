"""A TCP proxy on loopback whose network can stall, be cut, break once, or be listened to."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from typing_extensions import Self


class Proxy:
    """Forwards connections to a server. A context manager.

    Args:
        uri: of the server.
        records: keeps what is forwarded in `passed`.
        break_at: the connections break when so many bytes have been sent to the server; once.
        port: where the server is found; any by default.

    Attributes:
        uri: where the server is found through this proxy.
        passed: the bytes that were forwarded, of all connections and both directions.
    """

    def __init__(
        self, uri: str, records: bool = False, break_at: int | None = None, port: int = 0
    ) -> None:
        parts = urlsplit(uri)
        assert parts.port
        self._server = (parts.hostname, parts.port)
        self._records, self._left_nbytes = records, break_at
        self.passed = bytearray()
        self.has_broken = False
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._is_cut = False
        # A short backlog: a network that stalls soon takes no new connections either.
        self._listener = socket.create_server(("127.0.0.1", port), backlog=4)
        self.uri = parts._replace(netloc=f"127.0.0.1:{self._listener.getsockname()[1]}").geturl()
        self._threads = [threading.Thread(target=self._accept, name="proxy", daemon=True)]
        self._threads[0].start()

    def stall(self) -> None:
        """Forward nothing more: no byte, no end, no new connection."""
        self._flows.clear()

    def mend(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            _end(self._listener, *self._sockets)
        self.mend()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._sockets):
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._flows.wait()
                far = socket.create_connection(self._server)
                with self._lock:
                    self._sockets += [near, far]
                    if self._is_cut:
                        _end(near, far)
                for way in ((near, far, True), (far, near, False)):
                    thread = threading.Thread(target=self._forward, args=way, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_to_server: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                self._flows.wait()
                if self._records:
                    self.passed += data
                sink.sendall(data)
                if is_to_server and self._left_nbytes is not None:
                    self._left_nbytes -= len(data)
                    if self._left_nbytes < 0:
                        self._break()
            self._flows.wait()
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._flows.wait()
            _end(source, sink)

    def _break(self) -> None:
        with self._lock:
            self._left_nbytes, self.has_broken = None, True
            _end(*self._sockets)


def _end(*sockets: socket.socket) -> None:
    for sock in sockets:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
