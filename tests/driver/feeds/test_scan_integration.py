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

from sparkdl.core.errors import ConfigError, ReadError
from sparkdl.driver.executors.parquet_scan import scanned_files
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Lab

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FEEDS = ("auto", "spark", "changed")
"""One after the other, to the same nodes."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of 40 rows; one of the 120 values of `y` is null."""
    for part in range(3):
        numbers = range(part * 40, part * 40 + 40)
        y = [None if i == 70 else i / 4 for i in numbers]
        tokens = [[i] for i in numbers]
        table = pa.table({"x": numbers, "y": pa.array(y, pa.float32()), "z": tokens})
        pq.write_table(table, tmp_path / f"{part}.parquet", row_group_size=15)
    return tmp_path


def rows_of(args: Any, ctx: NodeContext) -> dict[str, list[str]]:
    found = {}
    for name in FEEDS:
        data = ctx.get_data_feed(qname_in=name)
        found[name] = rows = list[str]()
        while not data.should_stop():
            rows += map(repr, data.next_batch(16))
    return found


def test_rows_are_the_same_whoever_reads_the_files(
    spark_cluster: SparkSession, on_spark: Lab, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sparkdl")
    columns = f.col("y").alias("a"), "z", "x"
    frame = spark_cluster.read.parquet(str(folder)).select(*columns)
    cluster = on_spark.cluster
    on_spark.begin(rows_of, None)

    def told(name: str) -> str:
        [line] = [r.message for r in caplog.records if f"Feed {name!r} is read" in r.message]
        return line

    auto = cluster.feed(frame, 2, "auto")
    assert "is read by the nodes from the DataFrame's 3 Parquet files, 120 rows" in told("auto")
    assert (auto.epochs, auto.passes, auto.rows_used) == (2, 1, 240)
    assert set(auto.rows.values()) == {120}
    with pytest.raises(ConfigError, match=r"reader='node' must be one of.*mean 'nodes'"):
        cluster.feed(frame, feed="auto", reader="node")
    with pytest.raises(ConfigError, match=r"reader='nodes'.*come through Sort"):
        cluster.feed(frame.orderBy("x"), feed="auto", reader="nodes")
    with pytest.raises(ConfigError, match="reader='spark' is for DataFrames"):
        cluster.feed(str(folder), feed="auto", reader="spark")
    asked = cluster.feed_async(frame, feed="auto", reader="nodes").result()
    assert (asked.passes, asked.rows_used) == (1, 120)
    cluster.end_feeds("auto")
    assert cluster.feed(frame, 1, "spark", reader="spark").rows_fed == 120
    cluster.end_feeds("spark")
    os.utime(folder / "0.parquet", (1e9, 1e9))
    assert cluster.feed(frame, feed="changed").rows_fed == 120
    assert "is read through Spark: " in told("changed")
    assert "0.parquet has changed since Spark listed it" in told("changed")
    frame = spark_cluster.read.parquet(str(folder)).select(*columns)
    source = scanned_files(frame, is_local=True)
    (folder / "2.parquet").write_bytes(b"no longer")
    with pytest.raises(ReadError, match=r"2.parquet has changed since.*give reader='spark'"):
        cluster.feed(source, feed="changed")
    cluster.end_feeds("changed")
    results = on_spark.results()
    fed = {name: Counter(row for node in results for row in node[name]) for name in FEEDS}
    assert len(fed["spark"]) == fed["spark"].total() == 120
    assert fed["auto"] == fed["spark"] + fed["spark"] + fed["spark"]
    assert fed["changed"] >= fed["spark"]
