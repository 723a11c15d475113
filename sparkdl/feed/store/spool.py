"""The rows of one feed that feeders have brought to an agent and the driver has not assigned yet.

    append ──▶ ▓▓▓▓▓▓▓▓▓▓ a segment; its `SpooledRange` is reported
               ▓▓▓░░░░▓▓▓ assigned in windows: a window of this node's moves to its log (`take`),
                          one of another node is read and sent (`read`), then freed (`free`)

Every row goes once: it is taken, freed, dropped with its segment, or left when the spool closes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from sparkdl.control.messages import ReadShare, SpooledRange
from sparkdl.control.rows import Share
from sparkdl.core.errors import FeedClosedError, SparkdlError
from sparkdl.core.row_ranges import Range, Slice, Sliced, Span, covers, remove_range, take_rows
from sparkdl.feed.store.buffer import AppendRequest, Budget, Pool, SegmentBuffer
from sparkdl.feed.store.segment import StoredSegment, read_segment
from sparkdl.values.ndarrays import to_array

_log = logging.getLogger(__name__)
_MIN_BATCH_NBYTES = 1 << 16


@dataclass
class _Spooled:
    segment: StoredSegment
    left: list[Range] = field(default_factory=list)

    def cut(self, skip: int, rows: int) -> list[Range]:
        """Remove rows; return those that were there."""
        return remove_range(self.left, skip, skip + rows)


class Spool(SegmentBuffer):
    """The spool of one feed and generation.

    Args:
        on_spooled: called with the feed, the epoch and the rows of each segment that has come, none
            if one has no room, with the lock held; must not block.
        may_spill: whether rows that are kept may go to disk.
    """

    def __init__(
        self,
        feed: str,
        budget: Budget,
        on_spooled: Callable[[str, int, list[SpooledRange]], None],
        may_spill: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(feed, Pool.SPOOL, budget)
        self._on_spooled = on_spooled
        self._rows_may_spill = may_spill
        self._segments: dict[int, _Spooled] = {}
        self._recalled = 0

    def refuse(self, epoch: int) -> None:
        """Take no more rows of epochs up to `epoch`. Rows here stay: nodes may want them."""
        with self._budget.lock:
            self.closed_to = max(self.closed_to, epoch)
            self._budget.wake()

    def note_end(self, epoch: int, partition: int, rows: int) -> bool:
        """Report how many rows a partition has; false if its epoch takes no more."""
        with self._budget.lock:
            if self.takes(epoch):
                self._on_spooled(self.feed, epoch, [SpooledRange(-1, partition, rows, 0, 0)])
            return self.takes(epoch)

    def take(self, number: int, skip: int, rows: int) -> StoredSegment:
        """Remove rows of a segment, for this node's log; nothing, where it raises."""
        with self._budget.lock:
            spooled = self._find(number, skip, rows)
            fd = os.dup(spooled.segment.fd)
            window = spooled.segment.window(skip, rows, fd)
            spooled.cut(skip, rows)
            # Windows of one file may be in the log while the spool still holds the rest. The
            # spool gives its count of the segment up with the last window.
            self._budget.move(window, Pool.SPOOL, Pool.LOG, self._forget_empty(spooled))
            return window

    def read(self, windows: Iterable[tuple[int, int, int]]) -> Iterator[pa.RecordBatch]:
        """Map windows of segments, each its number, rows to skip, and rows; they stay here."""
        mapped: dict[int, pa.RecordBatch] = {}
        for number, skip, rows in windows:
            with self._budget.lock:
                segment = self._find(number, skip, rows).segment
                # The mapping outlives the descriptor, so a `free` in between does no harm.
                if number not in mapped:
                    mapped[number] = read_segment(segment.fd)
            yield mapped[number].slice(segment.start + skip, rows)

    def lend(self, number: int, skip: int, rows: int) -> tuple[int, int]:
        """Return the descriptor of a window's file, the caller's, and where the segment begins."""
        with self._budget.lock:
            segment = self._find(number, skip, rows).segment
            return os.dup(segment.fd), segment.start

    def free(self, number: int, skip: int, rows: int) -> None:
        """Free rows that another node has, or none reads; rows already freed are ignored."""
        with self._budget.lock:
            spooled = self._segments.get(number)
            # A confirmation is repeated if its connection broke, so the rows may be gone already.
            if spooled is None:
                return
            for start, stop in spooled.cut(skip, rows):
                self._release(spooled, start, stop)

    def recall(self, epoch: int, retained: Iterable[StoredSegment]) -> list[SpooledRange]:
        ranges: list[SpooledRange] = []
        with self._budget.lock:
            for segment in retained:
                self._budget.move(segment, Pool.RETAINED, Pool.SPOOL)
                # A range has its new epoch, not the one in which the rows first came.
                ranges += self._ranges(replace(segment, epoch=epoch))
            self._recalled = self._next_number
        return ranges

    def close(self) -> list[StoredSegment]:
        """Take no more rows; remove and return the spooled windows, without freeing their budget.

        Rows for which there is no descriptor are freed.
        """
        windows: list[StoredSegment] = []
        with self._budget.lock:
            self.is_closed = True
            self._budget.wake()
            for spooled in list(self._segments.values()):
                for start, stop in list(spooled.left):
                    spooled.cut(start, stop - start)
                    try:
                        fd = os.dup(spooled.segment.fd)
                    except OSError:
                        self._release(spooled, start, stop)
                        continue
                    window = spooled.segment.window(start, stop - start, fd)
                    self._budget.move(window, Pool.SPOOL, Pool.SPOOL, self._forget_empty(spooled))
                    windows.append(window)
        return windows

    # The lock is held.

    def _may_spill(self, request: AppendRequest) -> tuple[bool, bool]:
        waits = self._waits(request)
        return waits or (request.keep and self._rows_may_spill()), waits

    def _waits(self, request: AppendRequest) -> bool:
        """Whether these rows may wait for others here, or others for these: then both need room."""
        if request.in_order or not request.batch_rows:
            return request.in_order
        # What is here from before a restart may come far behind the rows that are next.
        held = [each.left for n, each in self._segments.items() if n >= self._recalled]
        return sum(stop - start for left in held for start, stop in left) < request.batch_rows

    def _note_full(self, request: AppendRequest) -> None:
        # Without ranges this reports a full spool. Rows in an order wait for others all the same,
        # so it counts once nothing else could make room.
        if not self._waits(request) or self._budget.holds_only(Pool.SPOOL, self.feed):
            self._on_spooled(self.feed, request.epoch, [])

    def _enter(self, segment: StoredSegment) -> None:
        self._on_spooled(self.feed, segment.epoch, self._ranges(segment))

    def _ranges(self, segment: StoredSegment) -> list[SpooledRange]:
        segment = self._numbered(segment)
        self._segments[number := segment.number] = _Spooled(segment, [(0, segment.rows)])
        ranges, skip = list[SpooledRange](), 0
        spans, batch_rows = segment.spans, 0
        if isinstance(spans, Sliced) and len(spans.slices) > 1:  # all of them, as files are read
            sliced, batch_rows = spans, spans.slices[0].rows
        else:
            sliced = Sliced(tuple(spans), ())
        # After a restart the rows of one segment may lie apart in their partition: a range each.
        for (partition, start, stop), skips in zip(sliced.spans, sliced.starts, strict=True):
            rows = stop - start
            nbytes = segment.share(skip, rows)
            of = number, partition, start, skip, rows, nbytes, segment.digest, batch_rows, skips
            ranges.append(SpooledRange(*of))
            skip += rows
        return ranges

    def _find(self, number: int, skip: int, rows: int) -> _Spooled:
        spooled = self._segments.get(number)
        if spooled is None or not covers(spooled.left, skip, skip + rows):
            raise FeedClosedError(
                f"rows {skip} to {skip + rows} of segment {number} of feed {self.feed!r} are not "
                "in the spool"
            )
        return spooled

    def _release(self, spooled: _Spooled, start: int, stop: int) -> None:
        segment, nbytes = spooled.segment, spooled.segment.share(start, stop - start)
        segments = self._forget_empty(spooled)
        self._budget.release(Pool.SPOOL, self.feed, nbytes, segment.is_on_disk, segments)

    def _forget_empty(self, spooled: _Spooled) -> int:
        """Forget a segment without rows, and close its file; return how many were forgotten."""
        if spooled.left:
            return 0
        # Windows have descriptors of their own, so the file stays as long as one of them is held.
        os.close(self._segments.pop(spooled.segment.number).segment.fd)
        return 1


class ShareLoader(threading.Thread):
    """Reads the files of a pass that the driver has ordered into the spool, as far as wanted."""

    def __init__(
        self, order: ReadShare, spool: Spool, memory_nbytes: int, on_problem: Callable[[str], None]
    ) -> None:
        super().__init__(name=f"sparkdl-reading-{order.feed}", daemon=True)
        self._order = order
        self._spool = spool
        self._memory_nbytes = memory_nbytes
        self._on_problem = on_problem

    def run(self) -> None:
        order = self._order
        size, nodes = order.slices or (0, 1)
        base = AppendRequest(
            order.epoch, keep=order.keep, run=order.run, in_order=order.in_order, batch_rows=size
        )
        try:
            # Ends the decoding threads when the rows are not wanted any more.
            with closing(read_within(order.share, self._memory_nbytes)) as batches:
                for batch, spans in batches:
                    rows: tuple[Span, ...] | Sliced = spans
                    if nodes > 1:
                        rows = Sliced(spans, Slice.all(size, nodes))
                        batch = by_slices(batch, rows)
                    if not self._spool.append(batch, replace(base, spans=rows)):
                        return
        except SparkdlError as error:
            self._on_problem(f"could not read its share: {error}")
        except Exception as error:  # noqa: BLE001 (who reads has to know)
            _log.error("Reading Parquet files failed", exc_info=error)
            self._on_problem(f"could not read its share: {type(error).__name__}: {error}")


def by_slices(batch: pa.RecordBatch, rows: Sliced) -> pa.RecordBatch:
    """Return the rows of a batch, which are those of `rows.spans`, in the order of `rows`."""
    (_, start, stop), *others = rows.spans
    if not others and start // rows.slices[0].rows == (stop - 1) // rows.slices[0].rows:
        return batch  # all are of one global batch, whose slices follow each other
    columns = list[pa.Array]()
    for column in batch.columns:
        is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
        if is_number and not column.null_count:
            columns.append(_numbers_by_slices(column, rows))
        else:
            parts = [column.slice(at, to - first) for at, (_, first, to) in rows.placed()]
            columns.append(pa.concat_arrays(parts))
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _numbers_by_slices(column: pa.Array, rows: Sliced) -> pa.Array:
    # One copy for all whole batches of a span: a slice object for each would cost far more.
    numbers, at = to_array(column), 0
    found = np.frombuffer(data := pa.allocate_buffer(numbers.nbytes), numbers.dtype)
    for each in rows.slices:
        end = 0
        for _, start, stop in rows.spans:
            begin, end = end, end + stop - start
            head = min(end, begin + -start % each.rows)
            tail = max(head, end - stop % each.rows)
            first = each.begin - start % each.rows
            for part in (
                numbers[begin:head][max(0, first) : max(0, first + each.size)],
                numbers[head:tail].reshape(-1, each.rows)[:, each.begin :][:, : each.size],
                numbers[tail:end][each.begin :][: each.size],
            ):
                found[at : at + part.size].reshape(part.shape)[:] = part
                at += part.size
    return pa.Array.from_buffers(column.type, len(column), [None, data])


def read_within(
    share: Share, memory_nbytes: int
) -> Generator[tuple[pa.RecordBatch, tuple[Span, ...]], None, None]:
    """Yield the batches of a share, with their rows' numbers; read ahead within the memory."""
    # Imported here, because agents that read no files do not need it.
    from sparkdl.storage.parquet.read import BATCH_NBYTES, PREFETCH_NBYTES, read_share

    # Fractions, so that several batches and the rows read ahead fit beside other feeds.
    batch_nbytes = max(_MIN_BATCH_NBYTES, min(BATCH_NBYTES, memory_nbytes // 16))
    prefetch_nbytes = max(batch_nbytes, min(PREFETCH_NBYTES, memory_nbytes // 4))
    numbers = deque(part.numbers for part in share.ranges)
    reading = read_share(share, batch_nbytes=batch_nbytes, prefetch_nbytes=prefetch_nbytes)
    with closing(reading) as batches:
        for batch in batches:
            yield batch, tuple((0, *rows) for rows in take_rows(numbers, batch.num_rows))
