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
_TEXTS = (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())


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
        if array.null_count:
            self._sum(np.flatnonzero(array.is_null()) + self._rows_at[place], (*place, 0))
        self._rows_at[place] += len(array)
        if not (rows := len(array := array.drop_null())):  # a null's value is whatever was there
            return
        kind = array.type
        if is_.is_struct(kind):
            for index, field in enumerate(array.flatten()):
                self._add(field, (*place, 1, index))
        elif is_.is_fixed_size_list(kind):
            self._add(array.flatten(), (*place, 1))
        elif is_.is_list(kind) or is_.is_large_list(kind) or is_.is_map(kind):
            first, last = self._lengths(array, place, is_.is_large_list(kind))
            self._add(array.values.slice(first, last - first), (*place, 1))
        elif kind in _TEXTS:
            first, last = self._lengths(array, place, kind in _TEXTS[2:])
            self._sum(array.buffers()[2][first:last], (*place, 1))
        elif is_.is_primitive(kind) or is_.is_decimal(kind) or is_.is_fixed_size_binary(kind):
            array = array.cast(pa.uint8()) if is_.is_boolean(kind) else array
            width = array.type.bit_width // 8
            start = array.offset * width
            self._sum(array.buffers()[1][start : start + rows * width], (*place, 1))
        else:
            self._sum("".join(map(repr, array.to_pylist())).encode(), (*place, 1))

    def _lengths(self, array: Any, place: Place, is_large: bool) -> tuple[int, int]:
        """Add the lengths of lists or texts, and return where their values begin and end."""
        kind = np.dtype(np.int64 if is_large else np.int32)
        start = array.offset * kind.itemsize
        offsets = np.frombuffer(array.buffers()[1], kind, len(array) + 1, start)
        self._sum(np.diff(offsets), (*place, 2))
        return int(offsets[0]), int(offsets[-1])

    def _sum(self, values: Any, place: Place) -> None:
        self._sums[place] = crc32(values, self._sums.get(place, 0))
