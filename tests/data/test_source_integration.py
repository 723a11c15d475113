"""The data source in Spark: what is written is read back, and failures leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

import sparkdl.data
from sparkdl.data.columns import Kind
from tests.data.records import example, sequence, write

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
    for number, compression in enumerate(("none", "gzip", "zlib")):
        save(frame.where(f"id % 3 = {number}").coalesce(1), tmp_path, compression=compression)
    suffixes = [name.partition(".")[2] for name in files(tmp_path)]
    assert sorted(suffixes) == ["", "tfrecord", "tfrecord.gz", "tfrecord.zlib"]
    again = reader(spark_local).schema(frame.schema).load(str(tmp_path))
    assert rows(again) == rows(frame)
    assert again.rdd.getNumPartitions() == 3


def test_the_schema_is_inferred_from_all_files(spark_local: SparkSession, tmp_path: Path) -> None:
    one, two = (Kind.INT64, [1]), (Kind.INT64, [1, 2])
    write(tmp_path / "day=1" / "a", [example({"id": one, "x": one})])
    write(tmp_path / "day=2" / "b", [example({"id": one}), example({"id": one, "x": two})])
    frame = reader(spark_local).load(str(tmp_path))
    assert frame.schema.simpleString() == "struct<id:bigint,x:array<bigint>,day:int>"
    assert sorted(map(tuple, frame.collect()), key=str) == [
        (1, None, 2),
        (1, [1, 2], 2),
        (1, [1], 1),
    ]
    assert sparkdl.data.infer_schema(spark_local, str(tmp_path)) == frame.schema
    chosen = reader(spark_local).schema("day string, id smallint").load(str(tmp_path))
    assert sorted(map(tuple, chosen.collect())) == [("1", 1), ("2", 1), ("2", 1)]


def test_sequence_examples_come_back(spark_local: SparkSession, tmp_path: Path) -> None:
    frame = spark_local.sql(
        "select id, array(array(cast(id as float)), array()) as steps, array('a') as names "
        "from range(10)"
    )
    save(frame, tmp_path, recordType="SequenceExample")
    again = reader(spark_local, recordType="SequenceExample").schema(frame.schema)
    assert rows(again.load(str(tmp_path))) == rows(frame)
    write(tmp_path / "more", [sequence({"id": (Kind.INT64, [10])}, {"names": [None]})])
    with pytest.raises(Exception, match="'names' is both a feature of the context"):
        reader(spark_local, recordType="SequenceExample").load(str(tmp_path))


def test_overwriting_replaces_even_what_is_being_read(
    spark_local: SparkSession, tmp_path: Path
) -> None:
    write(tmp_path / "old", [example({"id": (Kind.INT64, [i])}) for i in range(10)])
    old = reader(spark_local).schema("id bigint").load(str(tmp_path))
    save(old.selectExpr("id + 100 as id"), tmp_path, "overwrite")
    again = reader(spark_local).load(str(tmp_path))
    assert rows(again) == [Row(id=i) for i in range(100, 110)]
    assert files(tmp_path)[0] == "_SUCCESS"
    assert all(name == "_SUCCESS" or name.startswith("part-") for name in files(tmp_path))


def test_writing_what_fails_leaves_what_was_there(
    spark_local: SparkSession, tmp_path: Path
) -> None:
    for mode in ("append", "overwrite"):
        check_that_failing_leaves_what_was_there(spark_local, tmp_path / mode, mode)


def check_that_failing_leaves_what_was_there(spark: SparkSession, folder: Path, mode: str) -> None:
    old = write(folder / "old", [example({"id": (Kind.INT64, [1])})])
    before = old.read_bytes()
    bad = spark.range(0, 1000, 1, 2).selectExpr("array(id, if(id = 999, null, id)) as x")
    with pytest.raises(Exception, match="'x' has a null within an array"):
        save(bad, folder, mode)
    assert files(folder) == ["old"]
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


def test_a_folder_without_records_needs_a_schema(spark_local: SparkSession, tmp_path: Path) -> None:
    save(spark_local.range(0), tmp_path)
    assert files(tmp_path) == ["_SUCCESS"]
    assert reader(spark_local).schema("id bigint").load(str(tmp_path)).collect() == []
    with pytest.raises(Exception, match="no record with a feature"):
        reader(spark_local).load(str(tmp_path))


def test_types_without_a_place_are_refused_before_anything_is_written(
    spark_local: SparkSession, tmp_path: Path
) -> None:
    frame = spark_local.sql("select current_timestamp() as now")
    with pytest.raises(Exception, match="'now' is timestamp, which a TFRecord cannot hold"):
        save(frame, tmp_path / "new")
    assert not (tmp_path / "new").exists()
