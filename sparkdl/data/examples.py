"""Columns become `Example` messages, and come back.

Runs in: feeder

If a column's type cannot hold a value exactly, the error names record and feature; nothing is cut,
rounded or left out, but for doubles, which are written as floats. `docs/tfrecords.md` has the
table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from sparkdl.core.errors import RecordError, WriteError
from sparkdl.data.columns import Column, Kind, list_type
from sparkdl.data.framing import Chunk
from sparkdl.data.protos import example_class

_STORED = {Kind.BYTES: pa.binary(), Kind.FLOAT: pa.float32(), Kind.INT64: pa.int64()}
_LISTS = {Kind.BYTES: "bytes_list", Kind.FLOAT: "float_list", Kind.INT64: "int64_list"}
KINDS = {name: kind for kind, name in _LISTS.items()}
"""By what `Feature.WhichOneof("kind")` returns."""
_SPARK_NAMES = {
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.bool_(): "boolean",
}


# Writing


def encode(batch: pa.RecordBatch, columns: Sequence[Column]) -> list[bytes]:
    """Return each row as a serialised message.

    Args:
        columns: those of `batch`, in its order.

    Raises:
        WriteError: for what a record cannot hold: a null within an array, a double beyond float.
    """
    messages = [example_class()() for _ in range(batch.num_rows)]
    for message in messages:
        message.features.SetInParent()
    for column, array in zip(columns, batch.columns, strict=True):
        _check(column, array)
        stored = _STORED[column.kind]
        values = array.cast(list_type(stored) if column.is_list else stored).to_pylist()
        for message, value in zip(messages, values, strict=True):
            if value is not None:
                feature = message.features.feature[column.name]
                _fill(feature, column.kind, value if column.is_list else [value])
    return [message.SerializeToString() for message in messages]


def _fill(feature: Any, kind: Kind, values: Sequence[Any]) -> None:
    list_of = getattr(feature, _LISTS[kind])
    list_of.SetInParent()  # or an empty list would be none
    list_of.value.extend(values)


def _check(column: Column, array: pa.Array) -> None:
    if column.is_list:
        array = array.flatten()
    if column.is_list and array.null_count:
        raise WriteError(
            f"column {column.name!r} has a null within an array, which a TFRecord cannot hold. "
            "Replace or remove it: filter(c, x -> x is not null)"
        )
    if column.leaf != pa.float64():
        return
    numbers = np.abs(array.drop_null().to_numpy(zero_copy_only=False))
    finite = numbers[np.isfinite(numbers)]
    # An overflow is an error below, with the column's name, and not numpy's warning.
    with np.errstate(over="ignore"):
        is_beyond = len(finite) and np.isinf(finite.max().astype(np.float32))
    if is_beyond:
        raise WriteError(
            f"column {column.name!r} has {finite.max():g}, which is beyond float: TFRecords hold "
            "32 bits. Scale it, or write it as a string"
        )


# Reading


def parsed(chunk: Chunk) -> Iterator[tuple[int, Any]]:
    """Yield of each record its number in the chunk, and its features.

    Raises:
        RecordError: if a record is no Example.
    """
    kind = example_class()
    for number, record in enumerate(chunk.records):
        try:
            message = kind.FromString(record)
        except DecodeError as error:
            raise chunk.error(
                number, f"the record is no Example, though its checksum is right: {error}"
            ) from error
        if message.feature_lists:
            raise chunk.error(
                number,
                "the record is a SequenceExample, which has no columns here. Read it with "
                "tf.data.TFRecordDataset, or write Examples",
            )
        yield number, message.features.feature


def decode(chunk: Chunk, columns: Sequence[Column]) -> list[pa.Array]:
    """Return the columns of the records of a chunk; features that are no column are passed over.

    Raises:
        RecordError: if a record is no Example, or a feature does not fit its column.
    """
    found = [_Values(chunk, column) for column in columns]
    for number, features in parsed(chunk):
        for values in found:
            values.add(number, features.get(values.column.name))
    return [values.array() for values in found]


@dataclass
class _Values:
    """The values of a column, one after another.

    Attributes:
        sizes: how many values each record has; None for no feature.
    """

    chunk: Chunk
    column: Column
    values: list[Any] = field(default_factory=list)
    sizes: list[int | None] = field(default_factory=list)

    def add(self, record: int, feature: Any | None) -> None:
        """Take the values of a `Feature`."""
        name = feature.WhichOneof("kind") if feature is not None else None
        if name is None:
            self.sizes.append(None)
            return
        values = getattr(feature, name).value
        # An empty list may be of any kind, for it has no value.
        if len(values) and KINDS[name] != self.column.kind:
            raise self._error(
                record,
                f"holds a list of {KINDS[name].name.lower()}, and {self.column.type} is read from "
                f"{self.column.kind.name.lower()}. Give the column another type in the schema",
            )
        self.values.extend(values)
        self.sizes.append(len(values))

    def array(self) -> pa.Array:
        """Return the column."""
        values, sizes, is_list = self._cast(), self.sizes, self.column.is_list
        is_there = [size is not None if is_list else bool(size) for size in sizes]
        if not self.column.is_nullable and not all(is_there):
            raise self._error(
                is_there.index(False), "is missing or empty, and the schema says it is never null"
            )
        ends = np.cumsum([0, *(size or 0 for size in sizes)], dtype=np.int32)
        missing = np.logical_not(is_there)
        if is_list:
            mask = pa.array(missing) if missing.any() else None
            return pa.ListArray.from_arrays(pa.array(ends), values, self.column.type, mask=mask)
        for record, size in enumerate(sizes):
            if size is not None and size > 1:
                leaf = self.column.leaf
                raise self._error(
                    record,
                    f"has {size} values, and the column holds one. Give it the type "
                    f"array<{_SPARK_NAMES.get(leaf, leaf)}> in the schema",
                )
        return values.take(pa.array(ends[1:] - 1, mask=missing))

    def _cast(self) -> pa.Array:
        """Return the values as the column's type."""
        values, leaf = pa.array(self.values, _STORED[self.column.kind]), self.column.leaf
        try:
            # Arrow would make true of any number.
            if not pa.types.is_boolean(leaf) or set(values.unique().to_pylist()) <= {0, 1}:
                return values.cast(leaf)
        except pa.ArrowInvalid:
            pass
        # Arrow does not say which value failed, so it is looked for one by one.
        bad = next(i for i, value in enumerate(self.values) if not _fits(value, leaf))
        ends = np.cumsum([size or 0 for size in self.sizes])
        value = self.values[bad]
        shown = value if isinstance(value, int) else f"{value[:20]!r}{'...' * (len(value) > 20)}"
        raise self._error(
            int(np.searchsorted(ends, bad, side="right")),
            f"holds {shown}, which is no {_SPARK_NAMES.get(leaf, leaf)}. Give the column "
            f"{'binary' if self.column.kind is Kind.BYTES else 'bigint'} in the schema",
        )

    def _error(self, record: int, reason: str) -> RecordError:
        return self.chunk.error(record, f"feature {self.column.name!r} {reason}")


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
