"""The part of a feed that one node received: a sequence of Arrow segments within a byte budget.

Runs in: agent

A segment is one record batch as an Arrow IPC stream in an anonymous memory file (memfd_create(2)): it has a descriptor and
no name, so it vanishes with the last process that holds it, however that process ends.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from sparkdl.core.errors import FeedTimeoutError
from sparkdl.feed.plan import merge_ranges


@dataclass(frozen=True)
class StoredSegment:
    """A segment in the log, and what the child needs to know of it."""

    feed: str
    number: int
    epoch: int
    rows: int
    nbytes: int
    fd: int
    exchange: str = ""
    is_last: bool = False


def write_segment(batch: pa.RecordBatch) -> tuple[int, int]:
    """Write `batch` into an anonymous file; return its descriptor and its length in bytes.

    The caller owns the descriptor.
    """
    fd = _anonymous_file()
    try:
        with pa.OSFile(f"/dev/fd/{fd}", "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as out:
            out.write_batch(batch)
        return fd, os.fstat(fd).st_size
    except BaseException:
        os.close(fd)
        raise


def read_segment(fd: int) -> pa.RecordBatch:
    """Map a segment and return its batch without copying; the caller still owns `fd`."""
    with pa.memory_map(f"/dev/fd/{fd}", "r") as source, pa.ipc.open_stream(source) as reader:
        return reader.read_next_batch()


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sparkdl-segment", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="sparkdl-") as file:
        return os.dup(file.fileno())


class Budget:
    """Bytes that a node's logs may hold together. Appending waits while it is spent."""

    def __init__(self, limit_nbytes: int, on_pressure: Callable[[], None]) -> None:
        self.limit_nbytes = limit_nbytes
        self.used_nbytes = 0
        self._on_pressure = on_pressure
        self._changed = threading.Condition()

    def take(self, nbytes: int, timeout_s: float, is_wanted: Callable[[], bool]) -> bool:
        """Wait for room and take it. A single segment larger than the limit fits when it is alone.

        Returns:
            False if `is_wanted` turned false while waiting.

        Raises:
            FeedTimeoutError: if nothing was released for `timeout_s`.
        """
        with self._changed:
            while self.used_nbytes and self.used_nbytes + nbytes > self.limit_nbytes:
                if not is_wanted():
                    return False
                self._on_pressure()
                if not self._changed.wait(timeout_s):
                    raise FeedTimeoutError(
                        f"the node's {self.limit_nbytes} bytes of feed memory stayed full for "
                        f"{timeout_s:g} s: user code reads no rows. Raise feed_timeout if a step "
                        "may take that long"
                    )
            self.used_nbytes += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Return bytes and wake whoever waits for them."""
        with self._changed:
            self.used_nbytes -= nbytes
            self._changed.notify_all()

    def wake(self) -> None:
        """Let waiting appends look again whether they are still wanted."""
        with self._changed:
            self._changed.notify_all()


class Log:
    """One feed at one node. Appended to by Flight threads, released from by the agent's loop."""

    def __init__(
        self, feed: str, budget: Budget, on_segment: Callable[[StoredSegment], None]
    ) -> None:
        self.feed = feed
        self.rows_received = 0
        self._budget = budget
        self._on_segment = on_segment
        self._lock = threading.Lock()
        self._segments: dict[int, StoredSegment] = {}
        self._next_number = 0
        self._covered: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the node wants no more rows."""
        return self._closed

    def append(
        self,
        batch: pa.RecordBatch,
        timeout_s: float,
        *,
        epoch: int = 0,
        source: tuple[str, int] = ("", -1),
        start_row: int = 0,
        exchange: str = "",
        is_last: bool = False,
    ) -> bool:
        """Add a batch, waiting for room; return False if the node wants no more rows.

        Args:
            source: the Spark job and partition that `batch` comes from, its rows being
                `start_row` and following of it: what a second attempt at the partition skips.
            exchange: the inference partition that waits for results, or empty.
        """
        if self._closed:
            return False
        fd, nbytes = write_segment(batch)
        segment: StoredSegment | None = None
        try:
            if not self._budget.take(nbytes, timeout_s, lambda: not self._closed):
                return False
            with self._lock:
                if self._closed:
                    self._budget.give_back(nbytes)
                    return False
                segment = StoredSegment(
                    self.feed,
                    self._next_number,
                    epoch,
                    batch.num_rows,
                    nbytes,
                    fd,
                    exchange,
                    is_last,
                )
                self._next_number += 1
                self._segments[segment.number] = segment
                if not exchange:
                    self.rows_received += batch.num_rows
                    done = self._covered.get(source, [])
                    self._covered[source] = merge_ranges(
                        [*done, (start_row, start_row + batch.num_rows)]
                    )
                self._on_segment(segment)
        finally:
            if segment is None:
                os.close(fd)
        return True

    def covered(self, source: tuple[str, int]) -> list[tuple[int, int]]:
        """Return the rows of a job's partition that are here already, as half-open ranges."""
        with self._lock:
            return list(self._covered.get(source, []))

    def forget_sources(self) -> None:
        """Drop the book-keeping of jobs that are complete."""
        with self._lock:
            self._covered.clear()

    def release(self, number: int) -> None:
        """Free all segments up to and including `number`."""
        with self._lock:
            freed = [self._segments.pop(n) for n in sorted(self._segments) if n <= number]
        self._free(freed)

    def close(self) -> None:
        """Take no more rows, free what is here, and let waiting appends return."""
        with self._lock:
            self._closed = True
            freed = list(self._segments.values())
            self._segments.clear()
        self._free(freed)
        self._budget.wake()

    def _free(self, segments: list[StoredSegment]) -> None:
        for segment in segments:
            os.close(segment.fd)
            self._budget.give_back(segment.nbytes)
