"""TFRecords without a data source, as Spark 3.5 needs it: what is written is read back."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from sparkdl.core.errors import ConfigError
from sparkdl.data import read_tfrecords, write_tfrecords
from sparkdl.data.columns import Kind
from tests.data.records import example, write

QUERY = "select id, array(cast(id as float), 1F) as `image.pixels`, concat('é', id) as text"


def test_what_is_written_is_read_with_its_schema(spark_local: SparkSession, tmp_path: Path) -> None:
    frame = spark_local.sql(f"{QUERY} from range(0, 20, 1, 3)")
    folder = str(tmp_path / "train")
    write_tfrecords(frame, folder, compression="gzip")
    assert len([*(tmp_path / "train").glob("part-*.tfrecord.gz")]) == 3
    again = read_tfrecords(spark_local, folder)
    assert again.schema.simpleString() == frame.schema.simpleString()
    assert sorted(again.collect()) == sorted(frame.collect())

    write_tfrecords(again.where("id < 5"), folder, "overwrite")
    few = read_tfrecords(spark_local, [folder], "id bigint")
    assert sorted(row.id for row in few.collect()) == [0, 1, 2, 3, 4]


def test_an_empty_folder_has_no_rows(spark_local: SparkSession, tmp_path: Path) -> None:
    assert read_tfrecords(spark_local, str(tmp_path), "id bigint").collect() == []
    with pytest.raises(ConfigError, match="there is no record"):
        read_tfrecords(spark_local, str(tmp_path))


def test_writing_what_fails_leaves_what_was_there(
    spark_local: SparkSession, tmp_path: Path
) -> None:
    before = write(tmp_path / "old", [example({"id": (Kind.INT64, [1])})]).read_bytes()
    bad = spark_local.sql("select array(id, if(id = 9, null, id)) as x from range(0, 10, 1, 2)")
    with pytest.raises(Exception, match="'x' has a null within an array"):
        write_tfrecords(bad, str(tmp_path), "overwrite")
    with pytest.raises(ConfigError, match=r"mode='error' must be 'append' or 'overwrite'"):
        write_tfrecords(bad, str(tmp_path), "error")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_bytes() == before
