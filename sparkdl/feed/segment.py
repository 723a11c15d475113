"""A segment: one record batch as an Arrow IPC stream in an anonymous memory file.

Runs in: agent, child

Made by memfd_create(2), it has a descriptor and no name, so it vanishes with the last process that
holds it, however that process ends.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

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


def write_segment(batch: pa.RecordBatch) -> tuple[int, int]:
    """Write `batch` into an anonymous file; return its descriptor and its length in bytes.

    The caller owns the descriptor.
    """
    fd = _anonymous_file()
    try:
        with pa.OSFile(f"/dev/fd/{fd}", "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as out:
            out.write_batch(batch)
        return fd, os.fstat(fd).st_size
    except BaseException:
        os.close(fd)
        raise


def read_segment(fd: int) -> pa.RecordBatch:
    """Map a segment and return its batch without copying; the caller still owns `fd`."""
    with pa.memory_map(f"/dev/fd/{fd}", "r") as source, pa.ipc.open_stream(source) as reader:
        return reader.read_next_batch()


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sparkdl-segment", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="sparkdl-") as file:
        return os.dup(file.fileno())
