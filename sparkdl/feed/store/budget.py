"""How much a node may hold, and what it keeps for another child while there is room.

Runs in: agent
"""

from __future__ import annotations

import os
import resource
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from sparkdl.core.deadline import Deadline
from sparkdl.core.row_ranges import Span
from sparkdl.feed.store.segment import Provenance, StoredSegment

_OTHER_DESCRIPTORS = 256
"""Descriptors that the agent, or the child with its framework, needs beside segments."""
_MAX_SEGMENTS = 30_000
"""Half of what a process may map by Linux's default (vm.max_map_count)."""


class Room(Enum):
    """Where a segment may go."""

    MEMORY = "memory"
    DISK = "disk"
    FULL = "full"
    """There was none in time."""
    UNWANTED = "unwanted"


def _affordable_segments() -> int:
    """Return how many segments this process may hold: one descriptor each, one more on its way."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_SEGMENTS
    return max(1, min(_MAX_SEGMENTS, (limit - _OTHER_DESCRIPTORS) // 2))


class Budget:
    """Bytes that a node's logs may hold together. Appending waits while it is spent.

    A feed that holds nothing here may always have one segment, however large it is and however much
    other feeds hold: a reader that waits for its rows would wait for ever otherwise. Each segment
    has a descriptor, here and in the child, so their number is limited as well.

    Args:
        evict: frees a segment that is only retained; false if there is none.
    """

    def __init__(
        self,
        limit_nbytes: int,
        on_pressure: Callable[[], None],
        limit_segments: int | None = None,
        disk_nbytes: int = 0,
        evict: Callable[[], bool] = lambda: False,
    ) -> None:
        self.limit_nbytes = limit_nbytes
        self.disk_nbytes = disk_nbytes
        self.limit_segments = limit_segments or _affordable_segments()
        self.used_nbytes = 0
        self.used_disk_nbytes = 0
        self._segments: Counter[str] = Counter()
        self._on_pressure = on_pressure
        self._evict = evict
        self._changed = threading.Condition()

    @property
    def num_segments(self) -> int:
        """Segments of all feeds."""
        return self._segments.total()

    def acquire(
        self,
        feed: str,
        nbytes: int,
        deadline: Deadline,
        may_spill: Callable[[], bool],
        is_wanted: Callable[[], bool],
    ) -> Room:
        """Wait for room for a segment, and reserve it.

        Args:
            may_spill: whether the segment may go to disk rather than wait for memory.
            is_wanted: looked at again and again while waiting.
        """
        with self._changed:
            while True:
                if not is_wanted():
                    return Room.UNWANTED
                # What is only retained goes before anything is written to disk.
                room = self._room(feed, nbytes, lambda: False)
                while room is Room.FULL and self._evict():
                    room = self._room(feed, nbytes, lambda: False)
                if room is Room.FULL:
                    room = self._room(feed, nbytes, may_spill)
                if room is not Room.FULL:
                    self._segments[feed] += 1
                    self._add(nbytes, room is Room.DISK)
                    return room
                if deadline.has_passed:
                    return Room.FULL
                self._on_pressure()
                self._changed.wait(deadline.wait_s)

    def replace(self, segment: StoredSegment, nbytes: int) -> None:
        """Close a segment's file, of which a part takes `nbytes` of memory from now on."""
        os.close(segment.fd)
        with self._changed:
            self._add(-segment.nbytes, segment.is_on_disk)
            self._add(nbytes, is_on_disk=False)

    def free(self, segment: StoredSegment) -> None:
        """Close a segment's file, and release its room."""
        os.close(segment.fd)
        self.release(segment.feed, segment.nbytes, segment.is_on_disk)

    def release(self, feed: str, nbytes: int, is_on_disk: bool = False) -> None:
        """Release a segment's room, and wake appends that wait for it."""
        with self._changed:
            self._segments[feed] -= 1
            self._add(-nbytes, is_on_disk)

    def _add(self, nbytes: int, is_on_disk: bool) -> None:
        if is_on_disk:
            self.used_disk_nbytes += nbytes
        else:
            self.used_nbytes += nbytes
        self._changed.notify_all()

    def note_full_disk(self, nbytes: int) -> None:
        """Put no more on disk than is there: the file system had no room for `nbytes` more."""
        with self._changed:
            self.disk_nbytes = self.used_disk_nbytes - nbytes

    def wake(self) -> None:
        """Let waiting appends check again whether they are still wanted."""
        with self._changed:
            self._changed.notify_all()

    def _room(self, feed: str, nbytes: int, may_spill: Callable[[], bool]) -> Room:
        if not self._segments[feed]:
            return Room.MEMORY
        if self.num_segments >= self.limit_segments:
            return Room.FULL
        if self.used_nbytes + nbytes <= self.limit_nbytes:
            return Room.MEMORY
        if may_spill() and self.used_disk_nbytes + nbytes <= self.disk_nbytes:
            return Room.DISK
        return Room.FULL


@dataclass(frozen=True)
class RetainedSegment:
    """A segment, which rows it holds, and the Spark job that brought them (`Attempt.run`).

    Attributes:
        provenance: of the log that it was in.
    """

    segment: StoredSegment
    run: str
    spans: tuple[Span, ...]
    provenance: Provenance


class RetainedSegments:
    """Segments that nobody reads now and that another child may be given again, oldest first.

    What the child has read, or had not read when it ended, is retained as long as there is room,
    and is the first to go when room is wanted. Any thread may call it.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._segments: dict[int, RetainedSegment] = {}
        self._next = self._old = 0

    def add(self, segments: list[RetainedSegment]) -> None:
        """Take ownership of segments, of their descriptors and their part of the budget."""
        with self._lock:
            for segment in segments:
                self._segments[self._next] = segment
                self._next += 1
        self._budget.wake()

    def begin_child(self) -> None:
        """Another child begins: free what the one before the last has left.

        Other nodes may have been brought those rows since.
        """
        with self._lock:
            old = [self._segments.pop(key) for key in list(self._segments) if key < self._old]
            self._old = self._next
        for retained in old:
            self._budget.free(retained.segment)

    def pop(self, feed: str, run: str) -> list[RetainedSegment]:
        """Remove and return the segments of `feed` that a job has brought."""
        with self._lock:
            found = {
                key: retained
                for key, retained in self._segments.items()
                if retained.segment.feed == feed and retained.run == run
            }
            for key in found:
                del self._segments[key]
        return list(found.values())

    def forget(self, provenance: Provenance, epoch: int) -> None:
        """Free the segments of a log that only epochs before `epoch` have read."""
        with self._lock:
            found = {
                key: retained.segment
                for key, retained in self._segments.items()
                if retained.provenance is provenance
                and provenance.last_epoch(retained.segment.epoch) < epoch
            }
            for key in found:
                del self._segments[key]
        for segment in found.values():
            self._budget.free(segment)

    def evict(self) -> bool:
        """Free the oldest segment; false if there is none."""
        with self._lock:
            key = next(iter(self._segments), None)
            oldest = None if key is None else self._segments.pop(key)
        if oldest is not None:
            self._budget.free(oldest.segment)
        return oldest is not None

    def clear(self) -> None:
        """Free all segments."""
        while self.evict():
            pass
