"""Columns in an anonymous memory file, for another process of the same program to map.

Runs in: child

    column  (gap)  column  (gap)  …  what lies where, as MessagePack
                                     ▲ at

Arrays lie as they are in memory; lists, of strings for example, as MessagePack.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

import msgspec
import numpy as np

from sparkdl.core.errors import (
    ConfigError,
    EndOfFeedError,
    FeedClosedError,
    FeedTimeoutError,
    FeedTypeError,
    SparkdlError,
    UnfedError,
)

Columns = dict[str, np.ndarray]
"""Arrays by column name, `[rows, …]`, of any type."""

Plain = dict[str, np.ndarray | list[Any]]
"""Columns by name: arrays of numbers `[rows, …]`, or lists of what has no such array."""

_ALIGNED_NBYTES = 64
_ERRORS = {
    kind.__name__: kind
    for kind in (
        *(ConfigError, FeedClosedError, EndOfFeedError, FeedTimeoutError, UnfedError),
        FeedTypeError,
    )
}


class _Described(msgspec.Struct, frozen=True, array_like=True):
    """Where a column lies; without a dtype it is a list, of `shape` bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int


_descriptions = msgspec.msgpack.Decoder(list[_Described])


def pack(columns: Plain) -> tuple[int, int]:
    """Write columns into a file; return its descriptor and where in it they are described."""
    fd = _anonymous_file()
    try:
        with open(fd, "wb", closefd=False) as file:
            described = []
            for name, column in columns.items():
                at = file.seek(-(-file.tell() // _ALIGNED_NBYTES) * _ALIGNED_NBYTES)
                if isinstance(column, list):
                    dtype, shape = "", (file.write(msgspec.msgpack.encode(column)),)
                else:
                    dtype, shape = column.dtype.str, column.shape
                    file.write(np.ascontiguousarray(column).data)
                described.append(_Described(name, dtype, shape, at))
            at = file.tell()
            file.write(msgspec.msgpack.encode(described))
        return fd, at
    except BaseException:
        os.close(fd)
        raise


def unpack(fd: int, at: int) -> Plain:
    """Map the columns of `pack`; what is written to them stays in this process.

    The caller still owns `fd`.
    """
    mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    columns: Plain = {}
    for column in _descriptions.decode(memoryview(mapped)[at:]):
        if column.dtype:
            columns[column.name] = np.ndarray(column.shape, column.dtype, mapped, column.at)
        else:
            raw = memoryview(mapped)[column.at : column.at + column.shape[0]]
            columns[column.name] = msgspec.msgpack.decode(raw, type=list[Any])
    return columns


def pack_failure(error: Exception) -> tuple[int, int]:
    """Write an error into a file, as `pack` does columns."""
    return pack({"error": [type(error).__name__, str(error)]})


def unpack_failure(fd: int, at: int) -> SparkdlError:
    """Return the error of `pack_failure`, of the same type where that is one of a feed's."""
    name, text = unpack(fd, at)["error"]
    return _ERRORS[name](text) if name in _ERRORS else SparkdlError(f"{name}: {text}")


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sparkdl-batch", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="sparkdl-") as file:
        return os.dup(file.fileno())
