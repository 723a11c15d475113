"""Decodes records into columns of given types.

Runs in: feeder

If the column's type cannot hold a value exactly, the error names record and feature; nothing is
cut, rounded or left out. `docs/tfrecords.md` has the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import RecordError
from sparkdl.data.columns import Column, Kind
from sparkdl.data.features import Lists, Records, take_apart
from sparkdl.data.framing import Chunk
from sparkdl.data.wire import Bools, Ints


def decode(chunk: Chunk, columns: Sequence[Column], record_type: str) -> list[pa.Array]:
    """Return the columns of the records of a chunk; features that are no column are passed over.

    Raises:
        RecordError: if a record is no message of this type, or a feature does not fit its column.
    """
    return take_apart(
        chunk, record_type, lambda records: [_array(records, column) for column in columns]
    )


def _array(records: Records, column: Column) -> pa.Array:
    count = len(records)
    if column.depth == 2:
        spans = records.feature_lists.get(column.name)
        if spans is None:
            return _Slots(records, column, np.arange(0)).nothing(count)
        steps = records.steps(spans)
        inside = _Slots(records, column, spans.record[steps.record])
        each = np.arange(len(steps.record))
        inner = inside.lists(steps._replace(record=each), len(each), column.type.value_type)
        if inner.null_count and not column.type.value_field.nullable:
            raise inside.error(int(np.argmax(_nulls(inner))), "has a step that holds nothing")
        sizes = np.zeros(count, np.int64)
        sizes[spans.record] = np.bincount(steps.record, minlength=len(spans.record))
        missing = np.ones(count, np.bool_)
        missing[spans.record] = False
        outside = _Slots(records, column, np.arange(count))
        return outside.nested(inner, sizes, missing, column.type)
    slots = _Slots(records, column, np.arange(count))
    found = records.features.get(column.name)
    if found is None:
        return slots.nothing(count)
    lists = records.lists(found)
    if column.depth == 1:
        return slots.lists(lists, count, column.type)
    return slots.single(lists, count)


@dataclass(frozen=True)
class _Slots:
    """Places in a column, for lists of values.

    Attributes:
        record: the record of each place, for messages.
    """

    records: Records
    column: Column
    record: Ints

    def error(self, slot: int, reason: str) -> RecordError:
        where = f"feature {self.column.name!r} {reason}"
        return self.records.chunk.error(int(self.record[slot]), where)

    def nothing(self, count: int) -> pa.Array:
        """Return the column of `count` records that all lack the feature."""
        if count and not self.column.is_nullable:
            raise self.records.chunk.error(0, _missing(self.column))
        return pa.nulls(count, self.column.type)

    def lists(self, lists: Lists, count: int, kind: pa.DataType) -> pa.ListArray:
        values, sizes, missing = self._fill(lists, count)
        return self.nested(values, sizes, missing, kind)

    def nested(
        self, values: pa.Array, sizes: Ints, missing: Bools, kind: pa.DataType
    ) -> pa.ListArray:
        """Return lists of `sizes` values each; null where they are missing."""
        # Inner lists come here too, and their nulls are checked by `_array`.
        if kind is self.column.type:
            self._refuse(missing)
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(sizes, dtype=np.int32)])
        mask = pa.array(missing) if missing.any() else None
        return pa.ListArray.from_arrays(pa.array(offsets), values, type=kind, mask=mask)

    def single(self, lists: Lists, count: int) -> pa.Array:
        """Return one value a record; null where the list is empty or missing."""
        values, sizes, _ = self._fill(lists, count)
        if (sizes > 1).any():
            slot = int(np.argmax(sizes > 1))
            raise self.error(
                slot,
                f"has {sizes[slot]} values, and the column holds one. Give it the type "
                f"array<{_SPARK_NAMES.get(self.column.leaf, self.column.leaf)}> in the schema",
            )
        if (sizes == 1).all():
            return values
        self._refuse(sizes == 0)
        # Each record with a value takes the next one.
        return values.take(pa.array(np.cumsum(sizes) - 1, mask=sizes == 0))

    def _refuse(self, missing: Bools) -> None:
        if missing.any() and not self.column.is_nullable:
            slot = int(np.argmax(missing))
            raise self.records.chunk.error(int(self.record[slot]), _missing(self.column))

    def _fill(self, lists: Lists, count: int) -> tuple[pa.Array, Ints, Bools]:
        """Return all values, how many each place has, and which places hold nothing at all."""
        # 0 is a feature that holds nothing at all: it stays missing.
        if not lists.kind.all():
            lists = lists.where(lists.kind != 0)
        # An empty list may be of any kind, for it has no value.
        is_other = (lists.kind != self.column.kind) & (lists.end > lists.start)
        if is_other.any():
            slot = int(np.argmax(is_other))
            found = Kind(int(lists.kind[slot])).name.lower()
            raise self.error(
                int(lists.record[slot]),
                f"holds a list of {found}, and {self.column.type} is read from "
                f"{self.column.kind.name.lower()}. Give the column another type in the schema",
            )
        values, counts = self.records.values(self.column.kind, lists)
        sizes = np.zeros(count, np.int64)
        sizes[lists.record] = counts
        missing = np.ones(count, np.bool_)
        missing[lists.record] = False
        return self._cast(values, np.cumsum(sizes)), sizes, missing

    def _cast(self, values: pa.Array, ends: Ints) -> pa.Array:
        """Return the values as the column's; `ends` says to which place each belongs."""
        leaf = self.column.leaf
        try:
            if not pa.types.is_boolean(leaf):
                return values.cast(leaf)
            # Arrow would make true of any other number.
            if set(values.unique().to_pylist()) <= {0, 1}:
                return values.cast(leaf)
        except pa.ArrowInvalid:
            pass
        # Arrow does not say which value failed, so it is looked for one by one.
        bad = next(i for i, value in enumerate(values) if not _fits(value.as_py(), leaf))
        slot = int(np.searchsorted(ends, bad, side="right"))
        value = values[bad].as_py()
        shown = value if isinstance(value, int) else f"{value[:20]!r}{'...' * (len(value) > 20)}"
        raise self.error(
            slot,
            f"holds {shown}, which is no {_SPARK_NAMES.get(leaf, leaf)}. Give the column "
            f"{'binary' if self.column.kind is Kind.BYTES else 'bigint'} in the schema",
        )


_SPARK_NAMES = {
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.bool_(): "boolean",
}


def _missing(column: Column) -> str:
    return f"feature {column.name!r} is missing or empty, and the schema says it is never null"


def _nulls(array: pa.Array) -> Bools:
    nulls: Bools = array.is_null().to_numpy(zero_copy_only=False)
    return nulls


def _fits(value: int | bytes, leaf: pa.DataType) -> bool:
    if isinstance(value, bytes):
        try:
            value.decode()
        except UnicodeDecodeError:
            return False
        return True
    if pa.types.is_boolean(leaf):
        return value in (0, 1)
    limit = 1 << leaf.bit_width - 1
    return bool(-limit <= value < limit)
