"""How a batch becomes a segment: room first, then its file, then its entry in a log or a spool.

Runs in: agent
"""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import pyarrow as pa

from sparkdl.control.descriptors import OUT_OF_DESCRIPTORS
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ReadError
from sparkdl.core.row_ranges import Span
from sparkdl.feed.store.budget import Budget, Room, Use
from sparkdl.feed.store.segment import (
    NO_DESCRIPTORS,
    StoredSegment,
    check_segment,
    copy_segment,
    segment_nbytes,
    write_segment,
)

FOR_EVER = sys.maxsize
_DESCRIPTOR_PAUSE_S = 0.1
_FULL_WAIT_S = 1.0
"""How long an append waits for room at once: what waits may have become unwanted."""
_SHORT_WAIT_S = 60.0
"""How long to wait for descriptors, which may never become free."""


class Appended(Enum):
    """The outcome of appending a batch."""

    STORED = "stored"
    FULL = "full"
    """There was no room in time; it may be tried again."""
    SHORT = "short"
    """There was no descriptor for it in time; likewise."""
    CLOSED = "closed"
    """No more rows of this epoch are taken."""


@dataclass(frozen=True)
class AppendRequest:
    """Where in its feed a batch belongs.

    Attributes:
        exchange: the inference partition that waits for results, or empty.
        keep: a later epoch reads the rows again: they go to disk rather than wait for memory.
        spans: which rows these are, in their order.
        run: of the job that has brought them, if one has.
    """

    epoch: int = 0
    exchange: str = ""
    is_last: bool = False
    keep: bool = False
    spans: tuple[Span, ...] = ()
    run: str = ""


class HeldSegments(ABC):
    """The segments of one feed and generation that are held for one use: a log or a spool.

    Any thread may call it; the lock is the budget's.

    Attributes:
        closed_to: rows of epochs up to this one are refused.
    """

    def __init__(self, feed: str, use: Use, budget: Budget) -> None:
        self.feed = feed
        self.closed_to = -1
        self._use = use
        self._budget = budget
        self._next_number = 0

    @property
    def is_closed(self) -> bool:
        """Whether no more rows are taken, ever."""
        return self.closed_to == FOR_EVER

    def takes(self, epoch: int) -> bool:
        """Whether rows of `epoch` are taken."""
        return epoch > self.closed_to

    def append(self, batch: pa.RecordBatch, deadline: Deadline, request: AppendRequest) -> Appended:
        """Write a batch into a file, waiting for room."""

        def write(folder: Path | None) -> int:
            return write_segment(batch, folder)[0]

        nbytes, rows = segment_nbytes(batch), batch.num_rows
        return _patiently(deadline, lambda: self._store(nbytes, rows, deadline, request, write))

    def adopt(self, fd: int, rows: int, deadline: Deadline, request: AppendRequest) -> Appended:
        """Take a segment of `rows` rows that is in memory; `fd` is closed.

        Raises:
            ProtocolError: if it is no segment of so many rows.
        """

        def write(folder: Path | None) -> int:
            check_segment(fd, rows)
            return os.dup(fd) if folder is None else copy_segment(fd, folder)

        try:
            nbytes = os.fstat(fd).st_size
            return _patiently(deadline, lambda: self._store(nbytes, rows, deadline, request, write))
        finally:
            os.close(fd)

    def append_in_time(self, batch: pa.RecordBatch, request: AppendRequest) -> bool:
        """Append rows that can go nowhere else, however long there is no room; return if wanted.

        Raises:
            ReadError: if there have been no descriptors for a minute.
        """
        is_too_long = Deadline.after(_SHORT_WAIT_S)
        while True:
            outcome = self.append(batch, Deadline.after(_FULL_WAIT_S), request)
            if outcome in (Appended.STORED, Appended.CLOSED):
                return outcome is Appended.STORED
            if outcome is Appended.FULL:
                is_too_long = Deadline.after(_SHORT_WAIT_S)
            elif is_too_long.has_passed:
                raise ReadError(f"rows cannot be kept: {OUT_OF_DESCRIPTORS}")

    # The lock is held.

    @abstractmethod
    def _enter(self, segment: StoredSegment) -> None:
        """Record a segment, which may raise `OSError` before it has recorded anything."""

    @abstractmethod
    def _may_spill(self, request: AppendRequest) -> bool:
        """Whether a batch may go to disk."""

    def _wants(self, request: AppendRequest) -> bool:
        """Whether a batch is wanted; asked again and again while it waits."""
        return self.takes(request.epoch)

    def _note_full(self, request: AppendRequest) -> None:  # noqa: B027 (only a spool reports it)
        """Note that a batch waits for room."""

    def _numbered(self, segment: StoredSegment) -> StoredSegment:
        number, self._next_number = self._next_number, self._next_number + 1
        return replace(segment, number=number)

    # It is not.

    def _store(
        self,
        nbytes: int,
        rows: int,
        deadline: Deadline,
        request: AppendRequest,
        write: Callable[[Path | None], int],
    ) -> Appended:
        budget = self._budget
        room = self._wait_for_room(nbytes, deadline, request)
        if room is None or room is Room.FULL:
            return Appended.CLOSED if room is None else Appended.FULL
        is_on_disk, is_stored, fd = room is Room.DISK, False, -1
        try:
            # Written without the lock, which others want meanwhile: the rows may be unwanted then.
            try:
                fd = write(budget.folder if is_on_disk else None)
            except OSError as error:
                if not is_on_disk or error.errno in NO_DESCRIPTORS:
                    raise
                budget.note_full_disk(nbytes)
                return Appended.FULL
            with budget.lock:
                if self._wants(request):
                    segment = StoredSegment(
                        *(self.feed, -1, request.epoch, rows, nbytes, fd),
                        *(request.exchange, request.is_last, is_on_disk),
                        spans=request.spans,
                        run=request.run,
                    )
                    self._enter(segment)
                    is_stored = True
        finally:
            if not is_stored:
                if fd >= 0:
                    os.close(fd)
                budget.release(self._use, self.feed, nbytes, is_on_disk)
        return Appended.STORED if is_stored else Appended.CLOSED

    def _wait_for_room(
        self, nbytes: int, deadline: Deadline, request: AppendRequest
    ) -> Room | None:
        """Reserve room for a segment once there is some; `None` if it is not wanted."""
        budget = self._budget
        with budget.lock:
            while self._wants(request):
                room = budget.acquire(
                    self._use, self.feed, nbytes, lambda: self._may_spill(request)
                )
                if room is not Room.FULL or deadline.has_passed:
                    return room
                self._note_full(request)
                budget.wait(nbytes, deadline)
        return None


def _patiently(deadline: Deadline, store: Callable[[], Appended]) -> Appended:
    """Try again while there is no descriptor."""
    never = threading.Event()
    while True:
        try:
            return store()
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS:
                raise
        if deadline.has_passed:
            return Appended.SHORT
        never.wait(min(_DESCRIPTOR_PAUSE_S, deadline.remaining_s))
