"""DataFrames over Parquet files on their way to nodes on Spark, past the JVM or through it."""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as f

import sparkdl
from sparkdl.core.errors import ConfigError, FeedTypeError, ReadError
from sparkdl.driver.executors.parquet_scan import scanned_files
from sparkdl.ml.estimators.training import Training
from sparkdl.node.context import NodeContext

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FEEDS = ("auto", "nodes", "spark", "filtered", "sorted", "changed")
"""One after the other, to the same nodes."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of 40 rows; one of the 120 values of `y` is null."""
    for part in range(3):
        numbers = range(part * 40, part * 40 + 40)
        y = [None if i == 70 else i / 4 for i in numbers]
        table = pa.table(
            {"x": numbers, "y": pa.array(y, pa.float32()), "z": [[i] for i in numbers]}
        )
        pq.write_table(table, tmp_path / f"{part}.parquet", row_group_size=15)
    return tmp_path


def rows_of(args: Any, ctx: NodeContext) -> dict[str, list[str]]:
    """Read all feeds to their ends."""
    found = {}
    for name in FEEDS:
        data = ctx.get_data_feed(qname_in=name)
        found[name] = rows = list[str]()
        while not data.should_stop():
            rows += map(repr, data.next_batch(16))
    return found


def read_all(args: Any, ctx: NodeContext) -> None:
    for _ in ctx.batches(16):
        pass


def test_rows_are_the_same_whoever_reads_the_files(
    spark_cluster: SparkSession, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sparkdl")
    frame = spark_cluster.read.parquet(str(folder)).select(f.col("y").alias("a"), "z", "x")
    with sparkdl.launch(spark_cluster, rows_of, None, 2, framework="plain") as cluster:

        def told(name: str) -> str:
            [line] = [r.message for r in caplog.records if f"Feed {name!r} is read" in r.message]
            return line

        auto = cluster.feed(frame, 2, "auto")
        assert "is read by the nodes from the DataFrame's 3 Parquet files, 120 rows" in told("auto")
        assert (auto.epochs, auto.passes, auto.rows_used) == (2, 1, 240)
        assert set(auto.rows.values()) == {120}
        cluster.end_feeds("auto")
        with pytest.raises(ConfigError, match=r"reader='node' must be one of.*mean 'nodes'"):
            cluster.feed(frame, feed="nodes", reader="node")
        with pytest.raises(ConfigError, match=r"reader='nodes'.*come through Sort"):
            cluster.feed(frame.orderBy("x"), feed="nodes", reader="nodes")
        with pytest.raises(ConfigError, match="reader='spark' is for DataFrames"):
            cluster.feed(str(folder), feed="nodes", reader="spark")
        assert cluster.feed_async(frame, feed="nodes", reader="nodes").result().passes == 1
        cluster.end_feeds("nodes")
        assert cluster.feed(frame, 2, "spark", reader="spark").rows_fed == 240
        cluster.end_feeds("spark")
        filtered = cluster.feed(frame.where("x between 10 and 100"), 2, "filtered")
        assert "is read through Spark: its rows come through Filter" in told("filtered")
        assert (filtered.rows_used, sum(filtered.rows.values())) == (182, 182)
        cluster.end_feeds("filtered")
        cluster.feed(frame.orderBy("x"), feed="sorted")
        assert "is read through Spark: its rows come through Sort" in told("sorted")
        cluster.end_feeds("sorted")
        os.utime(folder / "0.parquet", (1e9, 1e9))
        assert cluster.feed(frame, feed="changed").rows_fed == 120
        assert "0.parquet has changed since Spark has listed it" in told("changed")
        cluster.end_feeds("changed")
        results = cluster.results()
    fed = {name: Counter(row for node in results for row in node[name]) for name in FEEDS}
    assert len(fed["auto"]) == 120
    assert fed["auto"] == fed["spark"]
    assert fed["nodes"] == fed["sorted"] == fed["changed"] == Counter([*fed["spark"]])
    assert set(fed["filtered"].values()) == {2}
    assert len(fed["filtered"]) == 91
    assert fed["filtered"] <= fed["spark"]


def test_file_that_is_replaced_while_it_is_fed_ends_the_feed(
    spark_cluster: SparkSession, folder: Path
) -> None:
    frame = spark_cluster.read.parquet(str(folder))
    source = scanned_files(frame, is_local=True)
    path = folder / "2.parquet"
    content = path.read_bytes()
    path.write_bytes(b"no longer")
    with sparkdl.launch(spark_cluster, read_all, None, 2, framework="plain") as cluster:
        with pytest.raises(ReadError, match=r"2.parquet has changed since.*give reader='spark'"):
            cluster.feed(source)
        path.write_bytes(content)
        cluster.feed(frame.select("x"), reader="spark")


def test_fit_names_the_column_that_holds_a_null(spark_cluster: SparkSession, folder: Path) -> None:
    frame = spark_cluster.read.parquet(str(folder))
    training = Training(
        map_fun=read_all,
        args=None,
        nodes=2,
        epochs=1,
        columns=("x", "y"),
        validation_col=None,
        refuses_nulls=True,
        options={"framework": "plain"},
    )
    with pytest.raises(FeedTypeError, match=r"column 'y' holds a null.*dropna"):
        training.run(frame)
