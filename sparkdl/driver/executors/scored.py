"""A DataFrame with columns of results: their names and types."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
from pyspark.sql import Column, DataFrame, functions
from pyspark.sql.types import DataType, StructField, StructType

from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.sessions import is_true
from sparkdl.feed.transfer.infer_task import InferColumns
from sparkdl.feed.transfer.messages import FeedSpec
from sparkdl.spark_versions import arrow_schema_of, declared_type

Keep = bool | Sequence[str]

_NEEDS_SCHEMA = (
    "a DataFrame of results needs schema=, which declares their columns. Write "
    "schema='prediction double' if map_fun answers a row with a number, schema='prediction "
    "array<float>' if with a list or an array of numbers, schema='label long, score double' if "
    "with a tuple, Row or dict of two values. cluster.infer(df.rdd).first() shows a result"
)


def scored(frame: DataFrame, spec: FeedSpec, schema: str | StructType | None) -> DataFrame:
    """Return `frame` with columns of results; lazy, no job runs."""
    if schema is None:
        raise ConfigError(_NEEDS_SCHEMA)
    columns = distinct_columns(frame)
    results = result_schema(schema)
    check_names(columns, results.names, is_exact=tells_cases(frame))
    task = InferColumns(spec, columns, arrow_schema(results))
    return by_position(frame).mapInArrow(task, StructType([*frame.schema.fields, *results.fields]))


def tells_cases(frame: DataFrame) -> bool:
    """Whether `x` and `X` are two names to the DataFrame's session."""
    return is_true(frame.sparkSession.conf.get("spark.sql.caseSensitive"))


def distinct_columns(frame: DataFrame) -> tuple[str, ...]:
    """Return the names of a DataFrame's columns."""
    columns = tuple(frame.columns)
    check_distinct(columns, columns)
    return columns


def check_distinct(columns: Sequence[str], names: Iterable[str], is_exact: bool = True) -> None:
    """Check that each of `names` stands for one column; `is_exact` tells `x` from `X`."""
    folded = str if is_exact else str.lower
    counts = Counter(map(folded, columns))
    if several := [name for name in dict.fromkeys(names) if counts[folded(name)] > 1]:
        raise ConfigError(
            f"the DataFrame has several columns {', '.join(map(repr, several))}; its columns are "
            f"{', '.join(columns)}. Give each its own name: df.toDF(name, …) by position, "
            "df.drop(other['x']) after a join, or join with on='x'"
        )


def kept_columns(columns: Sequence[str], keep: Keep) -> tuple[int, ...]:
    """Return the places of the columns to keep."""
    if isinstance(keep, bool):
        return tuple(range(len(columns))) if keep else ()
    if isinstance(keep, str):
        raise ConfigError(f"keep={keep!r} must be True, False or a list: keep=[{keep!r}]")
    unknown = [name for name in keep if name not in columns]
    if unknown:
        raise ConfigError(
            f"keep={list(keep)} names {', '.join(map(repr, unknown))}: must name columns of the "
            f"DataFrame, which are {', '.join(columns)}"
        )
    check_distinct(columns, keep)
    return tuple(columns.index(name) for name in keep)


def check_names(
    kept: Sequence[str],
    results: Sequence[str],
    named_by: Callable[[str], str] = lambda _: "schema",
    is_exact: bool = False,
) -> None:
    """Check that no two columns of the result have one name; `named_by` is its parameter."""
    check_distinct(kept, kept, is_exact)
    folded = str if is_exact else str.lower
    counts = Counter(map(folded, (*kept, *results)))
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        named = dict.fromkeys(named_by(name) for name in results if folded(name) in twice)
        raise ConfigError(
            f"the result would have two columns {', '.join(map(repr, twice))}: the DataFrame's "
            f"({', '.join(kept)}) and the results' ({', '.join(results)}). Rename the results with "
            f"{', '.join(f'{name}=' for name in named)}, rename the DataFrame's column "
            "(withColumnRenamed), or leave it out (df.drop)"
        )


def result_schema(schema: str | StructType | DataType) -> StructType:
    """Return the columns that `schema` declares; a type alone declares one, `prediction`."""
    failed, example = f"schema={schema!r} is no schema of Spark", "'prediction float, label string'"
    kind = declared_type(schema, failed, example) if isinstance(schema, str) else schema
    if not isinstance(kind, DataType):
        raise ConfigError(f"schema={schema!r} must be text like 'prediction float' or a StructType")
    found = kind if isinstance(kind, StructType) else StructType([StructField("prediction", kind)])
    if not found.fields:
        raise ConfigError(
            f"schema={schema!r} declares no column: name at least one, like 'prediction float'"
        )
    arrow_schema(found)
    return found


def column(name: str) -> Column:
    return functions.col(f"`{name.replace('`', '``')}`")


def by_position(frame: DataFrame) -> DataFrame:
    """Rename the columns: mapInArrow finds none with a dot in its name, and no two of one name."""
    return frame.toDF(*(f"c{index}" for index in range(len(frame.columns))))


def addressed(frame: DataFrame) -> tuple[DataFrame, list[str]]:
    """Return a DataFrame, and names by which Spark finds its columns, in their order.

    They are the columns' own where that is safe: of wide tables each name takes Spark a while.
    """
    names = frame.columns
    is_safe = len({name.lower() for name in names}) == len(names)
    if is_safe and all(re.fullmatch(r"\w+", name) for name in names):
        return frame, names
    return by_position(frame), [f"c{index}" for index in range(len(names))]


def arrow_schema(schema: StructType, zone: str = "UTC") -> pa.Schema:
    """Return Arrow's schema for columns of results."""
    try:
        return arrow_schema_of(schema, zone)
    except Exception as error:  # noqa: BLE001 (pyspark raises several, by version)
        raise ConfigError(
            f"results cannot have the types {schema.simpleString()}: {error}. Give numbers, texts, "
            "bytes, or arrays or structs of them"
        ) from None
