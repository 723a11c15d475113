"""A server of batches for a DataLoader's worker processes: each batch goes to one worker.

    node's process                               worker processes (fork, forkserver or spawn)
      │◀─ Hello + connection ─ an inherited socket ─ │  one iteration of one worker
      │◀──────────── next ──────────────────────────  │
      │── tensors by column, an error, or None ─────▶ │  None: the end of the epoch

Tensors move through shared memory, as they do from workers to their loader: PyTorch tells
multiprocessing how (`torch.multiprocessing`). A queue would need to know the workers, and whoever
makes the dataset does not, so each iteration of a worker brings a connection of its own, through a
socket that its process inherits. When either process ends, the other sees the connection's end.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, parent_process
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from sparkdl.control.descriptors import receive_with_fds
from sparkdl.core.errors import FeedClosedError, SparkdlError
from sparkdl.feed.reader.batches import EpochBatches

_LOOK_S = 5.0
"""How often a waiting worker checks that the node's process is still alive."""

_log = logging.getLogger(__name__)
Columns = dict[str, np.ndarray]
"""Arrays by column name, `[rows, …]`, of any type."""
Tensors = dict[str, Any]
"""Columns by name: tensors `[rows, …]`, or lists of other values."""


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
        prepare: makes tensors of columns, or raises; runs in the node's process.

    Attributes:
        inherited: the socket that workers inherit. It can be pickled only while a process is
            spawned.
    """

    def __init__(self, batches: EpochBatches, prepare: Callable[[Columns], Tensors]) -> None:
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
        self, own: socket.socket, batches: EpochBatches, prepare: Callable[[Columns], Tensors]
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
            with Connection(os.dup(worker.fileno())) as asking:
                while asking.recv_bytes():
                    answer = self._answer(hello.worker, epoch) if epoch else None
                    has_ended |= not isinstance(answer, dict)
                    asking.send(answer)
        except (OSError, EOFError) as error:
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

    def _answer(self, number: int, epoch: _Epoch) -> Tensors | SparkdlError | None:
        """Return the next batch, or the reason why there is none."""
        try:
            columns = epoch.take(number) if epoch is self._epoch else None
            return None if columns is None else self._prepare(columns)
        except SparkdlError as error:
            return error
        except Exception as error:  # noqa: BLE001 (raised again in the worker)
            return SparkdlError(f"{type(error).__name__}: {error}")


def batches_from(inherited: socket.socket, hello: Hello) -> Iterator[Tensors]:
    """Take batches in a worker until the epoch ends; tensors are its own.

    Raises:
        FeedClosedError: if the node's process is gone, or has closed the feed.
        SparkdlError: what reading the feed raises.
    """
    own, theirs = Pipe()
    with own:
        with _open_feed(), theirs:
            socket.send_fds(inherited, [msgspec.json.encode(hello)], [theirs.fileno()])
        while (answer := _next(own)) is not None:
            if isinstance(answer, SparkdlError):
                raise answer
            yield answer
            del answer


@contextmanager
def _open_feed() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        raise FeedClosedError(
            f"the node's process is gone, or has closed this feed: {error}"
        ) from None


@_open_feed()
def _next(own: Connection) -> Tensors | SparkdlError | None:
    own.send_bytes(b"next")
    parent = parent_process()
    # A process forked from the node's may hold a copy of the other end, so the end of this
    # connection does not show that the node's process is dead.
    while not own.poll(_LOOK_S):
        if parent is not None and not parent.is_alive():
            raise EOFError
    answer: Tensors | SparkdlError | None = own.recv()
    return answer
