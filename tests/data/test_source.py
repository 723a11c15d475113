"""The data source without Spark: what Spark asks of it for schemas, for rows, and to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from sparkdl.core.errors import ConfigError
from sparkdl.data import TFRecordDataSource
from sparkdl.data.columns import Kind
from sparkdl.spark_versions import datasource
from tests.data.records import example, write

ONE, TWO = (Kind.INT64, [1]), (Kind.INT64, [1, 2])


def read(folder: Path, schema: pa.Schema | None = None, **options: str) -> list[dict[str, Any]]:
    """Return the rows of a folder, of its own schema or of this one."""
    source = TFRecordDataSource({"path": str(folder), **options})
    reader: Any = source.reader(from_arrow_schema(schema) if schema else source.schema())
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return [row for batch in batches for row in batch.to_pylist()]


def save(folder: Path, batch: pa.RecordBatch, **options: str) -> None:
    source = TFRecordDataSource({"path": str(folder), **options})
    writer: Any = source.writer(from_arrow_schema(batch.schema), overwrite=False)
    writer.commit([writer.write(iter([batch]))])


def test_the_schema_is_inferred_from_all_files(tmp_path: Path) -> None:
    write(tmp_path / "day=1" / "a", [example({"id": ONE, "x": ONE})])
    write(tmp_path / "day=2" / "b", [example({"id": ONE}), example({"id": ONE, "x": TWO})])
    schema = TFRecordDataSource({"path": str(tmp_path)}).schema()
    assert schema.simpleString() == "struct<id:bigint,x:array<bigint>,day:int>"
    wanted = [([1], 1), (None, 2), ([1, 2], 2)]
    assert read(tmp_path) == [{"id": 1, "x": x, "day": day} for x, day in wanted]
    chosen = read(tmp_path, pa.schema([("day", pa.string()), ("id", pa.int16())]))
    assert chosen == [{"day": day, "id": 1} for day in "122"]


def test_a_folder_without_records_needs_a_schema(tmp_path: Path) -> None:
    save(tmp_path, pa.record_batch({"id": pa.array([], pa.int64())}))
    assert [path.name for path in tmp_path.iterdir()] == ["_SUCCESS"]
    assert read(tmp_path, pa.schema([("id", pa.int64())])) == []
    with pytest.raises(ConfigError, match="no record with a feature"):
        read(tmp_path)


def test_a_folder_without_files_has_no_rows_with_any_spark(tmp_path: Path) -> None:
    reader: Any = TFRecordDataSource({"path": str(tmp_path)}).reader(StructType().add("id", "long"))
    assert reader.partitions() == []
    for nothing in (None, datasource.InputPartition(None)):  # Spark 4.0's, and that of later ones
        assert list(reader.read(nothing)) == []


def test_types_without_a_place_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'now' is timestamp, which a TFRecord cannot hold"):
        save(tmp_path / "new", pa.record_batch({"now": pa.nulls(1, pa.timestamp("us", "UTC"))}))
    assert not (tmp_path / "new").exists()
