"""Nodes read the files of a DataFrame only where they read what Spark gives, and then just that."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as f

from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.parquet_scan import scanned_files
from sparkdl.driver.executors.scored import by_position
from sparkdl.storage.parquet.read import read_share

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Change = Callable[["DataFrame"], "DataFrame"]


@pytest.fixture(autouse=True)
def few_tasks(spark_local: SparkSession) -> Iterator[None]:
    spark_local.conf.set("spark.sql.files.minPartitionNum", "1")
    yield
    spark_local.conf.unset("spark.sql.files.minPartitionNum")


def by_spark(frame: DataFrame) -> pa.Table:
    def written(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as out:
                out.write_batch(batch)
            yield pa.RecordBatch.from_pydict({"ipc": [sink.getvalue().to_pybytes()]})

    rows = by_position(frame).mapInArrow(written, "ipc binary").collect()
    parts = [pa.ipc.open_stream(bytes(row.ipc)).read_all() for row in rows]
    return pa.concat_tables(parts).rename_columns(frame.columns) if parts else pa.table({})


def by_nodes(frame: DataFrame, nodes: int = 3) -> pa.Table:
    source = scanned_files(frame, is_local=True)
    batches = [batch for share in source.shares(nodes) for batch in read_share(share)]
    return pa.Table.from_batches(batches, source.schema)


def exact(value: Any) -> Any:
    """Return a value so that equal ones are the same: every NaN one, and minus zero not zero."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value.hex()
    if isinstance(value, list):
        return [exact(each) for each in value]
    if isinstance(value, dict):
        return {name: exact(each) for name, each in value.items()}
    return value


def rows_of(table: pa.Table) -> list[str]:
    return sorted(repr(exact(row)) for row in table.to_pylist())


def assert_same(frame: DataFrame) -> pa.Table:
    """Assert that nodes read what Spark gives: names, types, values; return it."""
    theirs = by_spark(frame)
    if not theirs.num_rows:
        with pytest.raises(ConfigError, match=r"no rows|no files"):
            by_nodes(frame)
        return theirs
    ours = by_nodes(frame)
    assert ours.schema.names == theirs.schema.names
    assert ours.schema.types == theirs.schema.types
    for name, mine, other in zip(ours.schema.names, ours.columns, theirs.columns, strict=True):
        assert rows_of(pa.table([mine], [name])) == rows_of(pa.table([other], [name]))
    assert rows_of(ours) == rows_of(theirs)
    return ours


TEXTS = st.lists(st.none() | st.text("ab", max_size=2), max_size=2)
SMALL = st.lists(st.integers(0, 9), max_size=2)
FLOATS = st.floats(width=32)
DOUBLES = st.floats() | st.sampled_from([-0.0, 0.0, 1e300, -1e39, 5e-324, 3.4028235677973366e38])
SCALARS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "bool": (pa.bool_(), st.booleans()),
    "int8": (pa.int8(), st.integers(-(2**7), 2**7 - 1)),
    "int16": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "int32": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float": (pa.float32(), FLOATS),
    "double": (pa.float64(), DOUBLES),
    "small": (pa.decimal128(7, 2), st.decimals(-99999, 99999, places=2)),
    "large": (pa.decimal128(38, 6), st.decimals(Decimal(-10) ** 31, Decimal(10) ** 31, places=6)),
    "text": (pa.string(), st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
    "bytes": (pa.binary(), st.binary(max_size=5)),
    "fixed": (pa.binary(3), st.binary(min_size=3, max_size=3)),
}
NESTED: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "doubles": (pa.list_(pa.float64()), st.lists(st.none() | DOUBLES, max_size=3)),
    "pair": (pa.list_(pa.float32(), 2), st.tuples(st.none() | FLOATS, FLOATS).map(list)),
    "deep": (pa.list_(pa.list_(pa.string())), st.lists(st.none() | TEXTS, max_size=3)),
    "part": (
        pa.struct([("a", pa.int64()), ("b", pa.struct([("c.d", pa.list_(pa.int16()))]))]),
        st.fixed_dictionaries(
            {
                "a": st.none() | st.integers(-9, 9),
                "b": st.none() | st.fixed_dictionaries({"c.d": st.none() | SMALL}),
            }
        ),
    ),
}
if int(pa.__version__.partition(".")[0]) < 26:
    del NESTED["pair"]  # null lists of a fixed size are an error there: apache/arrow#35692
COLUMNS = {**SCALARS, **NESTED}
SELECTED = ["`text` as `bytes`", "part as `p.q`", "fixed", "doubles"]


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    count = draw(st.integers(1, 12))
    columns = {}
    for name, (kind, values) in COLUMNS.items():
        drawn = draw(st.lists(st.none() | values, min_size=count, max_size=count))
        columns[name] = pa.array(drawn, kind)
    return pa.table(columns)


@settings(
    # Each example is a job of Spark's: to shrink one takes minutes.
    max_examples=min(100, settings().max_examples // 10),
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    table=tables(),
    options=st.fixed_dictionaries(
        {
            "row_group_size": st.integers(1, 9),
            "use_dictionary": st.booleans(),
            "store_schema": st.booleans(),
            "data_page_version": st.sampled_from(["1.0", "2.0"]),
            "compression": st.sampled_from(["snappy", "zstd", "none"]),
            "write_statistics": st.booleans(),
        }
    ),
    is_selected=st.booleans(),
)
def test_whatever_is_in_the_files_nodes_read_what_spark_gives(
    spark_local: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
    table: pa.Table,
    options: dict[str, Any],
    is_selected: bool,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    pq.write_table(table, folder / "a.parquet", **options)
    pq.write_table(table.slice(0, 1), folder / "b.parquet")
    frame = spark_local.read.parquet(str(folder))
    assert_same(frame.selectExpr(*SELECTED) if is_selected else frame)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of several row groups, in folders `part=0` and `part=1`: `id`, `x`, `s.a`."""
    found = tmp_path_factory.mktemp("a b;c=%20")
    for part in range(2):
        numbers = range(part * 30, part * 30 + 30)
        inner = found / f"part={part}"
        inner.mkdir()
        table = pa.table(
            {
                "id": pa.array(numbers, pa.int64()),
                "x": [[float(i), None] for i in numbers],
                "s": [{"a": i, "b": str(i)} for i in numbers],
            }
        )
        pq.write_table(table, inner / "rows.parquet", row_group_size=8)
    return found


def test_files_of_spark_are_read_with_vectors(spark_local: SparkSession, tmp_path: Path) -> None:
    dense = [Vectors.dense([i, 1, -0.0]) for i in range(20)]
    rows = [(i, v if i % 3 else Vectors.sparse(3, [1], [2.0])) for i, v in enumerate(dense)]
    frame = spark_local.createDataFrame(rows, ["id", "v"]).selectExpr(
        *("id", "v", "id % 2 as half"),
        "cast(cast(id as decimal(12, 3)) / 7 as decimal(12, 3)) as price",
    )
    frame.coalesce(1).write.partitionBy("half").parquet(str(tmp_path / "data"))
    assert_same(spark_local.read.parquet(str(tmp_path / "data")).drop("half"))


def test_scans_that_nodes_read(spark_local: SparkSession, folder: Path) -> None:
    """Columns that are left out, renamed, aliased and checked for nulls."""
    checked = f.coalesce("id", f.raise_error(f.lit("null")).cast("long"))
    frame = spark_local.read.parquet(str(folder)).alias("a")
    frame = frame.select("a.x", "a.s", checked.alias("i"))
    frame = frame.select(f.col("s").alias("x.y"), "i", f.col("x").alias("z"))
    assert assert_same(frame.withColumnRenamed("z", "id")).num_rows == 60


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda df: df.orderBy("id"), "Sort"),
        (lambda df: df.join(df.select("id"), "id"), "Join"),
        (lambda df: df.union(df), "Union"),
        (lambda df: df.select(f.explode("x")), "Generate"),
        (lambda df: df.withColumn("id", f.col("id") + 1), "'id' is computed"),
        (lambda df: df.select(f.col("x")[0].alias("e")), "'e' is computed"),
        (lambda df: df.select(f.coalesce("id", f.lit(1)).alias("i")), "'i' is computed"),
        (lambda df: df.select("id", "_metadata.file_path"), "'file_path' is computed"),
        (lambda df: df.select(f.col("id").cast("double")), "'id' is computed"),
        (lambda df: df.select("s.a"), "'a' is computed"),
        (lambda df: df.where("id > 3"), "Filter"),
        (lambda df: df, "'part' is not in the files"),
        (lambda df: df.select("id", "id"), "several columns 'id'"),
        (lambda df: df.sparkSession.range(3), "Range"),
        (lambda df: df.sparkSession.createDataFrame([(1,)], ["id"]), "LogicalRDD"),
    ],
)
def test_what_is_no_scan_is_left_to_spark(
    spark_local: SparkSession, folder: Path, change: Change, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        scanned_files(change(spark_local.read.parquet(str(folder))), is_local=True)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("spark.sql.files.ignoreCorruptFiles", "true", "ignoreCorruptFiles is set"),
        ("spark.sql.parquet.fieldId.read.enabled", "true", "field ids"),
        ("spark.sql.execution.arrow.useLargeVarTypes", "true", "64-bit offsets"),
    ],
)
def test_settings_that_change_what_spark_reads(
    spark_local: SparkSession, folder: Path, name: str, value: str, reason: str
) -> None:
    frame = spark_local.read.parquet(str(folder))
    spark_local.conf.set(name, value)
    try:
        with pytest.raises(ConfigError, match=reason):
            scanned_files(frame, is_local=True)
    finally:
        spark_local.conf.unset(name)


def test_options_schemas_caches_that_change_rows(spark_local: SparkSession, folder: Path) -> None:
    def refused(frame: DataFrame, reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            scanned_files(frame, is_local=True)

    read, path = spark_local.read, str(folder)
    refused(read.option("datetimeRebaseMode", "LEGACY").parquet(path), "option datetimerebasemode")
    refused(
        spark_local.read.option("ignoreMissingFiles", "true").parquet(path), "(?i)ignoreMissing"
    )
    refused(
        spark_local.read.schema("id int").parquet(path).drop("part"),
        "is int64 in .* and int32 for Spark",
    )
    refused(spark_local.read.schema("ID bigint").parquet(path).drop("part"), "'ID' is called 'id'")
    refused(spark_local.read.schema("new int").parquet(path).drop("part"), "'new' is missing")
    refused(spark_local.read.text(path), "not as Parquet")
    frame = spark_local.read.parquet(path).drop("part")
    assert frame.count() == 60, "which makes a plan before the cache is there"
    frame.cache()
    try:
        refused(frame, "InMemoryRelation")
    finally:
        frame.unpersist()
    assert_same(frame)


def test_files_are_those_the_dataframe_has_read(spark_local: SparkSession, tmp_path: Path) -> None:
    table = pa.table({"x": np.arange(10)})
    pq.write_table(table, tmp_path / "a.parquet")
    frame = spark_local.read.parquet(str(tmp_path))
    pq.write_table(table, tmp_path / "b.parquet")
    assert assert_same(frame).num_rows == 10
    os.utime(tmp_path / "a.parquet", (1e9, 1e9))
    with pytest.raises(ConfigError, match="has changed since Spark listed it"):
        scanned_files(frame, is_local=True)
    os.unlink(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="has changed since Spark listed it"):
        scanned_files(frame, is_local=True)
