"""Scoring Parquet files past the JVM gives what scoring through Spark gives, or is not done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from sparkdl.core.errors import ConfigError
from sparkdl.ml.scoring.model import TFModel
from tests.ml.conftest import Saved

pytestmark = pytest.mark.tensorflow

ROWS = 600
Frames = Callable[["DataFrame"], "DataFrame"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of several row groups, in folders `part=0` and `part=1`; every 50th `x` is null.

    Columns: `id` (int64), `x` (list of 3 float64: id, 1, 2 * id).
    """
    found = tmp_path_factory.mktemp("scored files")
    for part in range(2):
        numbers = range(part * ROWS // 2, (part + 1) * ROWS // 2)
        x = [None if i % 50 == 0 else [float(i), 1.0, 2.0 * i] for i in numbers]
        inner = found / f"part={part}"
        inner.mkdir()
        table = pa.table({"id": pa.array(numbers, pa.int64()), "x": x})
        pq.write_table(table, inner / "rows.parquet", row_group_size=64)
    return found


@pytest.fixture(autouse=True)
def one_partition(spark_ml: SparkSession) -> Iterator[None]:
    """Have one task read all files, for it is a worker that has loaded TensorFlow."""
    spark_ml.conf.set("spark.sql.files.minPartitionNum", 1)
    yield
    spark_ml.conf.unset("spark.sql.files.minPartitionNum")


def scored(saved: Saved, frame: DataFrame, reader: str, column: str = "x") -> DataFrame:
    stage: Any = TFModel({"export_dir": saved.keras})
    stage = stage.setInputMapping({column: "x"}).setBatchSize(16).setHandleInvalid("keep")
    found: DataFrame = stage.setParquetReader(reader).transform(frame)
    return found


def is_past_the_jvm(frame: DataFrame) -> bool:
    return "row_index" in frame._jdf.queryExecution().optimizedPlan().toString()


@pytest.mark.parametrize(
    "change",
    [
        lambda df: df,
        lambda df: df.where("id % 7 = 3 and id < 500").select("x", "part"),
        lambda df: (
            df.where("part = 1").withColumnRenamed("x", "z").withColumn("id", f.col("id") + 1)
        ),
        lambda df: df.alias("a").select(f.col("a.x").alias("x.y"), "a.id").where("id > 590"),
        lambda df: df.where("id > 10000"),
    ],
    ids=["all", "filtered", "renamed", "aliased", "none"],
)
def test_what_comes_from_files_alone_is_read_by_python(
    spark_ml: SparkSession, saved: Saved, folder: Path, change: Frames
) -> None:
    frame = change(spark_ml.read.parquet(str(folder)))
    column = next(name for name in ("x", "z", "x.y") if name in frame.columns)
    found, expected = (scored(saved, frame, reader, column) for reader in ("auto", "spark"))
    assert is_past_the_jvm(found)
    assert not is_past_the_jvm(expected)
    assert found.schema == expected.schema
    assert sorted(map(str, found.collect())) == sorted(map(str, expected.collect()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda df: df.orderBy("id"), "Sort"),
        (lambda df: df.limit(10), "Limit"),
        (lambda df: df.join(df.select("id"), "id"), "Join"),
        (lambda df: df.withColumn("x", f.transform("x", lambda e: e * 2)), "'x' is computed"),
        (lambda df: df.selectExpr("id", "array(part, part, 1) as x"), "'x' is computed"),
    ],
)
def test_what_is_not_comes_through_spark(
    spark_ml: SparkSession, saved: Saved, folder: Path, change: Frames, reason: str
) -> None:
    frame = change(spark_ml.read.parquet(str(folder)))
    assert not is_past_the_jvm(scored(saved, frame, "auto"))
    with pytest.raises(ConfigError, match=reason):
        scored(saved, frame, "python")


def test_rows_in_the_cache_and_tolerant_settings_are_left_to_spark(
    spark_ml: SparkSession, saved: Saved, folder: Path
) -> None:
    frame = spark_ml.read.parquet(str(folder))
    tolerant = spark_ml.read.option("ignoreMissingFiles", "true").parquet(str(folder))
    with pytest.raises(ConfigError, match="ignoreMissingFiles"):
        scored(saved, tolerant, "python")
    cached = frame.where("id < 100").cache()
    try:
        with pytest.raises(ConfigError, match="InMemoryRelation"):
            scored(saved, cached.select("x"), "python")
        assert is_past_the_jvm(scored(saved, frame, "auto"))
    finally:
        cached.unpersist()


def test_vectors_and_columns_that_some_files_lack(
    spark_ml: SparkSession, saved: Saved, tmp_path: Path
) -> None:
    rows: list[tuple[int, Any]] = [(i, Vectors.dense([i, 1, 2 * i])) for i in range(20)]
    rows += [(20, Vectors.sparse(3, [0], [20.0]))]
    both = spark_ml.createDataFrame(rows, ["id", "x"])
    both.coalesce(1).write.parquet(str(tmp_path / "with"))
    both.select("id").coalesce(1).write.parquet(str(tmp_path / "without"))
    paths = [str(tmp_path / name) for name in ("with", "without")]
    frame = spark_ml.read.schema(both.schema).parquet(*paths)
    found = scored(saved, frame, "python").select("id", "y").collect()
    expected = scored(saved, frame, "spark").select("id", "y").collect()
    assert sorted(map(str, found)) == sorted(map(str, expected))
    assert sum(row.y is None for row in found) == 21
