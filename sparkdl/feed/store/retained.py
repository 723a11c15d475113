"""Segments that nobody reads now and that another child may be given again.

Runs in: agent

What the child has read, or had not read when it ended, is kept as long as there is room. It is the
first to go when room is wanted.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import pyarrow as pa

from sparkdl.feed.store.budget import Budget
from sparkdl.feed.store.provenance import Provenance
from sparkdl.feed.store.segment import StoredSegment, read_segment, write_segment
from sparkdl.feed.transfer.append import Span


@dataclass(frozen=True)
class RetainedSegment:
    """A segment, which rows it holds, and what brought them (`Attempt.run`).

    Attributes:
        origins: of the log that it was in.
    """

    segment: StoredSegment
    run: str
    spans: tuple[Span, ...]
    origins: Provenance


class RetainedSegments:
    """The kept segments of all feeds of a node, oldest first. Any thread may call it."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._segments: dict[int, RetainedSegment] = {}
        self._next = self._old = 0

    def add(self, segments: list[RetainedSegment]) -> None:
        """Take segments over, with their descriptors and their part of the budget."""
        with self._lock:
            for segment in segments:
                self._segments[self._next] = segment
                self._next += 1
        self._budget.wake()

    def begin(self) -> None:
        """Another child begins: free what the one before the last has left.

        Other nodes may have been brought those rows since.
        """
        with self._lock:
            old = [self._segments.pop(key) for key in list(self._segments) if key < self._old]
            self._old = self._next
        for kept in old:
            free(kept.segment, self._budget)

    def take(self, feed: str, run: str) -> list[RetainedSegment]:
        """Give up and return the segments of `feed` that a job has brought."""
        with self._lock:
            found = {
                key: kept
                for key, kept in self._segments.items()
                if kept.segment.feed == feed and kept.run == run
            }
            for key in found:
                del self._segments[key]
        return list(found.values())

    def forget(self, origins: Provenance, epoch: int) -> None:
        """Free the segments of a log that only epochs before `epoch` have read."""
        with self._lock:
            found = {
                key: kept.segment
                for key, kept in self._segments.items()
                if kept.origins is origins and origins.last_epoch(kept.segment.epoch) < epoch
            }
            for key in found:
                del self._segments[key]
        for segment in found.values():
            free(segment, self._budget)

    def evict(self) -> bool:
        """Free the oldest segment; false if there is none."""
        with self._lock:
            key = next(iter(self._segments), None)
            oldest = None if key is None else self._segments.pop(key)
        if oldest is not None:
            free(oldest.segment, self._budget)
        return oldest is not None

    def clear(self) -> None:
        """Free all segments."""
        while self.evict():
            pass


def free(segment: StoredSegment, budget: Budget) -> None:
    """Close a segment's file and give its part of the budget back."""
    os.close(segment.fd)
    budget.give_back(segment.feed, segment.nbytes, segment.is_on_disk)


def cut(segment: StoredSegment, rows: list[tuple[int, int]]) -> int:
    """Write these rows of a segment, half-open ranges, into another; return its descriptor.

    Raises:
        OSError: if there is no room.
    """
    batch = read_segment(segment.fd)
    parts = [batch.slice(start, stop - start) for start, stop in rows]
    return write_segment(parts[0] if len(parts) == 1 else pa.concat_batches(parts))[0]
