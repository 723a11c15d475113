"""What one version of pyspark does is what the newest does."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import types as t

from sparkdl.spark_versions import _in_zone, arrow_schema_of


def _types(zone: str) -> dict[str, pa.DataType]:
    when = pa.timestamp("us", zone)
    field = pa.field("element", when)
    return {
        "when": when,
        "naive": pa.timestamp("us"),
        "times": pa.list_(field),
        "by": pa.map_(pa.field("key", pa.string(), nullable=False), pa.field("value", when)),
        "part": pa.struct([pa.field("at", when, nullable=False), pa.field("n", pa.int32())]),
    }


@pytest.mark.parametrize("name", [*_types("UTC")])
def test_time_zone_of_pyspark_before_4_2_becomes_the_sessions(name: str) -> None:
    assert str(_in_zone(_types("UTC")[name], "Asia/Tokyo")) == str(_types("Asia/Tokyo")[name])


def test_schema_has_the_zone_of_the_session() -> None:
    at = t.StructType().add("at", t.TimestampType(), nullable=False).add("n", t.IntegerType())
    schema = t.StructType().add("when", t.TimestampType()).add("naive", t.TimestampNTZType())
    schema = schema.add("times", t.ArrayType(t.TimestampType()))
    schema = schema.add("by", t.MapType(t.StringType(), t.TimestampType())).add("part", at)
    assert arrow_schema_of(schema, "Asia/Tokyo") == pa.schema(_types("Asia/Tokyo"))
