"""The columns for features: the types of TFRecords, in Arrow and in Spark."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_schema

from sparkdl.core.errors import ConfigError

NO_PLACE = (
    "which a TFRecord cannot hold. Cast it: decimals to double or string, dates and timestamps to "
    "bigint or string, ML vectors by vector_to_array, structs, maps and arrays of arrays to "
    "columns of their own or to JSON"
)
_LEAVES = (
    *(spark.NumericType, spark.BooleanType, spark.StringType, spark.BinaryType),
    spark.DateType,  # of a folder's name
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
    for field in schema:
        kind = field.dataType
        leaf = kind.elementType if isinstance(kind, spark.ArrayType) else kind
        if isinstance(leaf, spark.DecimalType) or not isinstance(leaf, _LEAVES):
            raise ConfigError(f"column {field.name!r} is {kind.simpleString()}, {NO_PLACE}")
    return to_arrow_schema(schema)
