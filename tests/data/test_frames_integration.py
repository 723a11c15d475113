"""TFRecords without a data source, as Spark 3.5 needs it: what is written is read back."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from sparkdl.data import read_tfrecords, write_tfrecords

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
