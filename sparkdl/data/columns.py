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

NO_PLACE = (
    "which a TFRecord cannot hold. Cast it: decimals to double or string, dates and timestamps to "
    "bigint or string, ML vectors by vector_to_array, structs, maps and arrays of arrays to "
    "columns of their own or to JSON"
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
        leaf: the type of a value; `type` is that of the column: of one value, or of a list.
    """

    name: str
    kind: Kind
    leaf: pa.DataType
    type: pa.DataType
    is_nullable: bool

    @property
    def is_list(self) -> bool:
        """Whether the column holds lists of values."""
        return self.leaf is not self.type


def columns_of(schema: pa.Schema) -> tuple[Column, ...]:
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
    return tuple(map(_column, schema))


def _column(field: pa.Field) -> Column:
    leaf = field.type.value_type if pa.types.is_list(field.type) else field.type
    kind = kind_of(leaf)
    if kind is None:
        raise ConfigError(f"column {field.name!r} is {field.type}, {NO_PLACE}")
    return Column(field.name, kind, leaf, field.type, field.nullable)


def kind_of(leaf: pa.DataType) -> Kind | None:
    """Return what values of this type are held as, or None if they cannot be."""
    if pa.types.is_signed_integer(leaf) or pa.types.is_boolean(leaf):
        return Kind.INT64
    if leaf in (pa.float32(), pa.float64()):
        return Kind.FLOAT
    return Kind.BYTES if leaf in (pa.string(), pa.binary()) else None


def list_type(leaf: pa.DataType) -> pa.DataType:
    """Return the type of a column of lists, named as Spark names its parts."""
    return pa.list_(pa.field("element", leaf))


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
