"""A segment: one record batch as an Arrow IPC stream in a file without a name.

Runs in: agent, child, feeder

In memory the file is made by memfd_create(2); on disk it is unlinked at birth. It has descriptors
but no name, so the kernel frees it with the last process that holds one, even after a crash.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from sparkdl.control.descriptors import nameless_file
from sparkdl.control.rows import Digest
from sparkdl.core.errors import ProtocolError
from sparkdl.core.row_ranges import Spans, spans_within

_NAME = "sparkdl-segment"


@dataclass(frozen=True)
class StoredSegment:
    """A segment that an agent holds, or a window of one.

    Attributes:
        nbytes: of its file, or its share of them where several windows have the same file.
        fd: its own descriptor of the file.
        start: the first row of the file that counts.
        spans: the partition and numbers of these rows, in order; empty for rows of inference.
        run: the Spark job, or the pass over files, that brought them; empty for rows of inference.
        digest: of their partition's rows up to the last of the file, if the job sent it.
    """

    feed: str
    number: int
    epoch: int
    rows: int
    nbytes: int
    fd: int
    exchange: str = ""
    is_last: bool = False
    is_on_disk: bool = False
    start: int = 0
    spans: Spans = ()
    run: str = ""
    digest: Digest | None = None

    def window(self, skip: int, rows: int, fd: int) -> StoredSegment:
        """Return the window of rows [`skip`, `skip` + `rows`); `fd` is its own from here on."""
        return replace(
            self,
            start=self.start + skip,
            rows=rows,
            nbytes=self.share(skip, rows),
            fd=fd,
            spans=tuple(spans_within(self.spans, [(skip, skip + rows)])),
        )

    def share(self, skip: int, rows: int) -> int:
        """Return the bytes of a window; those of windows that make up the segment add up."""
        total = max(1, self.rows)
        # Two running totals: windows rounded one by one would leak bytes of the budget.
        return self.nbytes * (skip + rows) // total - self.nbytes * skip // total


def segment_nbytes(batch: pa.RecordBatch) -> int:
    """Return how long the segment of `batch` will be, in bytes; nothing is copied."""
    # `batch.nbytes` lacks the stream's headers and padding, which the budget has to count.
    sink = pa.MockOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as out:
        out.write_batch(batch)
    return int(sink.size())


def write_segment(batch: pa.RecordBatch, folder: Path | None = None) -> tuple[int, int]:
    """Write `batch` into a nameless file; return its descriptor, the caller's, and its length."""
    fd = nameless_file(_NAME, folder)
    try:
        # pyarrow opens paths, not descriptors; `/dev/fd` is the path of a file without a name.
        # The path opens the same file a second time, so `fd` itself stays open for the caller.
        with pa.OSFile(f"/dev/fd/{fd}", "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as out:
            out.write_batch(batch)
        return fd, os.fstat(fd).st_size
    # An interrupt too: the file has no name, so a forgotten descriptor keeps its memory in use.
    except BaseException:
        os.close(fd)
        raise


def read_segment(fd: int) -> pa.RecordBatch:
    """Map a segment and return its batch without copying; the caller still owns `fd`."""
    # Buffers of the batch keep the mapping alive after the file object and `fd` are closed.
    with pa.memory_map(f"/dev/fd/{fd}", "r") as source, pa.ipc.open_stream(source) as reader:
        return reader.read_next_batch()


def check_segment(fd: int, rows: int) -> pa.RecordBatch:
    try:
        # Opening one end of a pipe would wait for a process at the other end.
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ProtocolError("a segment that is no file")
        batch = read_segment(fd)
        # An offset beyond the buffers would end this process with SIGSEGV at the first read.
        batch.validate()
    except (pa.ArrowException, StopIteration, OSError) as error:
        raise ProtocolError(f"not a segment: {error}") from None
    # Rows are numbered by the announced count, so another count would shift all rows behind them.
    if batch.num_rows != rows:
        raise ProtocolError(f"a segment of {batch.num_rows} rows was announced with {rows}")
    return batch
