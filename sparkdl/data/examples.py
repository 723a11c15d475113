"""Columns become `Example` messages, and come back; TensorFlow is not needed.

If a column's type cannot hold a value exactly, the error names record and feature; nothing is cut,
rounded or left out, except doubles, which are written as floats. `docs/data.md` has the
table. The messages are classes of protobuf with TensorFlow's numbers, names and bytes:
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/example/feature.proto
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/example/example.proto
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_schema

from sparkdl.core.errors import ConfigError, RecordError, WriteError
from sparkdl.data.framing import Chunk
from sparkdl.values.types import SPARK_NAMES

_NO_PLACE = (
    "which a TFRecord cannot hold. Cast it: decimals to double or string, dates and timestamps to "
    "bigint or string, ML vectors by vector_to_array, structs, maps and arrays of arrays to "
    "separate columns or to JSON"
)
# As protoc writes it. TensorFlow's Example has no field 2; a SequenceExample's lists are there:
#     message BytesList { repeated bytes value = 1; }, FloatList and Int64List alike
#     message Feature { oneof kind { BytesList bytes_list = 1; FloatList float_list = 2;
#                                    Int64List int64_list = 3; } }
#     message Features { map<string, Feature> feature = 1; }
#     message Example { Features features = 1; bytes feature_lists = 2; }
_FILE = (
    b"\n\x16sparkdl/messages.proto\x12\ntensorflow"
    b'"\x1a\n\tBytesList\x12\r\n\x05value\x18\x01 \x03(\x0c'
    b'"\x1a\n\tFloatList\x12\r\n\x05value\x18\x01 \x03(\x02'
    b'"\x1a\n\tInt64List\x12\r\n\x05value\x18\x01 \x03(\x03'
    b'"\x98\x01\n\x07Feature\x12+\n\nbytes_list\x18\x01 \x01(\x0b2\x15.tensorflow.BytesListH'
    b"\x00\x12+\n\nfloat_list\x18\x02 \x01(\x0b2\x15.tensorflow.FloatListH\x00\x12+\n\nint64_li"
    b"st\x18\x03 \x01(\x0b2\x15.tensorflow.Int64ListH\x00B\x06\n\x04kind"
    b'"\x83\x01\n\x08Features\x122\n\x07feature\x18\x01 \x03(\x0b2!.tensorflow.Features.Feature'
    b'Entry\x1aC\n\x0cFeatureEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12"\n\x05value\x18\x02 '
    b"\x01(\x0b2\x13.tensorflow.Feature:\x028\x01"
    b'"H\n\x07Example\x12&\n\x08features\x18\x01 \x01(\x0b2\x14.tensorflow.Features\x12\x15\n\r'
    b"feature_lists\x18\x02 \x01(\x0cb\x06proto3"
)


class Kind(enum.IntEnum):
    """The type of a feature's values, numbered like the fields of `Feature`.

    https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/example/feature.proto
    """

    BYTES = 1
    FLOAT = 2
    INT64 = 3


@dataclass(frozen=True)
class Column:
    """A column, and the feature that it is.

    Attributes:
        leaf: the type of a value; `type` is that of the column: of one value, or of a list.
    """

    name: str
    kind: Kind
    leaf: pa.DataType
    type: pa.DataType
    is_nullable: bool

    @property
    def is_list(self) -> bool:
        return self.leaf is not self.type


def columns_of(schema: pa.Schema) -> tuple[Column, ...]:
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise ConfigError(
            f"column {twice[0]!r} appears twice, and a record holds each name once. Rename one of "
            "them"
        )
    return tuple(map(_column, schema))


def _column(field: pa.Field) -> Column:
    leaf = field.type.value_type if pa.types.is_list(field.type) else field.type
    kind = kind_of(leaf)
    if kind is None:
        raise ConfigError(f"column {field.name!r} is {field.type}, {_NO_PLACE}")
    return Column(field.name, kind, leaf, field.type, field.nullable)


def kind_of(leaf: pa.DataType) -> Kind | None:
    """Return what values of this type are held as, or None if they cannot be."""
    if pa.types.is_signed_integer(leaf) or pa.types.is_boolean(leaf):
        return Kind.INT64
    if leaf in (pa.float32(), pa.float64()):
        return Kind.FLOAT
    return Kind.BYTES if leaf in (pa.string(), pa.binary()) else None


def list_type(leaf: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", leaf))


def arrow_schema(schema: spark.StructType) -> pa.Schema:
    for each in schema:
        kind = each.dataType
        leaf = kind.elementType if isinstance(kind, spark.ArrayType) else kind
        if leaf.simpleString() not in SPARK_NAMES.values():
            raise ConfigError(f"column {each.name!r} is {kind.simpleString()}, {_NO_PLACE}")
    return to_arrow_schema(schema)


_STORED = {Kind.BYTES: pa.binary(), Kind.FLOAT: pa.float32(), Kind.INT64: pa.int64()}
KINDS = {f"{kind.name.lower()}_list": kind for kind in Kind}
"""By what `Feature.WhichOneof("kind")` returns."""


@cache
def example_class() -> Any:
    pool = DescriptorPool()  # not the default one, where TensorFlow registers its own
    pool.AddSerializedFile(_FILE)
    return GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


# Writing


def encode(batch: pa.RecordBatch, columns: Sequence[Column]) -> list[bytes]:
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
    list_of = getattr(feature, f"{kind.name.lower()}_list")
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
    """Yield of each record its number in the chunk, and its features."""
    kind = example_class()
    for number, record in enumerate(chunk.records):
        try:
            message = kind.FromString(record)
        except DecodeError as error:
            raise chunk.error(
                number, f"the record has the right checksum, but is not an Example: {error}"
            ) from error
        if message.feature_lists:
            raise chunk.error(
                number,
                "the record is a SequenceExample, which has no columns here. Read it with "
                "tf.data.TFRecordDataset, or write Examples",
            )
        yield number, message.features.feature


def decode(chunk: Chunk, columns: Sequence[Column]) -> list[pa.Array]:
    """Return the columns of the records of a chunk; features that are no column are passed over."""
    found = [_Values(chunk, column) for column in columns]
    for number, features in parsed(chunk):
        for values in found:
            values.add(number, features.get(values.column.name))
    return [values.array() for values in found]


@dataclass
class _Values:
    """The values of a column, one after another, and how many each record has, None for none."""

    chunk: Chunk
    column: Column
    values: list[Any] = field(default_factory=list)
    sizes: list[int | None] = field(default_factory=list)

    def add(self, record: int, feature: Any | None) -> None:
        name = feature.WhichOneof("kind") if feature is not None else None
        if name is None:
            self.sizes.append(None)
            return
        values = getattr(feature, name).value
        # An empty list may be of any kind, for it has no value.
        if len(values) and KINDS[name] != self.column.kind:
            raise self._error(
                record,
                f"holds a list of {KINDS[name].name.lower()}, but {self.column.type} is read from "
                f"{self.column.kind.name.lower()}. Give the column another type in the schema",
            )
        self.values.extend(values)
        self.sizes.append(len(values))

    def array(self) -> pa.Array:
        values, sizes, is_list = self._cast(), self.sizes, self.column.is_list
        is_there = [size is not None if is_list else bool(size) for size in sizes]
        if not self.column.is_nullable and not all(is_there):
            raise self._error(
                is_there.index(False), "is missing or empty: declare it nullable in the schema"
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
                    f"array<{SPARK_NAMES.get(leaf, leaf)}> in the schema",
                )
        return values.take(pa.array(ends[1:] - 1, mask=missing))

    def _cast(self) -> pa.Array:
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
            f"holds {shown}, which is no {SPARK_NAMES.get(leaf, leaf)}. Give the column "
            f"{'binary' if self.column.kind is Kind.BYTES else 'bigint'} in the schema",
        )

    def _error(self, record: int, reason: str) -> RecordError:
        return self.chunk.error(record, f"feature {self.column.name!r} {reason}")


def is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _fits(value: int | bytes, leaf: pa.DataType) -> bool:
    if isinstance(value, bytes):
        return is_utf8(value)
    if pa.types.is_boolean(leaf):
        return value in (0, 1)
    limit = 1 << leaf.bit_width - 1
    return bool(-limit <= value < limit)
