"""A segment: one record batch as an Arrow IPC stream in a file without a name.

Runs in: agent, child, feeder

In memory the file is made by memfd_create(2), on disk it is unlinked at birth: it has a descriptor
and no name, so it vanishes with the last process that holds it, however that process ends.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from sparkdl.control.descriptors import nameless_file
from sparkdl.control.rows import EpochRows
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ProtocolError
from sparkdl.core.row_ranges import Range, Span, merge_ranges, spans_within

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_NAME = "sparkdl-segment"


@dataclass(frozen=True)
class StoredSegment:
    """A segment in the log, and what the child needs to know of it."""

    feed: str
    number: int
    epoch: int
    rows: int
    nbytes: int
    fd: int
    exchange: str = ""
    is_last: bool = False
    is_on_disk: bool = False


def segment_nbytes(batch: pa.RecordBatch) -> int:
    """Return how long the segment of `batch` will be, in bytes; nothing is copied."""
    sink = pa.MockOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as out:
        out.write_batch(batch)
    return int(sink.size())


def write_segment(batch: pa.RecordBatch, folder: Path | None = None) -> tuple[int, int]:
    """Write `batch` into a nameless file; return its descriptor and its length in bytes.

    Args:
        folder: on whose disk; in memory without it.

    The caller owns the descriptor.

    Raises:
        OSError: if there is no room.
    """
    fd = nameless_file(_NAME, folder)
    try:
        with pa.OSFile(f"/dev/fd/{fd}", "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as out:
            out.write_batch(batch)
        return fd, os.fstat(fd).st_size
    except BaseException:
        os.close(fd)
        raise


def copy_segment(fd: int, folder: Path | None) -> int:
    """Copy a segment to disk; return the descriptor of the copy, which the caller owns.

    Raises:
        OSError: if there is no room.
    """
    copy = nameless_file(_NAME, folder)
    try:
        start, nbytes = 0, os.fstat(fd).st_size
        while start < nbytes:
            start += os.sendfile(copy, fd, start, nbytes - start)
        return copy
    except BaseException:
        os.close(copy)
        raise


def read_segment(fd: int) -> pa.RecordBatch:
    """Map a segment and return its batch without copying; the caller still owns `fd`."""
    with pa.memory_map(f"/dev/fd/{fd}", "r") as source, pa.ipc.open_stream(source) as reader:
        return reader.read_next_batch()


def check_segment(fd: int, rows: int) -> None:
    """Check that a descriptor that came from elsewhere is a segment of so many rows.

    Raises:
        ProtocolError: if it is not.
        OSError: if there is no descriptor left to look into it.
    """
    try:
        # Only a file: opening another end of a pipe would wait for somebody at the other.
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ProtocolError("a segment that is no file")
        batch = read_segment(fd)
        batch.validate()
    except (pa.ArrowException, StopIteration, OSError) as error:
        if getattr(error, "errno", None) in NO_DESCRIPTORS:
            raise
        raise ProtocolError(f"not a segment: {error}") from None
    if batch.num_rows != rows:
        raise ProtocolError(f"a segment of {batch.num_rows} rows was announced with {rows}")


def cut_segment(fd: int, rows: Sequence[Range]) -> int:
    """Write these rows of a segment into another; return its descriptor, which the caller owns.

    Raises:
        OSError: if there is no room.
    """
    batch = read_segment(fd)
    return write_segment(join([batch.slice(start, stop - start) for start, stop in rows]))[0]


def join(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of several batches as one; a single batch is not copied."""
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def join_small(
    batches: Iterator[pa.RecordBatch], min_nbytes: int, max_wait_s: float | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of at least `min_nbytes`, where schemas allow.

    Args:
        max_wait_s: rows that come slowly are not held back for others longer than this.
    """
    small: list[pa.RecordBatch] = []
    small_nbytes, is_late = 0, Deadline.after(None)
    for batch in batches:
        if not batch.num_rows:
            continue
        nbytes = batch.nbytes
        if small and (nbytes >= min_nbytes or not batch.schema.equals(small[0].schema, True)):
            yield join(small)
            small, small_nbytes = [], 0
        if nbytes >= min_nbytes:
            yield batch
            continue
        if not small:
            is_late = Deadline.after(max_wait_s)
        small.append(batch)
        small_nbytes += nbytes
        if small_nbytes >= min_nbytes or is_late.has_passed:
            yield join(small)
            small, small_nbytes = [], 0
    if small:
        yield join(small)


def halve(batch: pa.RecordBatch, max_nbytes: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in pieces of `max_nbytes` at most; a larger row comes alone."""
    if batch.num_rows <= 1 or batch.nbytes <= max_nbytes:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from halve(batch.slice(0, middle), max_nbytes)
    yield from halve(batch.slice(middle), max_nbytes)


class Provenance:
    """Which rows the segments of one feed hold, or held before they were freed, by their numbers.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[int, tuple[int, tuple[Span, ...]]] = {}
        self._settled: list[int] = []

    def add(self, segment: int, epoch: int, spans: tuple[Span, ...]) -> None:
        """Note what a segment holds that came in `epoch`."""
        with self._lock:
            self._spans[segment] = epoch, spans

    def cut(self, segment: int, rows: int) -> tuple[Span, ...]:
        """Let a segment hold its first `rows` rows only; return which the others were."""
        with self._lock:
            epoch, spans = self._spans.pop(segment, (0, ()))
            total = sum(stop - start for _, start, stop in spans)
            if rows:
                self._spans[segment] = epoch, tuple(spans_within(spans, [(0, rows)]))
            return tuple(spans_within(spans, [(rows, total)]))

    def spans(self, segment: int) -> tuple[Span, ...]:
        """Return what a segment holds; nothing if that has been forgotten."""
        with self._lock:
            return self._spans.get(segment, (0, ()))[1]

    def settle(self, epoch: int) -> None:
        """Note that no epoch after `epoch` reads segments that came in it or before."""
        with self._lock:
            if not self._settled or epoch > self._settled[-1]:
                self._settled.append(epoch)

    def forget(self, epoch: int) -> None:
        """Forget rows that only epochs before `epoch` read: nobody asks for them any more."""
        with self._lock:
            self._spans = {
                segment: (came, spans)
                for segment, (came, spans) in self._spans.items()
                if not self.last_epoch(came) < epoch
            }
            self._settled = [e for e in self._settled if e >= epoch]

    def rows(self, consumed: EpochRows, dropped_to: int = -1) -> EpochRows:
        """Return by partition which rows were consumed, given by segment.

        Args:
            dropped_to: all rows that came in epochs up to this one count as consumed.
        """
        found: dict[int, dict[int, list[Range]]] = {}
        with self._lock:
            for epoch, segments in consumed.items():
                for segment, ranges in segments.items():
                    _, spans = self._spans.get(segment, (0, ()))
                    for partition, start, stop in spans_within(spans, ranges):
                        found.setdefault(epoch, {}).setdefault(partition, []).append((start, stop))
            if dropped_to >= 0:
                for epoch, spans in self._spans.values():
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
