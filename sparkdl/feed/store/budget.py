"""How many bytes and segments a node may hold: spooled, in logs, and retained for another child.

Runs in: agent
"""

from __future__ import annotations

import os
import resource
import threading
from collections import Counter
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from sparkdl.core.deadline import Deadline
from sparkdl.feed.store.segment import StoredSegment

_OTHER_DESCRIPTORS = 256
"""Descriptors that the agent, or the child with its framework, needs beside segments."""
_MAX_SEGMENTS = 30_000
"""Half of what a process may map by Linux's default (vm.max_map_count)."""


class Use(Enum):
    """The reason why a segment is held."""

    SPOOL = "spool"
    """A feeder brought it, and the driver has not assigned it yet."""
    LOG = "log"
    """The child has it."""
    RETAINED = "retained"
    """Another child may be given it; the first to go when room is wanted."""


class Room(Enum):
    """Where a segment may go."""

    MEMORY = "memory"
    DISK = "disk"
    FULL = "full"


def _affordable_segments() -> int:
    """Return how many segments this process may hold: one descriptor each, one more on its way."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_SEGMENTS
    return max(1, min(_MAX_SEGMENTS, (limit - _OTHER_DESCRIPTORS) // 2))


class Budget:
    """Bytes that a node's feeds may hold together. A segment that finds no room waits.

    Spools take half of the memory at most, so unassigned rows never lock out assigned ones. A feed
    without a segment in its spool may always spool one, however large it is, and a feed without a
    segment in its log may always have one there: its reader would wait for ever otherwise. Each
    segment has a descriptor, here and in the child, so their number is limited too.

    Args:
        on_pressure: called while a segment waits for room that no spool can give.
        folder: where segments go for which there is no memory.

    Attributes:
        retained: segments not needed now; they are freed first.
        lock: guards the budget and all that a store holds: a thread takes no other lock of the
            store. It is notified when room comes, and when waiting rows may have become unwanted.
    """

    def __init__(
        self,
        limit_nbytes: int,
        on_pressure: Callable[[], None],
        limit_segments: int | None = None,
        disk_nbytes: int = 0,
        folder: Path | None = None,
    ) -> None:
        self.limit_nbytes = limit_nbytes
        self.disk_nbytes = disk_nbytes if folder is not None else 0
        self.folder = folder
        self.limit_segments = limit_segments or _affordable_segments()
        self.used_disk_nbytes = 0
        self.lock = threading.Condition()
        self._nbytes: Counter[Use] = Counter()
        self._segments: Counter[tuple[Use, str]] = Counter()
        self._on_pressure = on_pressure
        self.retained = RetainedSegments(self)

    @property
    def used_nbytes(self) -> int:
        """Bytes in memory, of all feeds."""
        return self._nbytes.total()

    @property
    def num_segments(self) -> int:
        """Segments of all feeds."""
        return self._segments.total()

    def acquire(self, use: Use, feed: str, nbytes: int, may_spill: Callable[[], bool]) -> Room:
        """Reserve room for a segment, if there is some.

        Args:
            may_spill: whether the segment may go to disk rather than wait for memory.
        """
        with self.lock:
            room = self._room(use, feed, nbytes, may_spill)
            if room is not Room.FULL:
                self._add(use, feed, 1, nbytes, room is Room.DISK)
            return room

    def wait(self, nbytes: int, deadline: Deadline) -> None:
        """Wait until something has changed for a segment; the caller holds the lock."""
        if not self._fits(nbytes):
            self._on_pressure()
        self.lock.wait(deadline.wait_s)

    def move(self, segment: StoredSegment, before: Use, use: Use, segments: int = 1) -> None:
        """Hold a segment for another use, without waiting.

        Args:
            segments: 0 for a window, if other rows of its segment stay.
        """
        with self.lock:
            self._add(before, segment.feed, -segments, -segment.nbytes, segment.is_on_disk)
            self._add(use, segment.feed, 1, segment.nbytes, segment.is_on_disk)

    def free(self, use: Use, segment: StoredSegment) -> None:
        """Close a segment's file, and release its room."""
        os.close(segment.fd)
        self.release(use, segment.feed, segment.nbytes, segment.is_on_disk)

    def release(
        self, use: Use, feed: str, nbytes: int, is_on_disk: bool, segments: int = 1
    ) -> None:
        """Release the room of a segment, or, with `segments=0`, of a window of one."""
        with self.lock:
            self._add(use, feed, -segments, -nbytes, is_on_disk)

    def note_full_disk(self, nbytes: int) -> None:
        """Put no more on disk than is there: the file system had no room for `nbytes` more."""
        with self.lock:
            self.disk_nbytes = self.used_disk_nbytes - nbytes

    def wake(self) -> None:
        """Let waiting segments check again whether they are still wanted."""
        with self.lock:
            self.lock.notify_all()

    def _add(self, use: Use, feed: str, segments: int, nbytes: int, is_on_disk: bool) -> None:
        self._segments[use, feed] += segments
        if is_on_disk:
            self.used_disk_nbytes += nbytes
        else:
            self._nbytes[use] += nbytes
        self.lock.notify_all()

    def _room(self, use: Use, feed: str, nbytes: int, may_spill: Callable[[], bool]) -> Room:
        is_first = not self._segments[use, feed]
        may_stay = True
        if use is Use.SPOOL and not is_first:
            spooled = sum(count for (held, _), count in self._segments.items() if held is use)
            if spooled >= self.limit_segments // 2:
                return Room.FULL
            may_stay = self._nbytes[use] + nbytes <= self.limit_nbytes // 2
        # Retained segments are evicted before anything is written to disk.
        while not self._fits(nbytes) and (may_stay or may_spill()) and self.retained.evict():
            pass
        if may_stay and (is_first or self._fits(nbytes)):
            return Room.MEMORY
        # Where a spool alone is full, nodes will be assigned its rows: no need for the disk.
        has_descriptors = self.num_segments < self.limit_segments
        is_full = self.used_nbytes + nbytes > self.limit_nbytes
        if has_descriptors and is_full and may_spill() and self._fits_on_disk(nbytes):
            return Room.DISK
        return Room.FULL

    def _fits(self, nbytes: int) -> bool:
        has_descriptors = self.num_segments < self.limit_segments
        return has_descriptors and self.used_nbytes + nbytes <= self.limit_nbytes

    def _fits_on_disk(self, nbytes: int) -> bool:
        return self.used_disk_nbytes + nbytes <= self.disk_nbytes


class RetainedSegments:
    """Segments retained for a restarted child, evicted oldest first.

    Segments that the child has read, or had not read when it ended, stay while there is room.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._retained: list[tuple[StoredSegment, object]] = []

    def add(self, use: Use, segment: StoredSegment, log: object) -> None:
        """Take a segment, which was held for `use`, with its descriptor; `log` was to have it."""
        with self._budget.lock:
            self._budget.move(segment, use, Use.RETAINED)
            self._retained.append((segment, log))

    def pop(self, is_meant: Callable[[StoredSegment, object], bool]) -> list[StoredSegment]:
        """Remove and return some segments, by themselves and their logs."""
        with self._budget.lock:
            found = [each for each in self._retained if is_meant(*each)]
            self._retained = [each for each in self._retained if not is_meant(*each)]
            return [segment for segment, _ in found]

    def free(self, is_meant: Callable[[StoredSegment, object], bool]) -> None:
        """Free some segments, by themselves and their logs."""
        for segment in self.pop(is_meant):
            self._budget.free(Use.RETAINED, segment)

    def evict(self) -> bool:
        """Free the oldest segment; false if there is none."""
        with self._budget.lock:
            if self._retained:
                self._budget.free(Use.RETAINED, self._retained.pop(0)[0])
                return True
            return False
