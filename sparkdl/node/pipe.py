"""The agent's end of the pipe to a child: never blocks the loop, keeps order, owns what it sends.

Runs in: agent
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

from sparkdl.control.channel import Local, Unframer, frame, receive


class ChildPipe:
    """Sends and receives on the event loop; other threads go through `call_soon_threadsafe`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_message: Callable[[Local, int], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_message = on_message
        self._unframer = Unframer()
        self._outbox: deque[tuple[bytes, int]] = deque()
        self._is_open = True
        sock.setblocking(False)
        loop.add_reader(sock, self._read)

    def send(self, message: Local, fd: int = -1) -> None:
        """Queue a message; `fd` is the pipe's from here on."""
        if not self._is_open:
            _close(fd)
            return
        self._outbox.append((frame(message), fd))
        if len(self._outbox) == 1:
            self._flush()

    def close(self) -> None:
        """Read what is there, then stop; the caller closes the socket."""
        if self._is_open:
            self._read()
        self._shut()

    def _shut(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._drop_outbox()
        self._unframer.close()

    def _drop_outbox(self) -> None:
        for _data, fd in self._outbox:
            _close(fd)
        self._outbox.clear()

    def _read(self) -> None:
        while self._is_open:
            try:
                messages = receive(self._sock, self._unframer)
            except BlockingIOError:
                return
            except OSError:
                messages = None
            if messages is None:
                self._shut()
                return
            for message, fd in messages:
                self._on_message(message, fd)

    def _flush(self) -> None:
        while self._outbox:
            data, fd = self._outbox[0]
            try:
                if fd >= 0:
                    sent = socket.send_fds(self._sock, [data], [fd])
                else:
                    sent = self._sock.send(data)
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError:
                self._drop_outbox()  # the child has ended; its last words are still to be read
                break
            _close(fd)
            if sent < len(data):
                self._outbox[0] = (data[sent:], -1)
            else:
                self._outbox.popleft()
        self._loop.remove_writer(self._sock)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
