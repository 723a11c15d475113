"""The data source in Spark: what is written is read back, and failures leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

import sparkdl.data
from sparkdl.data.columns import Kind
from tests.data.records import example, write

pytestmark = pytest.mark.skipif(
    not hasattr(SparkSession, "dataSource"), reason="Spark 3.5 has no data sources in Python"
)
QUERY = """
    select id, cast(id as int) as small, id % 2 = 0 as flag, cast(id as float) / 4 as part,
        cast(id as double) / 4 as wide, concat('text ', id) as text, cast('ab' as binary) as bytes,
        array(id, -id) as longs, array(cast(id as float)) as floats,
        if(id % 3 = 0, null, array('a', concat('b', id))) as texts,
        array(unhex('FF'), unhex('00')) as blobs, cast(array() as array<double>) as empty,
        if(id = 5, null, id) as gap
    from range(100)
"""


def reader(spark: SparkSession, **options: str) -> Any:
    spark.dataSource.register(sparkdl.data.TFRecordDataSource)
    return spark.read.format("tfrecord").options(**options)


def save(frame: DataFrame, folder: Path, mode: str = "append", **options: str) -> None:
    frame.sparkSession.dataSource.register(sparkdl.data.TFRecordDataSource)
    frame.write.format("tfrecord").options(**options).mode(mode).save(str(folder))


def rows(frame: DataFrame, by: str = "id") -> list[Row]:
    return sorted(frame.collect(), key=lambda row: row[by])


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_rows_of_files_of_any_compression_come_back_with_their_schema(
    spark_local: SparkSession, tmp_path: Path
) -> None:
    frame = spark_local.sql(QUERY)
    for number, compression in enumerate(("none", "gzip", "auto")):
        save(frame.where(f"id % 3 = {number}").coalesce(1), tmp_path, compression=compression)
    suffixes = [name.partition(".")[2] for name in files(tmp_path)]
    assert sorted(suffixes) == ["", "tfrecord", "tfrecord", "tfrecord.gz"]
    again = reader(spark_local).schema(frame.schema).load(str(tmp_path))
    assert rows(again) == rows(frame)
    assert again.rdd.getNumPartitions() == 3


def test_overwriting_replaces_even_what_is_being_read(
    spark_local: SparkSession, tmp_path: Path
) -> None:
    write(tmp_path / "old", [example({"id": (Kind.INT64, [i])}) for i in range(10)])
    old = reader(spark_local).schema("id bigint").load(str(tmp_path))
    save(old.selectExpr("id + 100 as id"), tmp_path, "overwrite")
    again = reader(spark_local).load(str(tmp_path))
    assert rows(again) == [Row(id=i) for i in range(100, 110)]
    assert sparkdl.data.infer_schema(spark_local, str(tmp_path)) == again.schema
    assert files(tmp_path)[0] == "_SUCCESS"
    assert all(name == "_SUCCESS" or name.startswith("part-") for name in files(tmp_path))


def test_writing_what_fails_leaves_what_was_there(
    spark_local: SparkSession, tmp_path: Path
) -> None:
    old = write(tmp_path / "old", [example({"id": (Kind.INT64, [1])})])
    before = old.read_bytes()
    bad = spark_local.range(0, 1000, 1, 2).selectExpr("array(id, if(id = 999, null, id)) as x")
    with pytest.raises(Exception, match="'x' has a null within an array"):
        save(bad, tmp_path, "overwrite")
    assert files(tmp_path) == ["old"]
    assert old.read_bytes() == before


def test_a_damaged_file_is_named_with_the_place(spark_local: SparkSession, tmp_path: Path) -> None:
    record = example({"id": (Kind.INT64, [1])})
    path = write(tmp_path / "a", [record] * 3)
    data = bytearray(path.read_bytes())
    data[-6] ^= 1
    path.write_bytes(data)
    frame = reader(spark_local).schema("id bigint").load(str(tmp_path))
    with pytest.raises(Exception, match=f"RecordError: {path}, byte {2 * (len(record) + 16)}: "):
        frame.collect()
