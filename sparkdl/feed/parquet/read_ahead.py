"""Pieces of work are done ahead of time on threads, their batches delivered in order.

Runs in: agent
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Protocol, TypeVar

import pyarrow as pa

_MAX_READERS = 8
_CLOSE_S = 30.0

Batches = Generator[pa.RecordBatch, None, None]


class Piece(Protocol):
    """What a thread does in one go."""

    @property
    def nbytes(self) -> int:
        """About how many bytes its batches have together."""


P = TypeVar("P", bound=Piece)


def in_order(pieces: Iterable[P], read: Callable[[P], Batches], prefetch_nbytes: int) -> Batches:
    """Yield the batches of all pieces in order; read two at once, and more that are small.

    Closing the generator waits for its threads, and these for the batch that they make.

    Args:
        read: yields the batches of a piece; called on several threads.
        prefetch_nbytes: the most that is held ahead, give or take a batch for each piece.

    Raises:
        Exception: what `read` raises, after the batches before it.
    """
    waiting, started = deque(pieces), deque[_Ahead]()
    try:
        while waiting or started:
            while waiting and _may_start(started, waiting[0], prefetch_nbytes):
                started.append(_Ahead(waiting.popleft(), read, prefetch_nbytes // 2))
            yield from started[0]
            started.popleft().join()
    finally:
        for ahead in started:
            ahead.stop()
        for ahead in started:
            ahead.join()


def _may_start(started: Iterable[_Ahead], piece: Piece, prefetch_nbytes: int) -> bool:
    sizes = [ahead.nbytes for ahead in started]
    is_small = len(sizes) < _MAX_READERS and sum(sizes) + piece.nbytes <= prefetch_nbytes
    return len(sizes) < 2 or is_small


class _Ahead:
    """One piece being decoded on a thread, into a queue bounded by bytes."""

    def __init__(self, piece: P, read: Callable[[P], Batches], limit_nbytes: int) -> None:
        self.nbytes = piece.nbytes
        self._limit_nbytes = limit_nbytes
        self._changed = threading.Condition()
        self._batches: deque[pa.RecordBatch] = deque()
        self._held_nbytes = 0
        self._is_done = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(piece, read), name="sparkdl-parquet", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._batches or self._is_done)
                if not self._batches:
                    break
                batch = self._batches.popleft()
                self._held_nbytes -= batch.nbytes
                self._changed.notify_all()
            yield batch
        if self._error:
            raise self._error

    def stop(self) -> None:
        """Decode no more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until the thread has ended, which it does once it is stopped or done."""
        self._thread.join(_CLOSE_S)

    def _run(self, piece: P, read: Callable[[P], Batches]) -> None:
        try:
            with closing(read(piece)) as batches:
                for batch in batches:
                    if not self._put(batch):
                        break
        except BaseException as error:  # noqa: BLE001 - raised where the batches are taken
            self._error = error
        with self._changed:
            self._is_done = True
            self._changed.notify_all()

    def _put(self, batch: pa.RecordBatch) -> bool:
        nbytes = batch.nbytes
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_closed
                    or not self._batches
                    or self._held_nbytes + nbytes <= self._limit_nbytes
                )
            )
            self._batches.append(batch)
            self._held_nbytes += nbytes
            self._changed.notify_all()
            return not self._is_closed
