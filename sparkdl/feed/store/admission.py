"""How a batch becomes a segment: room first, then its file, then its entry in a log or a spool.

Runs in: agent
"""

from __future__ import annotations

import os
import threading
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

_DESCRIPTOR_PAUSE_S = 0.1
_FULL_WAIT_S = 1.0
"""How long an append waits for room at once: what waits may have become unwanted."""
_SHORT_WAIT_S = 60.0
"""How long to wait for descriptors, of which nobody knows whether there will be any."""


class Appended(Enum):
    """What became of a batch that was to be appended."""

    STORED = "stored"
    FULL = "full"
    """There was no room in time; it may be tried again."""
    SHORT = "short"
    """There was no descriptor for it in time; likewise."""
    CLOSED = "closed"
    """No more rows of this epoch are taken."""


@dataclass(frozen=True)
class File:
    """A file that has been written, and the room that it takes."""

    fd: int
    rows: int
    nbytes: int
    is_on_disk: bool

    def segment(
        self, feed: str, epoch: int, spans: tuple[Span, ...], run: str, exchange: str = ""
    ) -> StoredSegment:
        """Return the segment of this file, which has no number yet."""
        segment = StoredSegment(feed, -1, epoch, self.rows, self.nbytes, self.fd, exchange)
        return replace(segment, is_on_disk=self.is_on_disk, spans=spans, run=run)


@dataclass(frozen=True)
class Terms:
    """On which terms a batch is taken.

    Attributes:
        may_spill: whether it may go to disk; asked with the lock of the budget held.
        is_wanted: likewise.
        on_full: called while the batch waits for room; likewise.
        enter: records the file, which is its own from then on; likewise. It may raise `OSError`
            before it has recorded anything.
    """

    may_spill: Callable[[], bool]
    is_wanted: Callable[[], bool]
    enter: Callable[[File], None]
    on_full: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Admission:
    """Takes the segments of one feed, for its log or its spool.

    Attributes:
        folder: where segments go for which there is no memory.
    """

    feed: str
    use: Use
    budget: Budget
    folder: Path | None = None

    def append(self, batch: pa.RecordBatch, deadline: Deadline, terms: Terms) -> Appended:
        """Write a batch into a file, waiting for room."""

        def write(is_on_disk: bool) -> int:
            return write_segment(batch, self.folder if is_on_disk else None)[0]

        nbytes, rows = segment_nbytes(batch), batch.num_rows
        return _patiently(deadline, lambda: self._admit(nbytes, rows, deadline, terms, write))

    def adopt(self, fd: int, rows: int, deadline: Deadline, terms: Terms) -> Appended:
        """Take a segment of `rows` rows that is in memory; `fd` is closed.

        Raises:
            ProtocolError: if it is no segment of so many rows.
        """
        try:

            def write(is_on_disk: bool) -> int:
                check_segment(fd, rows)
                return copy_segment(fd, self.folder) if is_on_disk else os.dup(fd)

            nbytes = os.fstat(fd).st_size
            return _patiently(deadline, lambda: self._admit(nbytes, rows, deadline, terms, write))
        finally:
            os.close(fd)

    def _admit(
        self,
        nbytes: int,
        rows: int,
        deadline: Deadline,
        terms: Terms,
        write: Callable[[bool], int],
    ) -> Appended:
        room = self.budget.acquire(
            *(self.use, self.feed, nbytes, deadline),
            *(terms.may_spill, terms.is_wanted, terms.on_full),
        )
        if room in (Room.FULL, Room.UNWANTED):
            return Appended.FULL if room is Room.FULL else Appended.CLOSED
        is_on_disk, is_stored, fd = room is Room.DISK, False, -1
        try:
            # Written without the lock, which others want meanwhile: the rows may be unwanted then.
            try:
                fd = write(is_on_disk)
            except OSError as error:
                if not is_on_disk or error.errno in NO_DESCRIPTORS:
                    raise
                self.budget.note_full_disk(nbytes)
                return Appended.FULL
            with self.budget.lock:
                file = File(fd, rows, nbytes, is_on_disk)
                if terms.is_wanted():
                    terms.enter(file)
                    is_stored = True
        finally:
            if not is_stored:
                if fd >= 0:
                    os.close(fd)
                self.budget.release(self.use, self.feed, nbytes, is_on_disk)
        return Appended.STORED if is_stored else Appended.CLOSED


def append_in_time(append: Callable[[Deadline], Appended]) -> bool:
    """Append rows that can go nowhere else, however long there is no room; return if wanted.

    Raises:
        ReadError: if there have been no descriptors for a minute.
    """
    is_too_long = Deadline.after(_SHORT_WAIT_S)
    while True:
        outcome = append(Deadline.after(_FULL_WAIT_S))
        if outcome in (Appended.STORED, Appended.CLOSED):
            return outcome is Appended.STORED
        if outcome is Appended.FULL:
            is_too_long = Deadline.after(_SHORT_WAIT_S)
        elif is_too_long.has_passed:
            raise ReadError(f"rows cannot be kept: {OUT_OF_DESCRIPTORS}")


def _patiently(deadline: Deadline, admit: Callable[[], Appended]) -> Appended:
    """Try again while there is no descriptor."""
    never = threading.Event()
    while True:
        try:
            return admit()
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS:
                raise
        if deadline.has_passed:
            return Appended.SHORT
        never.wait(min(_DESCRIPTOR_PAUSE_S, deadline.remaining_s))
