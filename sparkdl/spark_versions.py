"""The differences between the supported versions of pyspark: 3.5, and 4.0 to 4.x.

Runs in: driver, feeder

Each function here behaves on all of them as on the newest. `docs/deployment.md` lists the
features that are slower or missing on older versions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyspark
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, Row, types as t
from pyspark.sql.pandas.types import to_arrow_schema

from sparkdl.core.errors import ConfigError

IS_SPARK_3 = pyspark.__version__.startswith("3.")


def declared_type(text: str, failed: str, example: str) -> t.DataType:
    """Return the type that `text` declares; `failed` and `example` make the error."""
    try:
        return t._parse_datatype_string(text) if IS_SPARK_3 else t.DataType.fromDDL(text)
    except Exception as error:  # noqa: BLE001 (Spark's parser raises several, Connect others)
        reason = next(iter(str(error).strip().splitlines()), "")
        raise ConfigError(f"{failed}: {reason}. Write it like {example}") from None


def collect_in_arrow(
    frame: DataFrame, task: Callable[..., Any], schema: str, profile: ResourceProfile | None
) -> list[Row]:
    """Return the rows that `task` makes of each partition, with the resources of `profile`."""
    # `mapInArrow` has no `profile` before Spark 4.
    if profile and IS_SPARK_3:
        return frame.mapInArrow(task, schema).rdd.withResources(profile).collect()
    more: dict[str, Any] = {"profile": profile} if profile else {}
    return frame.mapInArrow(task, schema, **more).collect()


def arrow_schema_of(schema: t.StructType, zone: str) -> pa.Schema:
    """Return the schema of the batches that `mapInArrow` is given in sessions of this time zone."""
    try:
        return to_arrow_schema(schema, timezone=zone)
    except TypeError:  # before Spark 4.2 pyspark says UTC, although the JVM sends the zone
        return pa.schema([_field(each, zone) for each in to_arrow_schema(schema)])


def _in_zone(kind: pa.DataType, zone: str) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.tz:
        return pa.timestamp(kind.unit, zone)
    if pa.types.is_map(kind):
        return pa.map_(_field(kind.key_field, zone), _field(kind.item_field, zone))
    if pa.types.is_list(kind):
        return pa.list_(_field(kind.value_field, zone))
    if pa.types.is_struct(kind):
        return pa.struct([_field(each, zone) for each in kind])
    return kind


def _field(field: pa.Field, zone: str) -> pa.Field:
    return field.with_type(_in_zone(field.type, zone))
