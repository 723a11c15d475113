"""A TCP proxy on loopback whose network can be cut: what is sent meanwhile waits, ends as well.

Runs in: the process of pytest
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType


class Proxy:
    """Forwards connections to `host:port` while the network is whole. A context manager.

    Args:
        break_at: the connections break when so many bytes have been sent to the target; once.
    """

    def __init__(self, host: str, port: int, break_at: int | None = None) -> None:
        self._target = (host, port)
        self._left_nbytes = break_at
        self.has_broken = False
        self._is_whole = threading.Event()
        self._is_whole.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self.port = int(self._listener.getsockname()[1])

    def cut(self) -> None:
        """Forward nothing more: no byte, no end, no new connection."""
        self._is_whole.clear()

    def mend(self) -> None:
        """Forward what has waited, and go on."""
        self._is_whole.set()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(self._listener)
        for sock in list(self._sockets):
            self._close(sock)
        self.mend()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                self._is_whole.wait()
                theirs = socket.create_connection(self._target)
                self._sockets += [ours, theirs]
                for pair in ((ours, theirs, True), (theirs, ours, False)):
                    thread = threading.Thread(target=self._forward, args=pair, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_to_target: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._is_whole.wait()
                sink.sendall(data)
                if is_to_target and self._left_nbytes is not None:
                    self._left_nbytes -= len(data)
                    if self._left_nbytes < 0:
                        self._break()
        self._is_whole.wait()
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _break(self) -> None:
        self._left_nbytes, self.has_broken = None, True
        for sock in list(self._sockets):
            self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
