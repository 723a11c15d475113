"""Columns become `Example` or `SequenceExample` messages, and come back.

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
from sparkdl.data.columns import SEQUENCE_EXAMPLE, Column, Kind, list_type
from sparkdl.data.framing import Chunk
from sparkdl.data.protos import message_class

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


def encode(batch: pa.RecordBatch, columns: Sequence[Column], record_type: str) -> list[bytes]:
    """Return each row as a serialised message.

    Args:
        columns: those of `batch`, in its order.
        record_type: `Example` or `SequenceExample`.

    Raises:
        WriteError: for what a record cannot hold: a null within an array, a double beyond float.
    """
    messages = [message_class(record_type)() for _ in range(batch.num_rows)]
    for message in messages:
        _context(message, record_type).SetInParent()
        if record_type == SEQUENCE_EXAMPLE:
            message.feature_lists.SetInParent()
    for column, array in zip(columns, batch.columns, strict=True):
        _check(column, array)
        stored = array.cast(list_type(_STORED[column.kind], column.depth))
        for message, value in zip(messages, stored.to_pylist(), strict=True):
            if value is None:
                continue
            if column.depth < 2:
                feature = _context(message, record_type).feature[column.name]
                _fill(feature, column.kind, value if column.depth else [value])
                continue
            steps = message.feature_lists.feature_list[column.name]
            for step in value:
                feature = steps.feature.add()
                if step is not None:
                    _fill(feature, column.kind, step)
    return [message.SerializeToString() for message in messages]


def _context(message: Any, record_type: str) -> Any:
    return message.context if record_type == SEQUENCE_EXAMPLE else message.features


def _fill(feature: Any, kind: Kind, values: Sequence[Any]) -> None:
    list_of = getattr(feature, _LISTS[kind])
    list_of.SetInParent()  # or an empty list would be none
    list_of.value.extend(values)


def _check(column: Column, array: pa.Array) -> None:
    for _ in range(column.depth):
        array = array.flatten()
    if column.depth and array.null_count:
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


def parsed(chunk: Chunk, record_type: str) -> Iterator[tuple[int, Any, Any]]:
    """Yield of each record its number in the chunk, its features and its feature lists.

    Raises:
        RecordError: if a record is no message of this type.
    """
    kind, is_sequence = message_class(record_type), record_type == SEQUENCE_EXAMPLE
    for number, record in enumerate(chunk.records):
        try:
            message = kind.FromString(record)
        except DecodeError as error:
            raise chunk.error(
                number,
                f"the record is no {record_type}, though its checksum is right: {error}. The "
                "option recordType says which messages a file holds",
            ) from error
        if not is_sequence and message.HasField("feature_lists"):
            raise chunk.error(
                number, "the record is a SequenceExample: use the option recordType=SequenceExample"
            )
        lists = message.feature_lists.feature_list if is_sequence else {}
        yield number, _context(message, record_type).feature, lists


def decode(chunk: Chunk, columns: Sequence[Column], record_type: str) -> list[pa.Array]:
    """Return the columns of the records of a chunk; features that are no column are passed over.

    Raises:
        RecordError: if a record is no message of this type, or a feature does not fit its column.
    """
    found = [_Values(chunk, column) for column in columns]
    for number, features, feature_lists in parsed(chunk, record_type):
        for values in found:
            name = values.column.name
            if values.column.depth == 2:
                values.add_steps(number, feature_lists.get(name))
            else:
                values.add(number, features.get(name))
    return [values.array() for values in found]


@dataclass
class _Values:
    """The values of a column, one after another.

    Attributes:
        sizes: how many values each place has: a record, or a step of one; None for nothing at all.
        records: the record of each place.
        steps: how many steps each record has, where the column is a feature list.
    """

    chunk: Chunk
    column: Column
    values: list[Any] = field(default_factory=list)
    sizes: list[int | None] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    steps: list[int | None] = field(default_factory=list)

    def add(self, record: int, feature: Any | None) -> None:
        """Take the values of a `Feature`."""
        name = feature.WhichOneof("kind") if feature is not None else None
        self.records.append(record)
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

    def add_steps(self, record: int, feature_list: Any | None) -> None:
        """Take the values of a `FeatureList`."""
        if feature_list is None:
            self.steps.append(None)
            return
        for feature in feature_list.feature:
            self.add(record, feature)
        self.steps.append(len(feature_list.feature))

    def array(self) -> pa.Array:
        """Return the column."""
        values, kind, is_nullable = self._cast(), self.column.type, self.column.is_nullable
        if self.column.depth == 0:
            self._refuse_several()
            self._refuse_missing(is_nullable, "is missing or empty", [*map(bool, self.sizes)])
            places = np.cumsum([size or 0 for size in self.sizes], dtype=np.int64) - 1
            empty = np.array([not size for size in self.sizes], np.bool_)
            return values.take(pa.array(places, mask=empty))
        has_values = [size is not None for size in self.sizes]
        if self.column.depth == 1:
            self._refuse_missing(is_nullable, "is missing or empty", has_values)
            return _nested(values, self.sizes, kind)
        self._refuse_missing(kind.value_field.nullable, "has a step that holds nothing", has_values)
        inner = _nested(values, self.sizes, kind.value_type)
        if None in self.steps and not is_nullable:
            raise self._error(self.steps.index(None), f"is missing or empty{_NEVER_NULL}")
        return _nested(inner, self.steps, kind)

    def _refuse_several(self) -> None:
        for record, size in zip(self.records, self.sizes, strict=True):
            if size is not None and size > 1:
                leaf = self.column.leaf
                raise self._error(
                    record,
                    f"has {size} values, and the column holds one. Give it the type "
                    f"array<{_SPARK_NAMES.get(leaf, leaf)}> in the schema",
                )

    def _refuse_missing(self, is_nullable: bool, what: str, has_values: Sequence[bool]) -> None:
        if not is_nullable and not all(has_values):
            raise self._error(self.records[has_values.index(False)], f"{what}{_NEVER_NULL}")

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
            self.records[int(np.searchsorted(ends, bad, side="right"))],
            f"holds {shown}, which is no {_SPARK_NAMES.get(leaf, leaf)}. Give the column "
            f"{'binary' if self.column.kind is Kind.BYTES else 'bigint'} in the schema",
        )

    def _error(self, record: int, reason: str) -> RecordError:
        return self.chunk.error(record, f"feature {self.column.name!r} {reason}")


_NEVER_NULL = ", and the schema says it is never null"


def _nested(values: pa.Array, sizes: Sequence[int | None], kind: pa.DataType) -> pa.ListArray:
    """Return lists of `sizes` values each; null where that is None."""
    offsets = np.cumsum([0, *(size or 0 for size in sizes)], dtype=np.int32)
    mask = pa.array([size is None for size in sizes]) if None in sizes else None
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=kind, mask=mask)


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
