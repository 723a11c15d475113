"""The rows of a partition: where they are from, put into chunks, and made ahead by a thread."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import pyarrow as pa

from sparkdl.values.ndarrays import Array

_AHEAD = 2
"""Chunks that are made while the model has one."""
_END_S = 5.0
_MAX_ORIGINS = 3
T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """Some rows, and where they are from.

    Attributes:
        columns: one array for each input, further ones as they are wanted.
        origins: for errors: file, and int64 [rows] the numbers in it; without files, those in the
            partition.
    """

    columns: tuple[pa.Array, ...]
    origins: tuple[tuple[str, Array], ...]

    def __len__(self) -> int:
        return len(self.columns[0])

    def __str__(self) -> str:
        from pyspark import TaskContext

        context = TaskContext.get()
        parts = [
            f"rows {numbers[0]} to {numbers[-1]}" + (f" of {file}" if file else "")
            for file, numbers in self.origins
        ]
        parts[_MAX_ORIGINS:] = ["…"] if len(parts) > _MAX_ORIGINS else []
        return ", ".join([*parts, *([f"partition {context.partitionId()}"] if context else [])])

    def cut(self, start: int, stop: int) -> Rows:
        """Return the rows from `start` to before `stop`."""
        origins = []
        first = 0
        for file, numbers in self.origins:
            part = numbers[max(start - first, 0) : max(stop - first, 0)]
            origins += [(file, part)] if len(part) else []
            first += len(numbers)
        columns = tuple(column.slice(start, stop - start) for column in self.columns)
        return Rows(columns, tuple(origins))


def chunks(pieces: Iterable[Rows], size: int) -> Iterator[Rows]:
    """Cut and join rows into chunks of `size` rows; the last one may have fewer."""
    held: list[Rows] = []
    count = 0
    for piece in pieces:
        start = 0
        while start < len(piece):
            stop = min(len(piece), start + size - count)
            held.append(piece.cut(start, stop))
            count += stop - start
            start = stop
            if count == size:
                yield _joined(held)
                held, count = [], 0
    if held:
        yield _joined(held)


def _joined(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(part.columns for part in parts), strict=True)
    found: list[tuple[str, Array]] = []
    for file, numbers in (origin for part in parts for origin in part.origins):
        if found and found[-1][0] == file:
            numbers = np.concatenate([found.pop()[1], numbers])
        found.append((file, numbers))
    return Rows(tuple(map(pa.concat_arrays, columns)), tuple(found))


def ahead(source: Generator[T, None, None]) -> Generator[T, None, None]:
    """Yield what `source` gives; a thread gets the next ones while the caller has the last.

    Files are read and decoded while the model computes. The thread is at most `_AHEAD` ahead, and
    ends with this iterator.
    """
    found: SimpleQueue[tuple[list[T], BaseException | None]] = SimpleQueue()
    room = threading.Semaphore(_AHEAD - 1)
    is_over = threading.Event()

    def work() -> None:
        try:
            for each in source:
                found.put(([each], None))
                room.acquire()  # released by each `get`, and by the end
                if is_over.is_set():
                    return
            found.put(([], None))
        except BaseException as error:  # noqa: BLE001 (raised by the caller's thread)
            found.put(([], error))
        finally:
            source.close()

    thread = threading.Thread(target=work, name="sparkdl-ahead", daemon=True)
    thread.start()
    try:
        while True:
            values, error = found.get()
            if error is not None:
                raise error
            if not values:
                return
            room.release()
            yield values[0]
    finally:
        is_over.set()
        room.release()
        # Within limits: the source may stand in a read that no one can interrupt.
        thread.join(_END_S)
