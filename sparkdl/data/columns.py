"""The columns for features: the types of TFRecords, in Arrow and in Spark.

Runs in: driver, feeder
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import types as spark

from sparkdl.core.errors import ConfigError

EXAMPLE = "Example"
SEQUENCE_EXAMPLE = "SequenceExample"
RECORD_TYPES = (EXAMPLE, SEQUENCE_EXAMPLE)

NO_PLACE = (
    "which a TFRecord cannot hold. Cast it: decimals to double or string, dates and timestamps to "
    "bigint or string, ML vectors by vector_to_array, structs and maps to columns of their own or "
    "to JSON"
)
_TYPES: tuple[tuple[spark.DataType, pa.DataType], ...] = (
    (spark.BooleanType(), pa.bool_()),
    (spark.ByteType(), pa.int8()),
    (spark.ShortType(), pa.int16()),
    (spark.IntegerType(), pa.int32()),
    (spark.LongType(), pa.int64()),
    (spark.FloatType(), pa.float32()),
    (spark.DoubleType(), pa.float64()),
    (spark.StringType(), pa.string()),
    (spark.BinaryType(), pa.binary()),
    (spark.DateType(), pa.date32()),
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
        depth: 0 for one value, 1 for a list of values, 2 for a feature list: a list of lists.
        leaf: the type of a value; `type` is that of the column.
    """

    name: str
    kind: Kind
    depth: int
    leaf: pa.DataType
    type: pa.DataType
    is_nullable: bool


def columns_of(schema: pa.Schema, record_type: str) -> tuple[Column, ...]:
    """Return what each column is written as and read from.

    Raises:
        ConfigError: for a type that such records cannot hold, or a duplicate name.
    """
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise ConfigError(
            f"column {twice[0]!r} is there twice, and a record holds each name once. Rename one "
            "of them"
        )
    return tuple(_column(field, record_type) for field in schema)


def _column(field: pa.Field, record_type: str) -> Column:
    depth, leaf = 0, field.type
    while pa.types.is_list(leaf):
        depth, leaf = depth + 1, leaf.value_type
    kind = kind_of(leaf)
    if kind is None or depth > 2:
        raise ConfigError(f"column {field.name!r} is {field.type}, {NO_PLACE}")
    if depth == 2 and record_type != SEQUENCE_EXAMPLE:
        raise ConfigError(
            f"column {field.name!r} is {field.type}, an array of arrays: an Example has no place "
            f"for it. Use the option recordType={SEQUENCE_EXAMPLE}, or flatten it"
        )
    return Column(field.name, kind, depth, leaf, field.type, field.nullable)


def kind_of(leaf: pa.DataType) -> Kind | None:
    """Return what values of this type are held as, or None if they cannot be."""
    if pa.types.is_signed_integer(leaf) or pa.types.is_boolean(leaf):
        return Kind.INT64
    if leaf in (pa.float32(), pa.float64()):
        return Kind.FLOAT
    return Kind.BYTES if leaf in (pa.string(), pa.binary()) else None


def list_type(leaf: pa.DataType, depth: int) -> pa.DataType:
    """Return the type of a column of that depth, named as Spark names its parts."""
    for _ in range(depth):
        leaf = pa.list_(pa.field("element", leaf))
    return leaf


def arrow_schema(schema: spark.StructType) -> pa.Schema:
    """Return the schema of the Arrow batches that Spark takes and gives for rows of `schema`.

    Raises:
        ConfigError: for a type that no TFRecord and no folder's name can hold.
    """
    return pa.schema(
        [pa.field(each.name, _arrow(each.dataType, each.name), each.nullable) for each in schema]
    )


def _arrow(kind: spark.DataType, name: str) -> pa.DataType:
    if isinstance(kind, spark.ArrayType):
        return pa.list_(pa.field("element", _arrow(kind.elementType, name), kind.containsNull))
    for ours, theirs in _TYPES:
        if type(kind) is type(ours):
            return theirs
    raise ConfigError(f"column {name!r} is {kind.simpleString()}, {NO_PLACE}")
