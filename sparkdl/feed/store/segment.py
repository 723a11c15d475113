"""A segment: one record batch as an Arrow IPC stream in a file without a name.

Runs in: agent, child

In memory the file is made by memfd_create(2), on disk it is unlinked at birth: it has a descriptor
and no name, so it vanishes with the last process that holds it, however that process ends.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa


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
    fd = _memory_file() if folder is None else _disk_file(folder)
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
    copy = _memory_file() if folder is None else _disk_file(folder)
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


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sparkdl-segment", os.MFD_CLOEXEC)
    return _disk_file(Path(tempfile.gettempdir()))


def _disk_file(folder: Path) -> int:
    with tempfile.TemporaryFile(prefix="sparkdl-", dir=folder) as file:
        return os.dup(file.fileno())
