"""A digest of rows, by which data that are read again are known to be the same."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.types as is_

Place = tuple[int, ...]
"""A column, the part of it, the part of that: an array within a batch."""


class RowDigest:
    """A checksum of all rows so far: of their values alone, however they are cut into batches.

    Each array has sums of its own, of bytes that those of further rows continue: its values without
    the nulls', its lengths, the numbers of its nulls.

    Attributes:
        rows: how many have been added.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._rows_at = Counter[Place]()
        self._sums: dict[Place, int] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        for index, column in enumerate(batch.columns):
            self._add(column, (index,))
        self.rows += batch.num_rows

    @property
    def value(self) -> int:
        return crc32(json.dumps([self.rows, sorted(self._sums.items())]).encode())

    def _add(self, array: Any, place: Place) -> None:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if not (rows := len(array)):
            return
        nulls = np.empty(0, np.int64)
        if array.null_count and (valid := array.buffers()[0]) is not None:
            nulls = np.flatnonzero(_bits(valid, array.offset, rows) == 0)
            self._sum(nulls + self._rows_at[place], (*place, 0))
        self._rows_at[place] += rows
        if is_.is_nested(array.type):
            self._add_parts(array, place)
        elif not is_.is_null(array.type):
            self._sum(self._values(array, place, nulls), (*place, 1))

    def _add_parts(self, array: Any, place: Place) -> None:
        kind = array.type
        if is_.is_struct(kind):
            for index in range(kind.num_fields):
                self._add(array.field(index), (*place, 1, index))
        elif is_.is_fixed_size_list(kind):
            size = kind.list_size
            self._add(array.values.slice(array.offset * size, len(array) * size), (*place, 1))
        elif is_.is_list(kind) or is_.is_large_list(kind) or is_.is_map(kind):
            first, last = self._lengths(array, place, is_large=is_.is_large_list(kind))
            self._add(array.values.slice(first, last - first), (*place, 1))
        else:
            self._sum(_as_text(array), (*place, 1))

    def _values(self, array: Any, place: Place, nulls: Any) -> Any:
        """Return the bytes of values; those of nulls, which are whatever was there, are zero."""
        kind, rows = array.type, len(array)
        is_large = bool(is_.is_large_string(kind) or is_.is_large_binary(kind))
        if is_large or is_.is_string(kind) or is_.is_binary(kind):
            first, last = self._lengths(array, place, is_large)
            data = array.buffers()[2]
            return b"" if data is None else data[first:last]
        if is_.is_boolean(kind):
            values = _bits(array.buffers()[1], array.offset, rows)
        elif is_.is_primitive(kind) or is_.is_decimal(kind) or is_.is_fixed_size_binary(kind):
            width = kind.bit_width // 8
            bytes_ = np.frombuffer(array.buffers()[1], np.uint8, rows * width, array.offset * width)
            values = bytes_.reshape(rows, width)
        else:
            return _as_text(array)
        if len(nulls):
            values = values.copy()
            values[nulls] = 0
        return values

    def _lengths(self, array: Any, place: Place, is_large: bool) -> tuple[int, int]:
        """Add the lengths of lists or texts, and return where their values begin and end."""
        kind = np.dtype(np.int64 if is_large else np.int32)
        start = array.offset * kind.itemsize
        offsets = np.frombuffer(array.buffers()[1], kind, len(array) + 1, start)
        self._sum(np.diff(offsets), (*place, 2))
        return int(offsets[0]), int(offsets[-1])

    def _sum(self, values: Any, place: Place) -> None:
        self._sums[place] = crc32(values, self._sums.get(place, 0))


def _bits(buffer: pa.Buffer, start: int, rows: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    first = start // 8
    many = -(-(start + rows) // 8) - first
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8, many, first), bitorder="little")
    return bits[start - 8 * first :][:rows]


def _as_text(array: Any) -> bytes:
    return "".join(map(repr, array.to_pylist())).encode()
