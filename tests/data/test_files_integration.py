"""TFRecord files in Spark: what is written is read back, and failures leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from sparkdl.core.errors import ConfigError
from sparkdl.data import infer_schema, read_tfrecords, write_tfrecords
from sparkdl.data.examples import Kind
from tests.data.records import example, write

QUERY = """
    select id, cast(id as int) as small, id % 2 = 0 as flag, cast(id as float) / 4 as part,
        cast(id as double) / 4 as wide, concat('text ', id) as text, cast('ab' as binary) as bytes,
        array(id, -id) as longs, array(cast(id as float), 1F) as `image.pixels`,
        if(id % 3 = 0, null, array('a', concat('b', id))) as texts,
        array(unhex('FF'), unhex('00')) as blobs, cast(array() as array<double>) as empty,
        if(id = 5, null, id) as gap
    from range(0, 100, 1, 3)
"""


def rows(frame: DataFrame) -> list[Row]:
    return sorted(frame.collect(), key=lambda row: row["id"])


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_rows_come_back(spark_local: SparkSession, tmp_path: Path) -> None:
    frame = spark_local.sql(QUERY)
    write_tfrecords(frame, str(tmp_path))
    assert [name.partition("-")[0] for name in files(tmp_path)] == ["_SUCCESS", *["part"] * 3]
    again = read_tfrecords(spark_local, [str(tmp_path)], frame.schema)
    assert rows(again) == rows(frame)


def test_a_folder_without_records_needs_a_schema(spark_local: SparkSession, tmp_path: Path) -> None:
    write_tfrecords(spark_local.range(0), str(tmp_path))
    assert files(tmp_path) == ["_SUCCESS"]
    assert read_tfrecords(spark_local, str(tmp_path), "id bigint").collect() == []
    for schema in ("bad", "bigint", "id bad"):
        with pytest.raises(ConfigError, match=f"'{schema}' is no schema of Spark.*Write it like"):
            read_tfrecords(spark_local, str(tmp_path), schema)
    with pytest.raises(ConfigError, match="no record has a feature"):
        infer_schema(spark_local, str(tmp_path))


def test_types_without_a_place_are_refused_before_anything_is_written(
    spark_local: SparkSession, tmp_path: Path
) -> None:
    frame = spark_local.range(1).selectExpr("now() as now")
    with pytest.raises(ConfigError, match="'now' is timestamp, which a TFRecord cannot hold"):
        write_tfrecords(frame, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_writing_that_fails_leaves_what_was(spark_local: SparkSession, tmp_path: Path) -> None:
    old = write(tmp_path / "old", [example({"id": (Kind.INT64, [1])})])
    before = old.read_bytes()
    bad = spark_local.range(0, 1000, 1, 2).selectExpr("array(id, if(id = 999, null, id)) as x")
    with pytest.raises(Exception, match="'x' has a null within an array"):
        write_tfrecords(bad, str(tmp_path))
    assert files(tmp_path) == ["old"]
    assert old.read_bytes() == before
