"""The part of a feed that one node received: a sequence of segments within a budget.

Runs in: agent
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from sparkdl.core.errors import FeedClosedError
from sparkdl.feed.budget import Budget
from sparkdl.feed.plan import Range, merge_ranges
from sparkdl.feed.segment import StoredSegment, write_segment


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
