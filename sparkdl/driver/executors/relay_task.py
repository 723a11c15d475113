"""A relay on a Spark Connect server's host, for executors without a route to the client.

Runs in: driver. Its other end: a Python process of the server, pickled by value, without sparkdl

Executors connect to the relay. The bytes of their connections travel in the settings of the session
that the relay and the client share. Each end writes numbered pieces, which the other end removes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

SILENT_S = 60.0
"""How long the other end may send nothing until it counts as gone."""
_BEAT_S = 1.0
LOOK_S = 0.01
_IDLE_LOOK_S = 0.1
_READ_NBYTES = 1 << 16
_PIECE_NBYTES = 4 << 20
_HEAD = ">Ii"
"""A connection's number and how many bytes follow; 0 closes it, `_OPEN` opens it."""
_OPEN = -1
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_USER_TIMEOUT": 20_000}
"""Seconds, and milliseconds. Executors connect to the relay alone, so only it can notice that
an executor's host is silent.
"""
_END = "end"
_BEAT = struct.pack(_HEAD, 0, 0)


class Tunnel:
    """One end of all connections.

    Args:
        conf: the session's settings.
        out, into: prefixes of the settings that this end writes and reads.
        target: where this end connects; `None` at the accepting end.
    """

    def __init__(self, conf: Any, out: str, into: str, target: tuple[str, int] | None) -> None:
        self._conf, self._out, self._into, self._target = conf, out, into, target
        # Bounded, so that a connection is not read faster than the session takes its bytes.
        self._frames: asyncio.Queue[bytes] = asyncio.Queue(256)
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._numbers = itertools.count(1)
        self._sent = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Carry bytes until this end is not wanted, or the other has ended or is gone."""
        self._spawn(self._send())
        self._spawn(self._beat())
        try:
            await self._receive(is_wanted)
        finally:
            for task in self._tasks:
                task.cancel()
            for writer in self._writers.values():
                writer.close()
            with contextlib.suppress(Exception):  # the session is gone, perhaps
                await self._call(self._conf.set, f"{self._out}.{self._sent}", _END)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a connection that an executor has made."""
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        number = next(self._numbers)
        self._writers[number] = writer
        await self._frames.put(struct.pack(_HEAD, number, _OPEN))
        await self._carry(number, reader, writer)

    async def _carry(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_READ_NBYTES):
                await self._frames.put(struct.pack(_HEAD, number, len(piece)) + piece)
        # Otherwise the other end has closed this connection itself.
        if self._writers.pop(number, None):
            await self._frames.put(struct.pack(_HEAD, number, 0))
        writer.close()

    async def _connect(self, number: int) -> None:
        assert self._target is not None
        try:
            reader, writer = await asyncio.open_connection(*self._target)
        except OSError:
            await self._frames.put(struct.pack(_HEAD, number, 0))
            return
        self._writers[number] = writer
        self._spawn(self._carry(number, reader, writer))

    async def _send(self) -> None:
        while True:
            frames = [await self._frames.get()]
            nbytes = len(frames[0])
            # Each piece is a request to the server, so whatever waits goes along.
            while nbytes < _PIECE_NBYTES and not self._frames.empty():
                frames.append(self._frames.get_nowait())
                nbytes += len(frames[-1])
            text = base64.b64encode(b"".join(frames)).decode()
            await self._call(self._conf.set, f"{self._out}.{self._sent}", text)
            self._sent += 1

    async def _receive(self, is_wanted: Callable[[], bool]) -> None:
        number, pause_s, loop = 0, LOOK_S, asyncio.get_running_loop()
        end_s = loop.time() + SILENT_S
        while is_wanted() and loop.time() < end_s:
            name = f"{self._into}.{number}"
            text = await self._call(self._conf.get, name, "")
            if not text:
                pause_s = min(1.5 * pause_s, _IDLE_LOOK_S)
                await asyncio.sleep(pause_s)
                continue
            if text == _END:
                return
            # Otherwise the settings of the session would grow with each piece.
            await self._call(self._conf.unset, name)
            number, pause_s, end_s = number + 1, LOOK_S, loop.time() + SILENT_S
            for connection, nbytes, piece in _frames_in(base64.b64decode(text)):
                writer = self._writers.get(connection)
                if nbytes == _OPEN:
                    await self._connect(connection)
                elif writer is not None and nbytes:
                    writer.write(piece)  # without drain: a stopped agent would stop all others
                elif writer is not None:
                    del self._writers[connection]
                    writer.close()

    async def _beat(self) -> None:
        while True:
            await self._frames.put(_BEAT)
            await asyncio.sleep(_BEAT_S)

    async def _call(self, call: Callable[..., Any], *arguments: str) -> Any:
        # In a thread, because a call of Spark's client blocks.
        return await asyncio.get_running_loop().run_in_executor(None, call, *arguments)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _frames_in(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    at = 0
    while at < len(data):
        connection, nbytes = struct.unpack_from(_HEAD, data, at)
        at += struct.calcsize(_HEAD)
        yield connection, nbytes, data[at : at + max(nbytes, 0)]
        at += max(nbytes, 0)


class Relay:
    """The function of a query's `foreachBatch`, which returns when the relay has ended.

    Args:
        spark: the client's session, which is pickled by its name.
        name: begins the names of the settings.
    """

    def __init__(self, spark: Any, name: str) -> None:
        self.spark = spark
        self.name = name

    def __call__(self, data: Any, batch_id: int) -> None:
        """Relay until the client has ended."""
        asyncio.run(self._run(self.spark.conf))

    async def _run(self, conf: Any) -> None:
        tunnel = Tunnel(conf, f"{self.name}.up", f"{self.name}.down", None)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        sock = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
        server = await asyncio.start_server(tunnel.accept, sock=sock)
        conf.set(f"{self.name}.port", str(sock.getsockname()[1]))
        await tunnel.run()
        server.close()
