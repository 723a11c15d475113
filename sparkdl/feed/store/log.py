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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import pyarrow as pa

from sparkdl.control.descriptors import OUT_OF_DESCRIPTORS
from sparkdl.control.rows import PartRows
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import FeedClosedError, ReadError
from sparkdl.core.row_ranges import (
    Range,
    Span,
    count_rows,
    merge_ranges,
    spans_left,
    spans_within,
    take_rows,
)
from sparkdl.feed.store.budget import Budget, RetainedSegment, RetainedSegments, Room
from sparkdl.feed.store.segment import (
    NO_DESCRIPTORS,
    Provenance,
    StoredSegment,
    check_segment,
    copy_segment,
    cut_segment,
    read_segment,
    segment_nbytes,
    write_segment,
)
from sparkdl.feed.transfer.balance import RowBalancer

_FOR_EVER = sys.maxsize
_DESCRIPTOR_PAUSE_S = 0.1
_FULL_WAIT_S = 1.0
"""How long an append waits for room at once: what waits may have become unwanted."""
_SHORT_WAIT_S = 60.0
"""How long to wait for descriptors, of which nobody knows whether there will be any."""


class Appended(Enum):
    """What became of a batch that was to be appended."""

    STORED = "stored"
    FULL = "full"
    """There was no room in time; it may be tried again, here or elsewhere."""
    SHORT = "short"
    """There was no descriptor for it in time; likewise."""
    CLOSED = "closed"
    """The node takes no more rows of this epoch."""


@dataclass(frozen=True)
class Attempt:
    """One of Spark's attempts at a partition of a feeding job. Later ones have higher numbers."""

    run: str
    partition: int
    number: int = 0


@dataclass(frozen=True)
class AppendRequest:
    """Where in its feed a batch belongs.

    Attributes:
        attempt: that brings the batch, whose rows are the partition's from `start_row` on. It has
            begun; a later attempt skips rows that are here.
        exchange: the inference partition that waits for results, or empty.
        keep: a later epoch reads the rows again: they go to disk rather than wait for memory.
        spans: which rows these are, in their order; by default those that the attempt brings.
        run: of the job that has brought them, if no attempt does.
    """

    epoch: int = 0
    attempt: Attempt | None = None
    start_row: int = 0
    exchange: str = ""
    is_last: bool = False
    keep: bool = False
    spans: tuple[Span, ...] = ()
    run: str = ""

    def spans_of(self, rows: int) -> tuple[Span, ...]:
        """Return which rows a batch of `rows` rows holds."""
        if self.spans or self.attempt is None or not rows:
            return self.spans
        return ((self.attempt.partition, self.start_row, self.start_row + rows),)


@dataclass(frozen=True)
class EpochCount:
    """What a node has of an epoch that takes no more rows."""

    epoch: int = -1
    rows: int = 0
    is_whole: bool = False


@dataclass
class _Source:
    """What is known of a partition.

    Attributes:
        epoch, attempt: of its rows, and its latest one.
        covered: its rows that are here.
        visited: ids of the nodes that its attempts have gone to, if they asked here.
    """

    epoch: int
    attempt: int
    covered: list[Range] = field(default_factory=list)
    visited: set[int] = field(default_factory=set)


class Log:
    """One feed at one node. Appended to by Flight threads, released from by the agent's loop.

    Args:
        folder: where segments go for which there is no memory.
        retained: where segments go that were read.

    Attributes:
        provenance: which rows each segment holds or held.
        resumed: partitions of which rows of an earlier generation are here, until one is fed.
    """

    def __init__(
        self,
        feed: str,
        budget: Budget,
        on_segment: Callable[[StoredSegment, int], None],
        is_closed: bool = False,
        folder: Path | None = None,
        retained: RetainedSegments | None = None,
    ) -> None:
        self.feed = feed
        self.balancer = RowBalancer()
        self.provenance = Provenance()
        self.rows_received = 0
        self.last_cut = EpochCount()
        self.closed_to = _FOR_EVER if is_closed else -1
        self.terminated_to = -1
        self.resumed: tuple[int, ...] = ()
        self._budget = budget
        self._on_segment = on_segment
        self._folder = folder
        self._retained = retained
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
            covered = list(self._source(attempt, epoch).covered)
            self.resumed = ()
        self._budget.wake()
        return covered

    def visit(self, attempt: Attempt, epoch: int, node_ids: Iterable[int]) -> list[int]:
        """Note nodes that an attempt is going to; return those that the partition went to before.

        Raises:
            FeedClosedError: if a later attempt has begun. So the latest one knows all nodes.
        """
        with self._lock:
            visited = self._source(attempt, epoch).visited
            before = sorted(visited)
            visited.update(node_ids)
            return before

    def _source(self, attempt: Attempt, epoch: int) -> _Source:
        """Return what is known of the partition of an attempt that begins or goes on."""
        source = self._sources.setdefault(
            (attempt.run, attempt.partition), _Source(epoch, attempt.number)
        )
        source.attempt = max(source.attempt, attempt.number)
        self._raise_if_superseded(attempt)
        return source

    def append(self, batch: pa.RecordBatch, deadline: Deadline, request: AppendRequest) -> Appended:
        """Add a batch, waiting for room.

        Raises:
            FeedClosedError: if a later attempt at the partition has begun.
        """

        def write(is_on_disk: bool) -> int:
            return write_segment(batch, self._folder if is_on_disk else None)[0]

        nbytes, rows = segment_nbytes(batch), batch.num_rows
        return _patiently(deadline, lambda: self._admit(nbytes, rows, deadline, request, write))

    def append_in_time(self, batch: pa.RecordBatch, request: AppendRequest) -> bool:
        """Add a batch that can go nowhere else, however long there is no room; return if wanted.

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

    def adopt(self, fd: int, rows: int, deadline: Deadline, request: AppendRequest) -> Appended:
        """Add a segment of `rows` rows that is in memory; `fd` is the log's from here on.

        Raises:
            FeedClosedError: if a later attempt at the partition has begun.
            ProtocolError: if it is no segment of so many rows.
        """
        try:

            def write(is_on_disk: bool) -> int:
                check_segment(fd, rows)
                return copy_segment(fd, self._folder) if is_on_disk else os.dup(fd)

            nbytes = os.fstat(fd).st_size
            return _patiently(deadline, lambda: self._admit(nbytes, rows, deadline, request, write))
        finally:
            os.close(fd)

    def _admit(
        self,
        nbytes: int,
        rows: int,
        deadline: Deadline,
        request: AppendRequest,
        write: Callable[[bool], int],
    ) -> Appended:
        room = self._budget.acquire(
            self.feed,
            nbytes,
            deadline,
            lambda: request.keep and self._is_whole,
            lambda: self._wants(request),
        )
        if room in (Room.FULL, Room.UNWANTED):
            self._raise_if_superseded(request.attempt)
            return Appended.FULL if room is Room.FULL else Appended.CLOSED
        is_on_disk, is_stored = room is Room.DISK, False
        # Written without the lock, which other feeders want meanwhile; `_add` checks once more
        # whether the rows are wanted.
        fds: list[int] = []
        try:
            try:
                fds.append(write(is_on_disk))
            except OSError as error:
                if not is_on_disk or error.errno in NO_DESCRIPTORS:
                    raise
                self._budget.note_full_disk(nbytes)
                return Appended.FULL
            fds.append(os.dup(fds[0]))  # now: once the rows are recorded, nothing may fail
            is_stored = self._add(rows, nbytes, (fds[0], fds[1]), is_on_disk, request)
        finally:
            if not is_stored:
                for fd in fds:
                    os.close(fd)
                self._budget.release(self.feed, nbytes, is_on_disk)
        self._raise_if_superseded(request.attempt)
        return Appended.STORED if is_stored else Appended.CLOSED

    def press(self) -> bool:
        """Let rows be released once they are read: room is wanted. False if they must stay."""
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
                self.balancer.forget(epoch)
                sources = self._sources.items()
                self._sources = {key: source for key, source in sources if source.epoch > epoch}
        self._budget.wake()
        return self.last_cut

    def settle(self, epoch: int) -> None:
        """No epoch after `epoch` reads again what was counted last; the next one may be whole."""
        self.provenance.settle(epoch)
        with self._lock:
            self._is_pinned = False
            self._is_whole = True

    def release(self, numbers: Iterable[int]) -> None:
        """Free segments that the child needs no more, or retain them for another child."""
        with self._lock:
            freed = [self._segments.pop(n) for n in numbers if n in self._segments]
        self._free_or_retain(freed)

    def resume(
        self, epoch: int, run: str, retained: list[RetainedSegment], done: PartRows, limit: int
    ) -> None:
        """Take rows of an earlier generation as rows of `epoch`, except those that are `done`.

        At most `limit` rows are taken; the others go to nodes that want them. None are taken of a
        partition that an attempt brings already: it brings them all.
        """
        gone: list[StoredSegment] = []
        cut_short: list[tuple[StoredSegment, int]] = []
        with self._lock:
            for old in retained:
                part = old.spans[0][0]
                source = self._sources.setdefault((run, part), _Source(epoch, -1))
                have = (*source.covered, *done.get(part, ()))
                is_wanted = source.attempt < 0 and self.takes(epoch)
                left = spans_left(old.spans, {part: have}) if is_wanted else []
                left = take_rows(deque(left), limit - self._rows[epoch])
                reused = self._reuse(old.segment, epoch, left)
                if reused is None:
                    gone.append(old.segment)
                    continue
                segment, child_fd = reused
                if segment.fd != old.segment.fd:
                    cut_short.append((old.segment, segment.nbytes))
                spans = tuple(spans_within(old.spans, left))
                ranges = [(start, stop) for _, start, stop in spans]
                source.covered = merge_ranges([*source.covered, *ranges])
                self._record(segment, child_fd, run, spans)
            self.resumed = tuple(
                sorted(part for (of, part), source in self._sources.items() if of == run)
            )
        # Without our lock: a thread that holds the budget's may wait for ours.
        for segment in gone:
            self._budget.free(segment)
        for segment, nbytes in cut_short:
            self._budget.replace(segment, nbytes)

    def _reuse(
        self, old: StoredSegment, epoch: int, rows: list[Range]
    ) -> tuple[StoredSegment, int] | None:
        """Return a segment of these rows of another, which is the other's own if it is all.

        Also a descriptor of it for the child; nothing if there are no rows, or no room for them.
        """
        if not rows:
            return None
        count = count_rows(rows)
        fd, nbytes, is_on_disk = old.fd, old.nbytes, old.is_on_disk
        try:
            if count < old.rows:
                fd = cut_segment(old.fd, rows)
                nbytes, is_on_disk = os.fstat(fd).st_size, False
            child_fd = os.dup(fd)
        except OSError:
            if fd != old.fd:
                os.close(fd)
            return None  # a feeder brings them
        number = self._next_number
        segment = StoredSegment(self.feed, number, epoch, count, nbytes, fd, is_on_disk=is_on_disk)
        return segment, child_fd

    def _record(
        self, segment: StoredSegment, child_fd: int, run: str, spans: tuple[Span, ...]
    ) -> None:
        """Enter a segment, count its rows, and report it to the listener."""
        self._next_number += 1
        self._segments[segment.number] = segment
        if not segment.exchange:
            if run and self._retained is not None:
                self._runs[segment.number] = run
            self.provenance.add(segment.number, segment.epoch, spans)
            self.rows_received += segment.rows
            self._rows[segment.epoch] += segment.rows
        self._on_segment(segment, child_fd)

    def take_back(self, kept: Mapping[int, int]) -> list[tuple[pa.RecordBatch, tuple[Span, ...]]]:
        """Remove the last rows of segments, which the child has given up; return them.

        Args:
            kept: how many rows each segment keeps, by number.

        Returns:
            Batches, and which rows each of them holds, in order.
        """
        freed, taken = [], []
        with self._lock:
            for number, rows in sorted(kept.items()):
                segment = self._segments.get(number)
                if segment is None:  # it was closed meanwhile
                    continue
                batch = read_segment(segment.fd).slice(rows, segment.rows - rows)
                taken.append((batch, self.provenance.cut(number, rows)))
                self.rows_received -= batch.num_rows
                self._rows[segment.epoch] -= batch.num_rows
                if rows:
                    self._segments[number] = replace(segment, rows=rows)
                else:
                    freed.append(self._segments.pop(number))
                    self._runs.pop(number, None)
        for segment in freed:
            self._budget.free(segment)
        return taken

    def close_call(self) -> None:
        """Take no more rows of the feeding that is under way, and free what is here of it."""
        self.terminated_to = self._last_epoch
        self._close(self._last_epoch, retains=False)

    def close(self) -> None:
        """Take no more rows, free or retain what is here, and let waiting appends return."""
        self._close(_FOR_EVER, retains=True)

    def _close(self, epoch: int, retains: bool) -> None:
        with self._lock:
            self.closed_to = max(self.closed_to, epoch)
            self._is_pinned = False
            self._is_whole = True
            freed = [s for s in self._segments.values() if self.is_closed or not s.exchange]
            for segment in freed:
                del self._segments[segment.number]
                if not retains:
                    self._runs.pop(segment.number, None)
        self._free_or_retain(freed)
        self._budget.wake()

    def _add(
        self,
        rows: int,
        nbytes: int,
        fds: tuple[int, int],
        is_on_disk: bool,
        request: AppendRequest,
    ) -> bool:
        with self._lock:
            if not self._wants(request):
                return False
            segment = StoredSegment(
                self.feed,
                self._next_number,
                request.epoch,
                rows,
                nbytes,
                fds[0],
                request.exchange,
                request.is_last,
                is_on_disk,
            )
            if request.attempt:
                source = self._sources[request.attempt.run, request.attempt.partition]
                here = (request.start_row, request.start_row + rows)
                source.covered = merge_ranges([*source.covered, here])
            run = request.attempt.run if request.attempt else request.run
            self._record(segment, fds[1], run, request.spans_of(rows))
            return True

    def _wants(self, request: AppendRequest) -> bool:
        is_open = not self.is_closed if request.exchange else self.takes(request.epoch)
        return is_open and not self._is_superseded(request.attempt)

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

    def _free_or_retain(self, segments: list[StoredSegment]) -> None:
        """Retain segments that a call has brought, if any are retained; free the others."""
        retained = []
        for segment in segments:
            run = self._runs.pop(segment.number, "")
            spans = self.provenance.spans(segment.number)
            if run and spans and self._retained is not None:
                retained.append(RetainedSegment(segment, run, spans, self.provenance))
            else:
                self._budget.free(segment)
        if retained and self._retained is not None:
            self._retained.add(retained)


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
