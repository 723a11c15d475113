"""How much a node may hold: bytes in memory, bytes on disk, and descriptors.

Runs in: agent
"""

from __future__ import annotations

import resource
import threading
from collections import Counter
from collections.abc import Callable
from enum import Enum

from sparkdl.core.deadline import Deadline

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

    A feed of which nothing is here may always have one segment, however large and however full the
    others keep the budget: whoever waits for its rows would wait for ever otherwise. Each segment
    has a descriptor, here and in the child, so that their number is limited as well.

    Args:
        evict: frees something that need not be here, and gives it back; false if there is nothing.
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

    def take(
        self,
        feed: str,
        nbytes: int,
        deadline: Deadline,
        may_spill: Callable[[], bool],
        is_wanted: Callable[[], bool],
    ) -> Room:
        """Wait for room and take it.

        Args:
            may_spill: whether the segment may go to disk rather than wait for memory.
            is_wanted: looked at again and again while waiting.
        """
        with self._changed:
            while True:
                if not is_wanted():
                    return Room.UNWANTED
                room = self._room(feed, nbytes, lambda: False)
                while room is Room.FULL and self._evict():
                    room = self._room(feed, nbytes, lambda: False)
                if room is Room.FULL:
                    room = self._room(feed, nbytes, may_spill)
                if room is not Room.FULL:
                    self._segments[feed] += 1
                    if room is Room.DISK:
                        self.used_disk_nbytes += nbytes
                    else:
                        self.used_nbytes += nbytes
                    return room
                if deadline.has_passed:
                    return Room.FULL
                self._on_pressure()
                self._changed.wait(deadline.wait_s)

    def resize(self, nbytes: int, to_nbytes: int, was_on_disk: bool) -> None:
        """What took `nbytes` takes `to_nbytes` of memory instead."""
        with self._changed:
            if was_on_disk:
                self.used_disk_nbytes -= nbytes
            else:
                self.used_nbytes -= nbytes
            self.used_nbytes += to_nbytes
            self._changed.notify_all()

    def give_back(self, feed: str, nbytes: int, is_on_disk: bool = False) -> None:
        """Return a segment's bytes and wake whoever waits for them."""
        with self._changed:
            if is_on_disk:
                self.used_disk_nbytes -= nbytes
            else:
                self.used_nbytes -= nbytes
            self._segments[feed] -= 1
            self._changed.notify_all()

    def disk_is_full(self, nbytes: int) -> None:
        """Put no more on disk than is there: the file system had no room for `nbytes` more."""
        with self._changed:
            self.disk_nbytes = self.used_disk_nbytes - nbytes

    def wake(self) -> None:
        """Let waiting appends look again whether they are still wanted."""
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
