"""What a node holds of its feeds, and how much it may: segments within a budget.

A batch becomes a segment in three steps: room in the budget, its file, its entry in a log or a
spool. The lock of the budget guards all of these.
"""

from __future__ import annotations

import os
import resource
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import pyarrow as pa

from sparkdl.control.rows import Digest
from sparkdl.core.row_ranges import Spans
from sparkdl.feed.store.segment import StoredSegment, check_segment, segment_nbytes, write_segment
from sparkdl.feed.store.session import Exchange

_PRESS_AGAIN_S = 1.0
"""How often what waits for room asks for it: a feed that could not release rows may be able to."""
_OTHER_DESCRIPTORS = 256
"""Descriptors that the agent, or the child with its framework, needs beside segments."""
_MAX_SEGMENTS = 30_000
"""Half of what a process may map by Linux's default (vm.max_map_count)."""


class Pool(Enum):
    SPOOL = "spool"
    """A feeder brought it, and the driver has not assigned it yet."""
    LOG = "log"
    """The child has it."""
    RETAINED = "retained"
    """Another child may be given it; the first to go when room is wanted."""


class Room(Enum):
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
        # Its lock is reentrant, so parts of a store may call each other while they hold it.
        self.lock = threading.Condition()
        self._nbytes: Counter[Pool] = Counter()
        self._segments: Counter[tuple[Pool, str]] = Counter()
        self._on_pressure = on_pressure
        self._retained: list[tuple[StoredSegment, object]] = []

    @property
    def used_nbytes(self) -> int:
        return self._nbytes.total()

    @property
    def num_segments(self) -> int:
        return self._segments.total()

    def holds_only(self, pool: Pool, feed: str) -> bool:
        return {key for key, segments in self._segments.items() if segments} <= {(pool, feed)}

    def acquire(
        self, pool: Pool, feed: str, nbytes: int, may_spill: bool, in_order: bool = False
    ) -> Room:
        with self.lock:
            room = self._room(pool, feed, nbytes, may_spill, in_order)
            if room is not Room.FULL:
                self._add(pool, feed, 1, nbytes, room is Room.DISK)
            return room

    def wait(self, nbytes: int) -> None:
        """Wait until something has changed for a segment; the caller holds the lock."""
        # A segment that would fit waits for its spool's half: rows released elsewhere do not help.
        if not self._fits(nbytes):
            self._on_pressure()
        self.lock.wait(_PRESS_AGAIN_S)

    def move(self, segment: StoredSegment, before: Pool, pool: Pool, segments: int = 1) -> None:
        """Move a segment to another pool; `segments=0` for a window, if other rows of it stay."""
        with self.lock:
            self._add(before, segment.feed, -segments, -segment.nbytes, segment.is_on_disk)
            self._add(pool, segment.feed, 1, segment.nbytes, segment.is_on_disk)

    def retain(self, pool: Pool, segment: StoredSegment, log: object) -> None:
        """Hold a segment for a restarted child while there is room; `log` was its destination."""
        with self.lock:
            self.move(segment, pool, Pool.RETAINED)
            self._retained.append((segment, log))

    def pop_retained(
        self, is_meant: Callable[[StoredSegment, object], bool]
    ) -> list[StoredSegment]:
        with self.lock:
            found = [each for each in self._retained if is_meant(*each)]
            self._retained = [each for each in self._retained if not is_meant(*each)]
            return [segment for segment, _ in found]

    def free_retained(self, is_meant: Callable[[StoredSegment, object], bool]) -> None:
        for segment in self.pop_retained(is_meant):
            self.free(Pool.RETAINED, segment)

    def free(self, pool: Pool, segment: StoredSegment) -> None:
        os.close(segment.fd)
        self.release(pool, segment.feed, segment.nbytes, segment.is_on_disk)

    def release(
        self, pool: Pool, feed: str, nbytes: int, is_on_disk: bool, segments: int = 1
    ) -> None:
        """Release the room of a segment, or, with `segments=0`, of a window of one."""
        with self.lock:
            self._add(pool, feed, -segments, -nbytes, is_on_disk)

    def note_full_disk(self, nbytes: int) -> None:
        """Put no more on disk than is there: the file system had no room for `nbytes` more."""
        with self.lock:
            self.disk_nbytes = self.used_disk_nbytes - nbytes

    def wake(self) -> None:
        """Let waiting segments check again whether they are still wanted."""
        with self.lock:
            self.lock.notify_all()

    def _add(self, pool: Pool, feed: str, segments: int, nbytes: int, is_on_disk: bool) -> None:
        self._segments[pool, feed] += segments
        if is_on_disk:
            self.used_disk_nbytes += nbytes
        else:
            self._nbytes[pool] += nbytes
        self.lock.notify_all()

    def _room(self, pool: Pool, feed: str, nbytes: int, may_spill: bool, in_order: bool) -> Room:
        is_first = not self._segments[pool, feed]
        may_stay = True
        # Descriptors are halved as bytes are. Assigned rows need the other half.
        if pool is Pool.SPOOL and not is_first:
            spooled = sum(count for (held, _), count in self._segments.items() if held is pool)
            if spooled >= self.limit_segments // 2:
                return Room.FULL
            may_stay = self._nbytes[pool] + nbytes <= self.limit_nbytes // 2
        # Retained segments are evicted before anything is written to disk.
        while not self._fits(nbytes) and (may_stay or may_spill) and self._retained:
            self.free(Pool.RETAINED, self._retained.pop(0)[0])
        if may_stay and (is_first or self._fits(nbytes)):
            return Room.MEMORY
        # Where a spool alone is full, nodes will be assigned its rows: no need for the disk, unless
        # they are assigned in an order, in which others come first.
        has_descriptors = self.num_segments < self.limit_segments
        is_full = in_order or self.used_nbytes + nbytes > self.limit_nbytes
        fits_on_disk = self.used_disk_nbytes + nbytes <= self.disk_nbytes
        if has_descriptors and is_full and may_spill and fits_on_disk:
            return Room.DISK
        return Room.FULL

    def _fits(self, nbytes: int) -> bool:
        has_descriptors = self.num_segments < self.limit_segments
        return has_descriptors and self.used_nbytes + nbytes <= self.limit_nbytes


@dataclass(frozen=True)
class AppendRequest:
    """Where in its feed a batch belongs.

    Attributes:
        exchange: the inference partition that waits for results, if one does.
        keep: a later epoch reads the rows again: they go to disk rather than wait for memory.
        spans: which rows these are, in their order.
        run: of the job that has brought them, if one has.
        digest: of their partition's rows up to the last of these.
        in_order: they may wait for all others, so they go to disk when the spool is full.
        batch_rows: they may wait for those of a batch of so many: likewise, while it holds fewer.
        start: the first of them in a file that holds others too.
    """

    epoch: int = 0
    exchange: Exchange | None = None
    is_last: bool = False
    keep: bool = False
    spans: Spans = ()
    run: str = ""
    digest: Digest | None = None
    in_order: bool = False
    batch_rows: int = 0
    start: int = 0


class SegmentBuffer(ABC):
    """The segments of one feed and generation in one pool of the budget: a log or a spool.

    Any thread may call it; the lock is the budget's.

    Attributes:
        closed_to: rows of epochs up to this one are refused.
        is_closed: no more rows are taken, ever.
    """

    def __init__(self, feed: str, pool: Pool, budget: Budget) -> None:
        self.feed = feed
        self.closed_to = -1
        self.is_closed = False
        self._pool = pool
        self._budget = budget
        self._next_number = 0

    def takes(self, epoch: int) -> bool:
        return not self.is_closed and epoch > self.closed_to

    def adopt(self, fd: int, rows: int, request: AppendRequest) -> bool:
        """Take a segment of `rows` rows that is in memory, as `append` does; `fd` is closed."""
        try:
            return self.append(check_segment(fd, rows), request, fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    # The lock is held.

    @abstractmethod
    def _enter(self, segment: StoredSegment) -> None:
        """Record a segment, which may raise `OSError` before it has recorded anything."""

    @abstractmethod
    def _may_spill(self, request: AppendRequest) -> tuple[bool, bool]:
        """Whether a batch may go to disk, and does so where the spool alone is full."""

    def _wants(self, request: AppendRequest) -> bool:
        """Whether a batch is wanted; asked again and again while it waits."""
        return self.takes(request.epoch)

    def _note_full(self, request: AppendRequest) -> None:  # noqa: B027 (only a spool reports it)
        """Note that a batch waits for room."""

    def _numbered(self, segment: StoredSegment) -> StoredSegment:
        number, self._next_number = self._next_number, self._next_number + 1
        return replace(segment, number=number)

    # It is not.

    def append(
        self, batch: pa.RecordBatch, request: AppendRequest, shared: int = -1, nbytes: int = 0
    ) -> bool:
        """Write a batch into a file once there is room; false if it is not wanted any more.

        Args:
            shared: the caller's descriptor of a file in memory that has the rows: `nbytes` of it.
        """
        budget, nbytes = self._budget, nbytes or segment_nbytes(batch)
        while (room := self._wait_for_room(nbytes, request)) is not None:
            is_on_disk, is_stored, fd = room is Room.DISK, False, -1
            try:
                # Written without the lock: the rows may be unwanted then.
                if is_on_disk or shared < 0:
                    fd, _ = write_segment(batch, budget.folder if is_on_disk else None)
                else:
                    fd = os.dup(shared)
                with budget.lock:
                    if self._wants(request):
                        segment = StoredSegment(
                            *(self.feed, -1, request.epoch, batch.num_rows, nbytes, fd),
                            exchange=request.exchange.name if request.exchange else "",
                            is_last=request.is_last,
                            is_on_disk=is_on_disk,
                            start=0 if is_on_disk else request.start,
                            spans=request.spans,
                            run=request.run,
                            digest=request.digest,
                        )
                        self._enter(segment)
                        is_stored = True
                return is_stored
            except OSError:
                if not is_on_disk or fd >= 0:
                    raise
                budget.note_full_disk(nbytes)  # the rows wait for memory now
            finally:
                if not is_stored:
                    if fd >= 0:
                        os.close(fd)
                    budget.release(self._pool, self.feed, nbytes, is_on_disk)
        return False

    def _wait_for_room(self, nbytes: int, request: AppendRequest) -> Room | None:
        """Reserve room for a segment once there is some; `None` if it is not wanted."""
        budget = self._budget
        with budget.lock:
            while self._wants(request):
                room = budget.acquire(self._pool, self.feed, nbytes, *self._may_spill(request))
                if room is not Room.FULL:
                    return room
                # A full spool ends the driver's wait for all rows (`shuffle="global"`).
                self._note_full(request)
                budget.wait(nbytes)
        return None
