"""A DataFrame with columns of results: which columns there are, and of what types.

Runs in: driver
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as spark_types
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DataType, StructField, StructType

from sparkdl.core.errors import ConfigError
from sparkdl.feed.infer.task import RESULT_SCHEMA, InferColumns, InferRows, decode_results
from sparkdl.feed.transfer.messages import FeedSpec
from sparkdl.feed.values.encode import row_fields

Keep = bool | Sequence[str]

ONLY = "prediction"
"""What a single column of results is called if nothing else is said."""
SAMPLE_ROWS = 8
"""How many rows are answered to find out the results' types."""
_GIVE_SCHEMA = "Give schema=, for example schema='prediction float'"

_BY_TYPE: dict[type, DataType] = {
    bool: spark_types.BooleanType(),
    int: spark_types.LongType(),
    float: spark_types.DoubleType(),
    str: spark_types.StringType(),
    bytes: spark_types.BinaryType(),
    bytearray: spark_types.BinaryType(),
    date: spark_types.DateType(),
    datetime: spark_types.TimestampType(),
    timedelta: spark_types.DayTimeIntervalType(),
    Decimal: spark_types.DecimalType(38, 18),
}
BY_DTYPE: dict[str, DataType] = {
    "b1": spark_types.BooleanType(),
    "i1": spark_types.ByteType(),
    "i2": spark_types.ShortType(),
    "i4": spark_types.IntegerType(),
    "i8": spark_types.LongType(),
    "u1": spark_types.ShortType(),
    "u2": spark_types.IntegerType(),
    "u4": spark_types.LongType(),
    "f2": spark_types.FloatType(),
    "f4": spark_types.FloatType(),
    "f8": spark_types.DoubleType(),
}
"""Spark's types for numpy's, by `dtype.str` without the byte order."""


def scored(
    frame: DataFrame, spec: FeedSpec, schema: str | StructType | None, keep: Keep
) -> DataFrame:
    """Return `frame` with columns of results; lazy, but for a few rows where `schema` is None.

    Raises:
        ConfigError: if `schema` or `keep` cannot work; nothing was started.
    """
    kept = kept_columns(frame.columns, keep)
    results = result_schema(schema) if schema is not None else _sampled(frame, spec)
    check_names([frame.columns[place] for place in kept], results.names)
    task = InferColumns(spec, tuple(frame.columns), kept, arrow_schema(results))
    fields = [*(frame.schema.fields[place] for place in kept), *results.fields]
    return by_place(frame).mapInArrow(task, StructType(fields))


def encoded(frame: DataFrame, spec: FeedSpec) -> DataFrame:
    """Return the results alone, lazily: Arrow IPC streams in a column `ipc`."""
    return by_place(frame).mapInArrow(InferRows(spec, tuple(frame.columns)), RESULT_SCHEMA)


def kept_columns(columns: Sequence[str], keep: Keep) -> tuple[int, ...]:
    """Return the places of the columns to keep.

    Raises:
        ConfigError: if a name in `keep` is unknown.
    """
    if isinstance(keep, bool):
        return tuple(range(len(columns))) if keep else ()
    if isinstance(keep, str):
        raise ConfigError(f"keep={keep!r} must be True, False or a list: keep=[{keep!r}]")
    unknown = [name for name in keep if name not in columns]
    if unknown:
        raise ConfigError(
            f"keep={list(keep)} names {', '.join(map(repr, unknown))}, and the DataFrame's columns "
            f"are {', '.join(columns)}"
        )
    return tuple(columns.index(name) for name in keep)


def check_names(
    kept: Sequence[str], results: Sequence[str], named_by: Callable[[str], str] = lambda _: "schema"
) -> None:
    """Check that no two columns of the result have one name, in any case.

    Args:
        named_by: from a result's column to the parameter that names it.

    Raises:
        ConfigError: if they have; it says what to rename.
    """
    counts = Counter(name.lower() for name in (*kept, *results))
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        named = dict.fromkeys(named_by(name) for name in results if name.lower() in twice)
        raise ConfigError(
            f"the result would have two columns {', '.join(map(repr, twice))}: the DataFrame's "
            f"({', '.join(kept)}) and the results' ({', '.join(results)}). Name the results "
            f"otherwise with {', '.join(f'{name}=' for name in named)}, rename the DataFrame's "
            "column (withColumnRenamed), or leave it out with keep=[...]"
        )


def plain_row(result: Any) -> Any:
    """Return a result with Python's own values for numpy's, as `createDataFrame` wants them."""
    if isinstance(result, np.ndarray | np.generic):
        return result.tolist()
    if isinstance(result, dict):
        return {key: plain_row(value) for key, value in result.items()}
    if isinstance(result, list):
        return [plain_row(value) for value in result]
    if type(result) is tuple:
        return tuple(plain_row(value) for value in result)
    return result


def one_column(result: Any) -> Any:
    """Return a result as a row of one column, if it is none."""
    return plain_row(result if isinstance(result, tuple | dict) else (result,))


def result_schema(schema: str | StructType | DataType, only: str = ONLY) -> StructType:
    """Return the columns that `schema` declares; a type alone declares one, called `only`.

    Raises:
        ConfigError: if it cannot be read, or has types that Arrow has not.
    """
    try:
        kind = DataType.fromDDL(schema) if isinstance(schema, str) else schema
    except Exception as error:  # noqa: BLE001 (Spark's parser raises several, Connect others)
        reason = next(iter(str(error).strip().splitlines()), "")
        raise ConfigError(f"schema={schema!r} is no schema of Spark: {reason}") from None
    if not isinstance(kind, DataType):
        raise ConfigError(f"schema={schema!r} must be text like 'prediction float' or a StructType")
    found = kind if isinstance(kind, StructType) else StructType([StructField(only, kind)])
    if not found.fields:
        raise ConfigError(f"schema={schema!r} declares no column")
    arrow_schema(found)
    return found


def schema_of(results: Sequence[Any]) -> StructType:
    """Return the columns that results make.

    =====================  =======================================================
    Row, dict              its fields
    tuple                  `_1`, `_2`, ...; of a named tuple its fields
    list, numpy array      one column `prediction`: an array
    anything else          one column `prediction`
    =====================  =======================================================

    Raises:
        ConfigError: if they are of no one kind, or of types that Spark has not.
    """
    layouts = {_names(result) for result in results}
    if len(layouts) != 1:
        raise ConfigError(f"the results of map_fun are not all of one kind. {_GIVE_SCHEMA}")
    names = layouts.pop()
    if not names:
        return StructType([StructField(ONLY, _type_of(results, ONLY))])
    rows = [list(r.values()) if isinstance(r, dict) else r for r in results]
    columns = zip(names, zip(*rows, strict=True), strict=True)
    return StructType([StructField(name, _type_of(values, name)) for name, values in columns])


def _names(result: Any) -> tuple[str, ...]:
    if isinstance(result, dict) and all(isinstance(key, str) for key in result):
        return tuple(result)
    if not isinstance(result, tuple):
        return ()
    named = row_fields(result) or getattr(result, "_fields", None)
    return named or tuple(f"_{place}" for place in range(1, len(result) + 1))


def _sampled(frame: DataFrame, spec: FeedSpec) -> StructType:
    rows = encoded(frame.limit(SAMPLE_ROWS), spec).collect()
    results = [result for row in rows for result in decode_results(bytes(row.ipc))]
    if not results:
        raise ConfigError(f"the DataFrame has no rows to tell the results' types. {_GIVE_SCHEMA}")
    found = schema_of(results)
    arrow_schema(found)
    return found


def _type_of(values: Sequence[Any], where: str) -> DataType:
    told = [value for value in values if value is not None and not _is_empty(value)]
    kinds = {kind.json(): kind for kind in (_one_type(value, where) for value in told)}
    if kinds.keys() == {'"long"', '"double"'}:
        return spark_types.DoubleType()
    if len(kinds) == 1:
        return next(iter(kinds.values()))
    found = ", ".join(kind.simpleString() for kind in kinds.values()) or "None or empty"
    raise ConfigError(f"the type of the results' {where!r} cannot be told: {found}. {_GIVE_SCHEMA}")


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | dict) and not value


def _one_type(value: Any, where: str) -> DataType:
    kind = type(value)
    if kind in _BY_TYPE:
        return _BY_TYPE[kind]
    if isinstance(value, np.str_ | np.bytes_):
        return _BY_TYPE[str if isinstance(value, np.str_) else bytes]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.str[1:] in BY_DTYPE:
        found = BY_DTYPE[value.dtype.str[1:]]
        for _ in range(value.ndim):
            found = spark_types.ArrayType(found)
        return found
    udt: DataType | None = getattr(value, "__UDT__", None)
    if udt is not None and kind.__name__ in ("DenseVector", "SparseVector"):
        return udt
    if isinstance(value, tuple):
        parts = zip(_names(value), value, strict=True)
        return StructType([StructField(n, _type_of([v], f"{where}.{n}")) for n, v in parts])
    if isinstance(value, list) and value:
        return spark_types.ArrayType(_type_of(value, f"{where}[]"))
    if isinstance(value, dict) and value:
        key, item = _type_of(list(value), f"{where} keys"), _type_of(list(value.values()), where)
        return spark_types.MapType(key, item)
    raise ConfigError(
        f"{where!r} of the results is a {kind.__module__}.{kind.__name__}, for which Spark has no "
        "type. Convert it in map_fun"
    )


def by_place(frame: DataFrame) -> DataFrame:
    """Rename the columns: mapInArrow finds none with a dot in its name, and no two of one name."""
    return frame.toDF(*(f"c{place}" for place in range(len(frame.columns))))


def arrow_schema(schema: StructType, zone: str = "UTC") -> pa.Schema:
    """Return Arrow's schema for columns of results.

    Args:
        zone: of timestamps; Spark 4.0 and 4.1 take UTC.

    Raises:
        ConfigError: if they have types that Arrow has not.
    """
    try:
        try:
            found = to_arrow_schema(schema, timezone=zone)
        except TypeError:  # Spark 4.0 and 4.1 take UTC without being told
            found = to_arrow_schema(schema)
    except Exception as error:  # noqa: BLE001 (pyspark raises several, by version)
        raise ConfigError(
            f"results cannot have the types {schema.simpleString()}: {error}"
        ) from None
    assert isinstance(found, pa.Schema)
    return found
