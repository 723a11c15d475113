"""The part of a feed that one node received: a sequence of Arrow segments within a byte budget.

Runs in: agent

A segment is one record batch as an Arrow IPC stream in an anonymous memory file (memfd_create(2)):
it has a descriptor and no name, so it vanishes with the last process that holds it, however that
process ends.
"""

from __future__ import annotations

import os
import resource
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from sparkdl.core.errors import FeedClosedError, FeedTimeoutError
from sparkdl.feed.plan import Range, merge_ranges

_OTHER_DESCRIPTORS = 256
"""Descriptors that the agent, or the child with its framework, needs beside segments."""
_MAX_SEGMENTS = 30_000
"""Half of what a process may map by Linux's default (vm.max_map_count)."""


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


@dataclass(frozen=True)
class Attempt:
    """One of Spark's attempts at a partition of a feeding job. Later ones have higher numbers."""

    run: str
    partition: int
    number: int = 0


@dataclass
class _Source:
    """What is known of a partition: its latest attempt, and its rows that are here."""

    epoch: int
    attempt: int
    covered: list[Range] = field(default_factory=list)


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


def _affordable_segments() -> int:
    """Return how many segments this process may hold: one descriptor each, one more on its way."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_SEGMENTS
    return max(1, min(_MAX_SEGMENTS, (limit - _OTHER_DESCRIPTORS) // 2))


class Budget:
    """Bytes that a node's logs may hold together. Appending waits while it is spent.

    Each segment has a descriptor, here and in the child, so that their number is limited as well.
    """

    def __init__(
        self,
        limit_nbytes: int,
        on_pressure: Callable[[], None],
        limit_segments: int | None = None,
    ) -> None:
        self.limit_nbytes = limit_nbytes
        self.limit_segments = limit_segments or _affordable_segments()
        self.used_nbytes = 0
        self.num_segments = 0
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
            while self._is_full(nbytes):
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
            self.num_segments += 1
            return True

    def give_back(self, nbytes: int) -> None:
        """Return a segment's bytes and wake whoever waits for them."""
        with self._changed:
            self.used_nbytes -= nbytes
            self.num_segments -= 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Let waiting appends look again whether they are still wanted."""
        with self._changed:
            self._changed.notify_all()

    def _is_full(self, nbytes: int) -> bool:
        if not self.num_segments:
            return False
        is_over = self.used_nbytes + nbytes > self.limit_nbytes
        return is_over or self.num_segments >= self.limit_segments


class Log:
    """One feed at one node. Appended to by Flight threads, released from by the agent's loop."""

    def __init__(
        self,
        feed: str,
        budget: Budget,
        on_segment: Callable[[StoredSegment], None],
        is_closed: bool = False,
    ) -> None:
        self.feed = feed
        self.rows_received = 0
        self._budget = budget
        self._on_segment = on_segment
        self._lock = threading.Lock()
        self._segments: dict[int, StoredSegment] = {}
        self._next_number = 0
        self._sources: dict[tuple[str, int], _Source] = {}
        self._closed = is_closed

    @property
    def is_closed(self) -> bool:
        """Whether the node wants no more rows."""
        return self._closed

    def begin(self, attempt: Attempt, epoch: int) -> list[Range]:
        """Begin an attempt at a partition; return its rows that are here, as half-open ranges.

        What earlier attempts have on their way will not be appended any more.

        Raises:
            FeedClosedError: if a later attempt has begun.
        """
        with self._lock:
            source = self._sources.setdefault(
                (attempt.run, attempt.partition), _Source(epoch, attempt.number)
            )
            source.attempt = max(source.attempt, attempt.number)
            self._raise_if_superseded(attempt)
            covered = list(source.covered)
        self._budget.wake()
        return covered

    def append(
        self,
        batch: pa.RecordBatch,
        timeout_s: float,
        *,
        epoch: int = 0,
        attempt: Attempt | None = None,
        start_row: int = 0,
        exchange: str = "",
        is_last: bool = False,
    ) -> bool:
        """Add a batch, waiting for room; return False if the node wants no more rows.

        Args:
            attempt: what brings `batch`, whose rows are the partition's from `start_row` on; it
                has begun. A later attempt skips them.
            exchange: the inference partition that waits for results, or empty.

        Raises:
            FeedClosedError: if a later attempt at the partition has begun.
            FeedTimeoutError: if nothing was released for `timeout_s`.
        """
        if self._closed:
            return False
        fd, nbytes = write_segment(batch)
        segment: StoredSegment | None = None
        try:
            if not self._budget.take(nbytes, timeout_s, lambda: self._wants(attempt)):
                self._raise_if_superseded(attempt)
                return False
            with self._lock:
                if not self._wants(attempt):
                    self._budget.give_back(nbytes)
                    self._raise_if_superseded(attempt)
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
                if attempt:
                    source = self._sources[attempt.run, attempt.partition]
                    rows = (start_row, start_row + batch.num_rows)
                    source.covered = merge_ranges([*source.covered, rows])
                self._on_segment(segment)
        finally:
            if segment is None:
                os.close(fd)
        return True

    def forget_sources(self, epoch: int) -> None:
        """Drop the book-keeping of `epoch` and those before: their jobs are complete."""
        with self._lock:
            self._sources = {
                key: source for key, source in self._sources.items() if source.epoch > epoch
            }

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

    def _wants(self, attempt: Attempt | None) -> bool:
        return not (self._closed or self._is_superseded(attempt))

    def _is_superseded(self, attempt: Attempt | None) -> bool:
        if attempt is None:
            return False
        source = self._sources.get((attempt.run, attempt.partition))
        return source is None or source.attempt != attempt.number

    def _raise_if_superseded(self, attempt: Attempt | None) -> None:
        if attempt and self._is_superseded(attempt):
            raise FeedClosedError(
                f"attempt {attempt.number} at partition {attempt.partition} of feed {self.feed!r} "
                "is out of date: a later one has begun, or its job is over"
            )

    def _free(self, segments: list[StoredSegment]) -> None:
        for segment in segments:
            os.close(segment.fd)
            self._budget.give_back(segment.nbytes)
