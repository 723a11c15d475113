"""The part of a feed that one node received: a sequence of segments within a budget.

Runs in: agent

                 begin, append            cut              EpochEnd, again or not
    epoch open ────────────────▶ … ─────────────▶ counted ──────────────────────▶ read again | freed

What is appended stays until the child releases it. While nothing has had to be released for want of
room, the epoch is whole, and the child can read it again.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from sparkdl.control.coverage import PartRows
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import FeedClosedError
from sparkdl.core.row_ranges import Range, first_rows, merge_ranges
from sparkdl.feed.store.budget import Budget, Room
from sparkdl.feed.store.provenance import Provenance, rows_left, within
from sparkdl.feed.store.retained import RetainedSegment, RetainedSegments, cut, free
from sparkdl.feed.store.segment import StoredSegment, copy_segment, segment_nbytes, write_segment
from sparkdl.feed.transfer.append import Appended, AppendRequest, Attempt, EpochCount, Span
from sparkdl.feed.transfer.balance import RowBalancer

_FOR_EVER = sys.maxsize


@dataclass
class _Source:
    """What is known of a partition: its latest attempt, and its rows that are here."""

    epoch: int
    attempt: int
    covered: list[Range] = field(default_factory=list)


class Log:
    """One feed at one node. Appended to by Flight threads, released from by the agent's loop.

    Args:
        folder: where segments go for which there is no memory.
        kept: where segments go that were read.

    Attributes:
        origins: which rows each segment holds or held.
    """

    def __init__(
        self,
        feed: str,
        budget: Budget,
        on_segment: Callable[[StoredSegment], None],
        is_closed: bool = False,
        folder: Path | None = None,
        kept: RetainedSegments | None = None,
    ) -> None:
        self.feed = feed
        self.ledger = RowBalancer()
        self.origins = Provenance()
        self.rows_received = 0
        self.last_cut = EpochCount()
        self.closed_to = _FOR_EVER if is_closed else -1
        self.terminated_to = -1
        self._budget = budget
        self._on_segment = on_segment
        self._folder = folder
        self._kept = kept
        self._runs: dict[int, str] = {}
        self._lock = threading.Lock()
        self._segments: dict[int, StoredSegment] = {}
        self._next_number = 0
        self._sources: dict[tuple[str, int], _Source] = {}
        self._rows: Counter[int] = Counter()
        self._last_epoch = 0
        self._is_whole = True
        self._is_pinned = False

    @property
    def is_closed(self) -> bool:
        """Whether the node wants no more rows, ever."""
        return self.closed_to == _FOR_EVER

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the epoch that is received had to be released for want of room."""
        return self._is_whole

    def takes(self, epoch: int) -> bool:
        """Whether rows of `epoch` are taken."""
        return epoch > max(self.closed_to, self.last_cut.epoch)

    def rows_of(self, epoch: int) -> int:
        """Return how many rows of an epoch that was not counted yet are here."""
        return self._rows[epoch]

    def expect(self, last_epoch: int) -> None:
        """Epochs up to `last_epoch` are to come: those that a `close_call` refuses."""
        with self._lock:
            self._last_epoch = max(self._last_epoch, last_epoch)

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

    def append(self, batch: pa.RecordBatch, deadline: Deadline, place: AppendRequest) -> Appended:
        """Add a batch, waiting for room.

        Raises:
            FeedClosedError: if a later attempt at the partition has begun.
        """

        def write(is_on_disk: bool) -> int:
            return write_segment(batch, self._folder if is_on_disk else None)[0]

        return self._admit(segment_nbytes(batch), batch.num_rows, deadline, place, write)

    def adopt(self, fd: int, rows: int, deadline: Deadline, place: AppendRequest) -> Appended:
        """Add a segment of `rows` rows that is in memory; `fd` is the log's from here on.

        Raises:
            FeedClosedError: if a later attempt at the partition has begun.
        """
        try:

            def write(is_on_disk: bool) -> int:
                return copy_segment(fd, self._folder) if is_on_disk else os.dup(fd)

            return self._admit(os.fstat(fd).st_size, rows, deadline, place, write)
        finally:
            os.close(fd)

    def _admit(
        self,
        nbytes: int,
        rows: int,
        deadline: Deadline,
        place: AppendRequest,
        write: Callable[[bool], int],
    ) -> Appended:
        room = self._budget.take(
            self.feed,
            nbytes,
            deadline,
            lambda: place.keep and self._is_whole,
            lambda: self._wants(place),
        )
        if room in (Room.FULL, Room.UNWANTED):
            self._raise_if_superseded(place.attempt)
            return Appended.FULL if room is Room.FULL else Appended.CLOSED
        is_on_disk, is_stored = room is Room.DISK, False
        try:
            try:
                fd = write(is_on_disk)
            except OSError:
                if not is_on_disk:
                    raise
                self._budget.disk_is_full(nbytes)
                return Appended.FULL
            try:
                is_stored = self._add(rows, nbytes, fd, is_on_disk, place)
            finally:
                if not is_stored:
                    os.close(fd)
        finally:
            if not is_stored:
                self._budget.give_back(self.feed, nbytes, is_on_disk)
        self._raise_if_superseded(place.attempt)
        return Appended.STORED if is_stored else Appended.CLOSED

    def press(self) -> bool:
        """Allow what was read to be released at once: room is wanted. False if it has to stay."""
        with self._lock:
            if self._is_pinned:
                return False
            self._is_whole = False
            return True

    def cut(self, epoch: int) -> EpochCount:
        """Take no more rows of `epoch` and those before; count the rows of `epoch`.

        If it is whole it stays so until `settle`.
        """
        with self._lock:
            if epoch > self.last_cut.epoch:
                self.last_cut = EpochCount(epoch, self._rows[epoch], self._is_whole)
                self._is_pinned = self._is_whole
                self._rows = Counter({e: rows for e, rows in self._rows.items() if e > epoch})
                self.ledger.forget(epoch)
                sources = self._sources.items()
                self._sources = {key: source for key, source in sources if source.epoch > epoch}
        self._budget.wake()
        return self.last_cut

    def settle(self, epoch: int) -> None:
        """No epoch after `epoch` reads again what was counted last; the next one may be whole."""
        self.origins.settle(epoch)
        with self._lock:
            self._is_pinned = False
            self._is_whole = True

    def release(self, numbers: Iterable[int]) -> None:
        """The child needs segments no more: free them, or keep them for another one."""
        with self._lock:
            freed = [self._segments.pop(n) for n in numbers if n in self._segments]
        self._let_go(freed)

    def resume(
        self, epoch: int, run: str, kept: list[RetainedSegment], done: PartRows, limit: int
    ) -> None:
        """Take rows of an earlier generation as rows of `epoch`, but for those that are `done`.

        Not more than `limit`: the others go where they are wanted.

        Of a partition that somebody brings already none are taken: he would bring them as well.
        """
        gone: list[StoredSegment] = []
        cut_short: list[tuple[StoredSegment, int]] = []
        with self._lock:
            for old in kept:
                part = old.spans[0][0]
                source = self._sources.setdefault((run, part), _Source(epoch, -1))
                have = (*source.covered, *done.get(part, ()))
                is_wanted = source.attempt < 0 and self.takes(epoch)
                left = rows_left(old.spans, {part: have}) if is_wanted else []
                left = first_rows(left, limit - self._rows[epoch])
                segment = self._again(old.segment, epoch, left)
                if segment is None:
                    gone.append(old.segment)
                    continue
                if segment.fd != old.segment.fd:
                    cut_short.append((old.segment, segment.nbytes))
                spans = tuple(within(old.spans, left))
                ranges = [(start, stop) for _, start, stop in spans]
                source.covered = merge_ranges([*source.covered, *ranges])
                self._enter(segment, run, spans)
        for segment in gone:  # without the lock: who holds the budget's may want it
            free(segment, self._budget)
        for segment, nbytes in cut_short:
            os.close(segment.fd)
            self._budget.resize(segment.nbytes, nbytes, segment.is_on_disk)

    def _again(self, old: StoredSegment, epoch: int, rows: list[Range]) -> StoredSegment | None:
        """Return a segment of these rows of another, which is the other's own if it is all."""
        if not rows:
            return None
        count = sum(stop - start for start, stop in rows)
        fd, nbytes, is_on_disk = old.fd, old.nbytes, old.is_on_disk
        if count < old.rows:
            try:
                fd = cut(old, rows)
            except OSError:
                return None  # a feeder brings them
            nbytes, is_on_disk = os.fstat(fd).st_size, False
        number = self._next_number
        return StoredSegment(self.feed, number, epoch, count, nbytes, fd, is_on_disk=is_on_disk)

    def _enter(self, segment: StoredSegment, run: str, spans: tuple[Span, ...]) -> None:
        """Note a segment of rows that belong to an epoch, and tell of it."""
        self._next_number += 1
        self._segments[segment.number] = segment
        if not segment.exchange:
            if run and self._kept is not None:
                self._runs[segment.number] = run
            self.origins.add(segment.number, segment.epoch, spans)
            self.rows_received += segment.rows
            self._rows[segment.epoch] += segment.rows
        self._on_segment(segment)

    def close_call(self) -> None:
        """Take no more rows of the feeding that is under way, and free what is here of it."""
        self.terminated_to = self._last_epoch
        self._close(self._last_epoch, keeps=False)

    def close(self) -> None:
        """Take no more rows, let go of what is here, and let waiting appends return."""
        self._close(_FOR_EVER, keeps=True)

    def _close(self, epoch: int, keeps: bool) -> None:
        with self._lock:
            self.closed_to = max(self.closed_to, epoch)
            self._is_pinned = False
            self._is_whole = True
            freed = [s for s in self._segments.values() if self.is_closed or not s.exchange]
            for segment in freed:
                del self._segments[segment.number]
                if not keeps:
                    self._runs.pop(segment.number, None)
        self._let_go(freed)
        self._budget.wake()

    def _add(self, rows: int, nbytes: int, fd: int, is_on_disk: bool, place: AppendRequest) -> bool:
        with self._lock:
            if not self._wants(place):
                return False
            segment = StoredSegment(
                self.feed,
                self._next_number,
                place.epoch,
                rows,
                nbytes,
                fd,
                place.exchange,
                place.is_last,
                is_on_disk,
            )
            if place.attempt:
                source = self._sources[place.attempt.run, place.attempt.partition]
                here = (place.start_row, place.start_row + rows)
                source.covered = merge_ranges([*source.covered, here])
            run = place.attempt.run if place.attempt else ""
            self._enter(segment, run, place.spans_of(rows))
            return True

    def _wants(self, place: AppendRequest) -> bool:
        is_open = not self.is_closed if place.exchange else self.takes(place.epoch)
        return is_open and not self._is_superseded(place.attempt)

    def _is_superseded(self, attempt: Attempt | None) -> bool:
        if attempt is None:
            return False
        source = self._sources.get((attempt.run, attempt.partition))
        return source is not None and source.attempt != attempt.number

    def _raise_if_superseded(self, attempt: Attempt | None) -> None:
        if attempt and self._is_superseded(attempt):
            raise FeedClosedError(
                f"attempt {attempt.number} at partition {attempt.partition} of feed {self.feed!r} "
                "is out of date: a later one has begun"
            )

    def _let_go(self, segments: list[StoredSegment]) -> None:
        """Keep segments that a call has brought, if any are kept; free the others."""
        kept = []
        for segment in segments:
            run = self._runs.pop(segment.number, "")
            spans = self.origins.spans(segment.number)
            if run and spans and self._kept is not None:
                kept.append(RetainedSegment(segment, run, spans, self.origins))
            else:
                free(segment, self._budget)
        if kept and self._kept is not None:
            self._kept.add(kept)
