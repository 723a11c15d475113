"""A server of batches for a DataLoader's worker processes: each batch goes to one worker.

Runs in: child

    node's process                               worker processes (fork, forkserver or spawn)
      │◀─ Hello + socket ── an inherited socket ───── │  one iteration of one worker
      │◀──────────── "next" ────────────────────────  │
      │── batch: where its description starts + fd ─▶ │  an anonymous memory file, mapped there
      │── failed: the same, for the error's text ───▶ │
      │── end of the epoch ─────────────────────────▶ │

Workers inherit one end of a socket pair, so that no other process can connect and nothing has a
name. A worker sends a socket of its own through it for each of its iterations; when either process
ends, the other sees the end of that socket.

A batch lies in its file as

    column  (gap)  column  (gap)  …  what lies where, as MessagePack
                                     ▲ at

Arrays lie as they are in memory; lists, of strings for example, as MessagePack.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import socket
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import parent_process
from typing import Any

import msgspec
import numpy as np

from sparkdl.control.descriptors import nameless_file, receive_with_fds
from sparkdl.core import errors
from sparkdl.core.errors import FeedClosedError, SparkdlError
from sparkdl.feed.reader.batches import EpochBatches

_BATCH, _FAILED, _END = b"b", b"f", b"e"
_REPLY = struct.Struct("!cQ")
_LOOK_S = 5.0
"""How often a waiting worker checks that the node's process is still alive."""

_log = logging.getLogger(__name__)
Columns = dict[str, np.ndarray]
"""Arrays by column name, `[rows, …]`, of any type."""
Plain = dict[str, np.ndarray | list[Any]]
"""Columns by name: arrays of numbers `[rows, …]`, or lists of other values."""
# A cache line: arrays of any dtype are aligned in it.
_ALIGNED_NBYTES = 64
_ERRORS = {
    kind.__name__: kind
    for kind in (
        *(errors.ConfigError, errors.FeedClosedError, errors.EndOfFeedError),
        *(errors.FeedTimeoutError, errors.UnfedError, errors.FeedTypeError),
    )
}


class Hello(msgspec.Struct, frozen=True):
    """A worker begins an iteration.

    Attributes:
        loader: which loader; all its workers say the same.
        workers: how many it has.
        worker: which of them this is, from 0.
        number: how many iterations it began before; all workers of a loader begin equally many.
    """

    loader: int
    workers: int
    worker: int
    number: int


_hellos = msgspec.json.Decoder(Hello)


class BatchServer:
    """The node's end: sends the batches of each epoch to the workers that ask.

    Args:
        prepare: makes columns plain, or raises; runs in the node's process.

    Attributes:
        inherited: the socket that workers inherit. It can be pickled only while a process is
            spawned.
    """

    def __init__(self, batches: EpochBatches, prepare: Callable[[Columns], Plain]) -> None:
        # Datagrams keep the messages of several workers apart in one inherited socket.
        own, self.inherited = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        serving = _Serving(own, batches, prepare)
        threading.Thread(target=serving.accept, name="sparkdl-batches", daemon=True).start()
        weakref.finalize(self, serving.close, self.inherited).atexit = False


class _Epoch:
    """One iteration of one loader: its workers, and the batches that they share."""

    def __init__(self, hello: Hello, batches: EpochBatches, number: int) -> None:
        self.hello = hello
        self.joined = {hello.worker}
        self.is_broken = False
        self._reader, self._batches = batches.reader, iter(batches)
        self._number = number
        self._rounds: Counter[int] = Counter()
        # An iterator of Python fails if two threads ask at once, and a turn belongs to its batch.
        self._lock = threading.Lock()

    def takes(self, hello: Hello) -> bool:
        """Whether `hello` belongs to this iteration, whose workers do not all come at once."""
        is_same = msgspec.structs.replace(hello, worker=self.hello.worker) == self.hello
        return is_same and hello.worker not in self.joined and not self.is_broken

    def is_after(self, hello: Hello) -> bool:
        """Whether this is a later iteration of the same loader."""
        ours, theirs = self.hello, hello
        is_same = (ours.loader, ours.workers) == (theirs.loader, theirs.workers)
        return is_same and ours.number > theirs.number

    def take(self, worker: int) -> Columns | None:
        """Return the next batch. A loader puts out one of each worker in turn, in their order."""
        with self._lock:
            self._reader.read_ahead(None, (self._number, self._rounds[worker], worker))
            self._rounds[worker] += 1
            return next(self._batches, None)


class _Serving:
    """Owns threads and sockets, not the `BatchServer`, which can therefore be garbage-collected."""

    def __init__(
        self, own: socket.socket, batches: EpochBatches, prepare: Callable[[Columns], Plain]
    ) -> None:
        self._own, self._batches, self._prepare = own, batches, prepare
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._epoch: _Epoch | None = None
        self._epochs = itertools.count()
        self._workers: set[socket.socket] = set()
        self._is_closed = False

    def accept(self) -> None:
        """Serve workers until `close`."""
        with self._own:
            while True:
                data, fds = receive_with_fds(self._own, 4096, 1)
                if not data:
                    return
                worker = socket.socket(fileno=fds[0])
                with self._lock:
                    # A worker that connects while the dataset is closed would wait for ever.
                    if self._is_closed:
                        worker.close()
                        continue
                    self._workers.add(worker)
                serve = threading.Thread(
                    target=self._serve,
                    args=(worker, _hellos.decode(data)),
                    name="sparkdl-batches-worker",
                    daemon=True,
                )
                serve.start()

    def close(self, inherited: socket.socket) -> None:
        """End the threads, without waiting for them: garbage collection calls this anywhere."""
        if os.getpid() != self._pid:
            return  # a forked copy
        with self._lock:
            self._is_closed = True
            for sock in (self._own, *self._workers):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            if self._workers:
                self._batches.reader.claim()  # ends waits for rows
        inherited.close()

    def _serve(self, worker: socket.socket, hello: Hello) -> None:
        epoch = self._join(hello)
        has_ended = epoch is None
        try:
            while worker.recv(1):
                kind = _END if epoch is None else self._answer(worker, hello.worker, epoch)
                if kind == _END:
                    worker.sendall(_REPLY.pack(_END, 0))
                has_ended |= kind != _BATCH
        except OSError as error:
            _log.debug("Worker %d went away: %s", hello.worker, error)
        finally:
            if epoch is not None and not has_ended:
                epoch.is_broken = True
            with self._lock:
                self._workers.discard(worker)
            worker.close()

    def _join(self, hello: Hello) -> _Epoch | None:
        """Return the epoch of `hello`, or `None` if it has been abandoned."""
        with self._lock:
            epoch = self._epoch
            if epoch is not None and epoch.is_after(hello):
                return None
            if epoch is not None and epoch.takes(hello):
                epoch.joined.add(hello.worker)
                return epoch
            # The new iteration claims the feed, and so ends the epoch of the workers before it.
            self._epoch = _Epoch(hello, self._batches, next(self._epochs))
            return self._epoch

    def _answer(self, worker: socket.socket, number: int, epoch: _Epoch) -> bytes:
        """Send the next batch, or the reason why there is none; return the kind of answer."""
        try:
            columns = epoch.take(number) if epoch is self._epoch else None
            if columns is None:
                return _END
            kind, (fd, at) = _BATCH, pack(self._prepare(columns))
        except Exception as error:  # noqa: BLE001 (raised again in the worker)
            kind, (fd, at) = _FAILED, pack_failure(error)
        try:
            socket.send_fds(worker, [_REPLY.pack(kind, at)], [fd])
        finally:
            os.close(fd)
        return kind


def batches_from(inherited: socket.socket, hello: Hello) -> Iterator[Plain]:
    """Take batches in a worker until the epoch ends; arrays are its own, and writable.

    Raises:
        FeedClosedError: if the node's process is gone, or has closed the feed.
        SparkdlError: what reading the feed raises.
    """
    own, theirs = socket.socketpair()
    with own:
        # A process forked from the node's may hold a copy of the other end, so the end of this
        # socket does not show that the node's process is dead.
        own.settimeout(_LOOK_S)
        with theirs:
            _ask(
                lambda: socket.send_fds(inherited, [msgspec.json.encode(hello)], [theirs.fileno()])
            )
        while (columns := _next(own)) is not None:
            yield columns
            del columns


def _next(own: socket.socket) -> Plain | None:
    _ask(lambda: own.sendall(b"n"))
    kind, at, fd = _reply(own)
    if kind == _END:
        return None
    try:
        if kind == _FAILED:
            raise unpack_failure(fd, at)
        return unpack(fd, at)
    finally:
        os.close(fd)


def _ask(send: Callable[[], object]) -> None:
    try:
        send()
    except OSError as error:
        raise FeedClosedError(
            f"the node's process is gone, or has closed this feed: {error}"
        ) from None


def _reply(own: socket.socket) -> tuple[bytes, int, int]:
    parent = parent_process()
    while True:
        try:
            data, fds = receive_with_fds(own, _REPLY.size, 1)
        except ConnectionError:
            data, fds = b"", []
        except TimeoutError:
            if parent is not None and not parent.is_alive():
                raise FeedClosedError("the node's process is gone") from None
            continue
        if not data:
            raise FeedClosedError("the node's process is gone, or has closed this feed")
        return (*_REPLY.unpack(data), fds[0] if fds else -1)


class _Described(msgspec.Struct, frozen=True, array_like=True):
    """Where a column lies; without a dtype it is a list, of `shape` bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int


_descriptions = msgspec.msgpack.Decoder(list[_Described])


def pack(columns: Plain) -> tuple[int, int]:
    """Write columns into a file; return its descriptor and where in it they are described."""
    fd = nameless_file("sparkdl-batch")
    try:
        with open(fd, "wb", closefd=False) as file:
            described = []
            for name, column in columns.items():
                at = file.seek(-(-file.tell() // _ALIGNED_NBYTES) * _ALIGNED_NBYTES)
                if isinstance(column, list):
                    dtype, shape = "", (file.write(msgspec.msgpack.encode(column)),)
                else:
                    dtype, shape = column.dtype.str, column.shape
                    file.write(np.ascontiguousarray(column).data)
                described.append(_Described(name, dtype, shape, at))
            at = file.tell()
            file.write(msgspec.msgpack.encode(described))
        return fd, at
    except BaseException:
        os.close(fd)
        raise


def unpack(fd: int, at: int) -> Plain:
    """Map the columns of `pack`; writes to them stay in this process.

    The caller still owns `fd`.
    """
    mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    columns: Plain = {}
    for column in _descriptions.decode(memoryview(mapped)[at:]):
        if column.dtype:
            columns[column.name] = np.ndarray(column.shape, column.dtype, mapped, column.at)
        else:
            raw = memoryview(mapped)[column.at : column.at + column.shape[0]]
            columns[column.name] = msgspec.msgpack.decode(raw, type=list[Any])
    return columns


def pack_failure(error: Exception) -> tuple[int, int]:
    """Write an error into a file, as `pack` does columns."""
    return pack({"error": [type(error).__name__, str(error)]})


def unpack_failure(fd: int, at: int) -> SparkdlError:
    """Return the error of `pack_failure`, of the same type where that is one of a feed's."""
    name, text = unpack(fd, at)["error"]
    return _ERRORS[name](text) if name in _ERRORS else SparkdlError(f"{name}: {text}")
