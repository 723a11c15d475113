"""Structured Streaming feeds a cluster on Spark: offsets, stops from either side, failures."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException

import sparkdl
from sparkdl.core.errors import ConfigError, NodeFailedError
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Lab
from tests.doubles.meetings import Meetings, meet, parts
from tests.doubles.until import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SOON_S = 60


@pytest.fixture(autouse=True)
def _no_query_is_left(spark_cluster: SparkSession) -> Iterator[None]:
    yield
    assert spark_cluster.streams.active == []


class Files:
    """A folder of Parquet files, of which a stream makes a micro-batch each."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark, self._folder = spark, folder / "in"
        self._folder.mkdir()
        self._numbers = itertools.count()
        self._row, self._written_s = 0, time.time()

    def write(self, rows: int, wide: int = 8) -> None:
        """Write the next rows, `wide` bytes each; the column "x" goes on counting."""
        _, table = parts(self._row, rows, wide=wide)
        number = next(self._numbers)
        hidden = self._folder / f".{number}"
        pq.write_table(table, hidden)
        os.utime(hidden, (self._written_s + number,) * 2)  # Spark reads them in this order
        hidden.rename(self._folder / f"{number}.parquet")
        self._row += rows

    def stream(self) -> DataFrame:
        reader = self._spark.readStream.schema("x long, f binary").option("maxFilesPerTrigger", 1)
        return reader.parquet(str(self._folder))


def read(args: dict[str, Any], ctx: NodeContext) -> list[list[int]]:
    """Return the rows of each step of all epochs; nodes may stand still after the first one."""
    feed, steps = args["feed"], list[list[int]]()
    batches = ctx.batches(4, ["x"], feed, even=True)
    while ctx.has_epoch(feed):
        for batch in batches:
            steps.append(batch["x"].tolist())
            if len(steps) == 1 and "held" in args:
                meet(args["held"])
    return steps


def test_query_goes_on_from_its_checkpoint_and_few_rows_wait_for_more(
    spark_cluster: SparkSession, on_spark: Lab, feed: str, tmp_path: Path
) -> None:
    files, offsets = Files(spark_cluster, tmp_path), str(tmp_path / "offsets")
    train = partial(on_spark.cluster.train_stream, feed=feed, checkpoint_location=offsets)
    on_spark.begin(read, {"feed": feed})
    for rows in (3, 1):  # the second has no row for one of the nodes
        files.write(rows)
    first = train(files.stream())
    first.processAllAvailable()
    files.write(22)
    first.processAllAvailable()
    assert first.lastProgress is not None
    assert first.lastProgress["batchId"] == 2
    spark_cluster.conf.set("sparkdl.of", "the user's")  # and not of a micro-batch's copy
    assert type(spark_cluster).active().conf.get("sparkdl.of", None) == "the user's"
    first.stop()
    found = (first.isActive, first.exception(), first.awaitTermination(1))
    assert found == (False, None, True)
    files.write(30)
    again = train(files.stream(), trigger={"availableNow": True})
    assert again.awaitTermination(SOON_S)
    assert again.id == first.id
    one, other = on_spark.ended(feed)
    assert len(one) == len(other)
    assert sorted(x for step in one + other for x in step) == list(range(56)), "each row once"


@pytest.mark.parametrize("wide", [8, 1 << 13], ids=["nodes_hold_all", "nodes_hold_a_part"])
@pytest.mark.smoke
def test_micro_batch_that_a_stop_interrupts_comes_again_as_a_whole(
    wide: int,
    spark_cluster: SparkSession,
    on_spark: Lab,
    feed: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files, offsets = Files(spark_cluster, tmp_path), str(tmp_path / "offsets")
    train = partial(on_spark.cluster.train_stream, feed=feed, checkpoint_location=offsets)
    for rows in (1, 602):  # the first waits for more
        files.write(rows, wide=wide)
    with Meetings(size=3) as held:
        on_spark.begin(read, {"held": held.port, "feed": feed})
        query = train(files.stream())
        assert until(lambda: held.waiting == 2, SOON_S), "the nodes do not stand still"
        if wide == 8:  # the feed waits for the nodes alone
            assert until(lambda: not spark_cluster.sparkContext.statusTracker().getActiveJobsIds())
        query.stop()
        assert (query.isActive, query.exception()) == (False, None)
        assert until(lambda: ": 1 rows too few for a step" in caplog.text, SOON_S)
        meet(held.port)
        again = train(files.stream(), trigger={"availableNow": True})
        assert again.awaitTermination(SOON_S)
        one, other = on_spark.ended(feed)
    used = [x for step in one + other for x in step]
    assert set(used) | {0} == set(range(603))
    assert len(used) > 603, "what nodes had of it is used twice"


def has_enough(args: None, ctx: NodeContext) -> None:
    """Read 20 rows; another reads as long as there are any. Then fail at a row of another feed."""
    feed, rows = ctx.get_data_feed(), 0
    while not feed.should_stop() and rows < (20 if ctx.rank else 1000):
        rows += len(feed.next_batch(5))
    if not feed.should_stop():
        feed.terminate()
    assert rows == 20 if ctx.rank else rows >= 10
    ctx.get_data_feed(qname_in="other").next_batch(1)
    raise ValueError("no such layer")


@pytest.mark.smoke
def test_query_ends_when_a_node_has_had_enough_or_fails_and_what_cannot_be_is_refused(
    spark_cluster: SparkSession, tmp_path: Path
) -> None:
    files = Files(spark_cluster, tmp_path)
    with (
        pytest.raises(NodeFailedError, match="no such layer"),
        sparkdl.launch(spark_cluster, has_enough, None, 2, framework="plain") as cluster,
    ):
        for wrong in (spark_cluster.range(3), parts(3)):
            with pytest.raises(ConfigError, match="takes a streaming DataFrame"):
                cluster.train_stream(wrong)  # type: ignore[arg-type]
        with pytest.raises(Exception, match=r"(?i)continuous"):  # of Spark
            cluster.train_stream(files.stream(), trigger={"continuous": "1 second"})
        with pytest.raises(ConfigError, match="train_stream"):
            cluster.feed(files.stream())
        query = cluster.train_stream(files.stream(), query_name="enough", trigger="0 seconds")
        assert query.name == "enough"
        for _ in range(8):
            files.write(10)
        assert query.awaitTermination(SOON_S)
        assert query.exception() is None
        query = cluster.train_stream(files.stream(), feed="other", timeout_s=SOON_S)
        with suppress(StreamingQueryException):  # the query may be stopped before
            query.awaitTermination(SOON_S)
        assert not query.isActive
