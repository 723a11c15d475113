"""One feed's rows that belong to this node: a sequence of segments shared with the child.

              append, enter              cut              EpochEnd, again or not
    epoch open ────────────────▶ … ─────────────▶ counted ──────────────────────▶ read again | freed

Rows stay until the child releases them. While nothing has had to be released for want of room, the
epoch is whole, and the child can read it again.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable

from sparkdl.control.rows import EpochCount, EpochRows
from sparkdl.core.row_ranges import Range, Spans, merge_ranges, spans_within
from sparkdl.feed.store.buffer import AppendRequest, Budget, Pool, SegmentBuffer
from sparkdl.feed.store.segment import StoredSegment


class Provenance:
    """Which rows the segments of one feed hold, or held before they were freed, by their numbers.

    The caller holds the lock of the budget.
    """

    def __init__(self) -> None:
        self.spans: dict[int, tuple[int, Spans]] = {}
        self._settled: list[int] = []

    def settle(self, epoch: int) -> None:
        """Record that no later epoch reads segments that came in `epoch` or before."""
        # Ascending, because `last_epoch` searches by bisection.
        if not self._settled or epoch > self._settled[-1]:
            self._settled.append(epoch)

    def forget(self, epoch: int) -> None:
        """Forget rows that only epochs before `epoch` read: a checkpoint covers them."""
        self.spans = {
            segment: (came, spans)
            for segment, (came, spans) in self.spans.items()
            if not self.last_epoch(came) < epoch
        }
        self._settled = [e for e in self._settled if e >= epoch]

    def rows(self, consumed: EpochRows, dropped_to: int = -1) -> EpochRows:
        """Return by partition which rows were consumed, or came in epochs that were dropped."""
        found: dict[int, dict[int, list[Range]]] = {}
        for epoch, segments in consumed.items():
            for segment, ranges in segments.items():
                _, spans = self.spans.get(segment, (0, ()))
                for partition, start, stop in spans_within(spans, ranges):
                    found.setdefault(epoch, {}).setdefault(partition, []).append((start, stop))
        if dropped_to >= 0:
            for epoch, spans in self.spans.values():
                for partition, start, stop in spans if epoch <= dropped_to else ():
                    found.setdefault(epoch, {}).setdefault(partition, []).append((start, stop))
        return {
            epoch: {part: tuple(merge_ranges(ranges)) for part, ranges in sorted(rows.items())}
            for epoch, rows in sorted(found.items())
        }

    def last_epoch(self, came: int) -> float:
        """Return the last epoch that reads what came in one, if it is known."""
        at = bisect_left(self._settled, came)
        return self._settled[at] if at < len(self._settled) else float("inf")


class Log(SegmentBuffer):
    """The log of one feed and generation.

    Args:
        on_segment: called with each added segment and a descriptor of it for the child. The lock is
            held, so it must not block.
        keeps: whether segments that were read are retained even if they are not assigned again.

    Attributes:
        is_whole: nothing of the epoch that is received had to be released for want of room.
    """

    def __init__(
        self,
        feed: str,
        budget: Budget,
        on_segment: Callable[[StoredSegment, int], None],
        is_closed: bool = False,
        keeps: bool = False,
    ) -> None:
        super().__init__(feed, Pool.LOG, budget)
        self.rows_received = 0
        self.last_cut = EpochCount()
        self.is_closed = is_closed
        self.terminated_to = -1
        self._on_segment = on_segment
        self._keeps = keeps
        self._comes_again = False
        self._provenance = Provenance()
        self._segments: dict[int, StoredSegment] = {}
        self._rows: Counter[int] = Counter()
        self._last_epoch = 0
        self.is_whole = True
        self._is_pinned = False

    def rows_of(self, epoch: int) -> int:
        return self._rows[epoch]

    def expect(self, last_epoch: int) -> None:
        """Expect epochs up to `last_epoch`, which a `close_call` refuses."""
        with self._budget.lock:
            self._last_epoch = max(self._last_epoch, last_epoch)

    def retain_read(self, comes_again: bool) -> None:
        """Retain rows that are read from now on, if they are assigned again for another epoch."""
        with self._budget.lock:
            if self._comes_again and not (comes_again or self._keeps):
                # They were retained for a call that has ended early.
                self._budget.free_retained(lambda segment, _: segment.feed == self.feed)
            self._comes_again = comes_again

    def enter(self, segment: StoredSegment) -> None:
        """Add a window of the own spool, which is held for the log already.

        It is freed if it is unwanted, or retained if the child has ended.

        Raises:
            OSError: if there is no descriptor for the child; the window is freed.
        """
        with self._budget.lock:
            if not self.takes(segment.epoch):
                # The child died while these rows were on their way: they are the next child's.
                if self.is_closed and self._is_retaining:
                    self._budget.retain(Pool.LOG, segment, self)
                else:
                    self._budget.free(Pool.LOG, segment)
                return
            try:
                self._enter(segment)
            except OSError:
                self._budget.free(Pool.LOG, segment)
                raise

    def press(self) -> bool:
        """Let rows be released once they are read: room is wanted. False if they must stay."""
        with self._budget.lock:
            # The driver was told that the epoch is whole, and may have all nodes read it again.
            if self._is_pinned:
                return False
            self.is_whole = False
            return True

    def cut(self, epoch: int) -> EpochCount:
        """Take no more rows of `epoch` and those before; count the rows of `epoch`.

        If it is whole it stays so until `settle`.
        """
        with self._budget.lock:
            # `EpochEnd` cuts again after `FeedCut`, whose count the driver has used.
            if epoch > self.last_cut.epoch:
                self.last_cut = EpochCount(epoch, self._rows[epoch], self.is_whole)
                self.closed_to = max(self.closed_to, epoch)
                # Until the driver says whether the epoch comes again, its rows must stay.
                self._is_pinned = self.is_whole
                self._rows = Counter({e: rows for e, rows in self._rows.items() if e > epoch})
            self._budget.wake()
            return self.last_cut

    def settle(self, epoch: int) -> None:
        """Let no epoch after `epoch` reread the rows counted last; the next one may be whole."""
        with self._budget.lock:
            self._provenance.settle(epoch)
            self._is_pinned = False
            self.is_whole = True

    def release(self, numbers: Iterable[int]) -> None:
        with self._budget.lock:
            self._retain_or_free([self._segments.pop(n) for n in numbers if n in self._segments])

    def coverage(self, consumed: EpochRows) -> EpochRows:
        with self._budget.lock:
            return self._provenance.rows(consumed, self.terminated_to)

    def forget(self, epoch: int) -> None:
        with self._budget.lock:
            if not self._comes_again:
                self._budget.free_retained(
                    lambda segment, log: (
                        log is self and self._provenance.last_epoch(segment.epoch) < epoch
                    )
                )
            self._provenance.forget(epoch)

    def close_call(self) -> None:
        """Take no more rows of the current feeding, and free its rows that are here."""
        with self._budget.lock:
            # Dropped on purpose: no restart asks for these rows, so none is retained.
            self.terminated_to = self._last_epoch
            self._close(self._last_epoch, retains=False)

    def close(self) -> None:
        """Take no more rows, free or retain the rows here, and let waiting appends return."""
        with self._budget.lock:
            self.is_closed = True
            self._close(self.closed_to, retains=True)

    def retain(self, segment: StoredSegment) -> None:
        """Retain a window that is left of the spool, if rows are retained; free it otherwise."""
        with self._budget.lock:
            if self._is_retaining and segment.run:
                self._budget.retain(Pool.SPOOL, segment, self)
            else:
                self._budget.free(Pool.SPOOL, segment)

    # The lock is held, or taken again.

    @property
    def _is_retaining(self) -> bool:
        return self._keeps or self._comes_again

    def _close(self, epoch: int, retains: bool) -> None:
        with self._budget.lock:
            self.closed_to = max(self.closed_to, epoch)
            self._is_pinned = False
            self.is_whole = True
            # Inference shares the log, but not its calls: its rows stay until all ends.
            gone = [s for s in self._segments.values() if self.is_closed or not s.exchange]
            for segment in gone:
                del self._segments[segment.number]
            self._retain_or_free(gone, retains)
            self._budget.wake()

    def _wants(self, request: AppendRequest) -> bool:
        if request.exchange is not None:
            return not self.is_closed and not request.exchange.failure
        return self.takes(request.epoch)

    def _may_spill(self, request: AppendRequest) -> tuple[bool, bool]:
        return request.keep and self.is_whole, False

    def _enter(self, segment: StoredSegment) -> None:
        """Number a segment, count its rows, and report it to the listener."""
        child_fd = os.dup(segment.fd)  # first: once the rows are recorded, nothing may fail
        segment = self._numbered(segment)
        self._segments[segment.number] = segment
        # Rows of inference are answered, not trained on, so no checkpoint covers them.
        if not segment.exchange:
            self._provenance.spans[segment.number] = segment.epoch, segment.spans
            self.rows_received += segment.rows
            self._rows[segment.epoch] += segment.rows
        self._on_segment(segment, child_fd)

    def _retain_or_free(self, segments: Iterable[StoredSegment], retains: bool = True) -> None:
        """Retain segments that a call has brought, if any are retained; free the others."""
        for segment in segments:
            is_known = segment.number in self._provenance.spans
            # Others are read from files again, or covered by a checkpoint.
            if retains and segment.run and (self._comes_again or (self._keeps and is_known)):
                self._budget.retain(Pool.LOG, segment, self)
            else:
                self._budget.free(Pool.LOG, segment)
