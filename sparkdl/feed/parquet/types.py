"""What a Parquet column looks like once it is read: as Spark's `mapInArrow` would give it.

Runs in: driver, agent
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

INT96_UNIT = "s"
"""Schemas are read with INT96 in seconds: no other timestamp of a Parquet file has this unit."""


def spark_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that columns of `kind` are given.

    ========================================  ================================================
    timestamp with a time zone, INT96         timestamp[us, UTC]
    timestamp without                         timestamp[us]; digits past microseconds are cut
    dictionary                                its values' type
    large or view string, binary              string, binary
    lists of any kind                         list<element>
    decimals of up to 38 digits               decimal128
    date64; fixed-size binary                 date32; binary
    extension types                           their storage
    others, unsigned integers among them      unchanged
    ========================================  ================================================

    Elements, fields and values are nullable at any depth, as Spark reads all files.
    """
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return spark_type(kind.storage_type)
    if types.is_dictionary(kind):
        return spark_type(kind.value_type)
    if types.is_timestamp(kind):
        is_instant = kind.tz is not None or kind.unit == INT96_UNIT
        return pa.timestamp("us", "UTC" if is_instant else None)
    if types.is_map(kind):
        return pa.map_(spark_type(kind.key_type), spark_type(kind.item_type))
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, spark_type(field.type)) for field in kind])
    if types.is_nested(kind) and hasattr(kind, "value_type"):
        return pa.list_(pa.field("element", spark_type(kind.value_type)))
    if types.is_decimal(kind) and kind.precision <= 38:
        return pa.decimal128(kind.precision, kind.scale)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    is_binary = types.is_large_binary(kind) or types.is_binary_view(kind)
    if is_binary or types.is_fixed_size_binary(kind):
        return pa.binary()
    return pa.date32() if types.is_date64(kind) else kind


def spark_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of what is read from a file of `schema`, without metadata."""
    return pa.schema([pa.field(field.name, spark_type(field.type)) for field in schema])


def convert(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return `column` as `kind`, its `spark_type`; without a copy where only names differ.

    Raises:
        pyarrow.ArrowInvalid: if a value does not fit.
        pyarrow.ArrowNotImplementedError: if the file has another type than was expected.
    """
    if column.type.equals(kind):
        return column
    return pc.cast(column, options=pc.CastOptions(kind, allow_time_truncate=True))


def has_text(kind: pa.DataType) -> bool:
    """Return whether values of `kind` hold strings or bytes, whose decoded size is not known."""
    if pa.types.is_nested(kind):
        return any(has_text(kind.field(i).type) for i in range(kind.num_fields))
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))
