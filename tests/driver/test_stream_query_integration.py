"""Structured Streaming feeds a cluster on Spark: offsets, stops from either side, failures."""

from __future__ import annotations

import itertools
from collections import Counter
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
from tests.doubles.gates import Gate
from tests.doubles.labs import Lab
from tests.doubles.meetings import parts

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
        self._row = 0

    def write(self, rows: int, wide: int = 8) -> None:
        """Write the next rows, `wide` bytes each; the column "x" goes on counting."""
        _, table = parts(self._row, rows, wide=wide)
        number = next(self._numbers)
        hidden = self._folder / f".{number}"
        pq.write_table(table, hidden)
        hidden.rename(self._folder / f"{number}.parquet")
        self._row += rows

    def stream(self) -> DataFrame:
        reader = self._spark.readStream.schema("x long, f binary").option("maxFilesPerTrigger", 1)
        return reader.parquet(str(self._folder))


def read(args: dict[str, Any], ctx: NodeContext) -> list[list[int]]:
    """Return the rows of each step of all epochs; a node stands still in the large one."""
    batches, steps = ctx.batches(4, ["x"], args["feed"], even=True), []
    gate = args["gate"] if ctx.rank else None
    while ctx.has_epoch(args["feed"]):
        for batch in batches:
            steps.append(batch["x"].tolist())
            if gate and max(steps[-1]) >= args["large"]:
                gate.wait()
                gate = None
    return steps


def test_query_goes_on_from_its_checkpoint_and_a_micro_batch_that_a_stop_interrupts_comes_again(
    spark_cluster: SparkSession, on_spark: Lab, feed: str, tmp_path: Path
) -> None:
    files, offsets = Files(spark_cluster, tmp_path), str(tmp_path / "offsets")
    train = partial(on_spark.cluster.train_stream, feed=feed, checkpoint_location=offsets)
    gate = Gate.at(tmp_path / "gate")
    on_spark.begin(read, {"gate": gate, "large": 4, "feed": feed})
    for rows in (1, 3):  # the first has no row for one of the nodes
        files.write(rows)
    first = train(files.stream())
    first.processAllAvailable()
    assert first.lastProgress is not None
    assert first.lastProgress["batchId"] == 1
    spark_cluster.conf.set("sparkdl.of", "the user's")  # and not of a micro-batch's copy
    assert type(spark_cluster).active().conf.get("sparkdl.of", None) == "the user's"
    files.write(602, wide=1 << 13)
    with gate.wait_until_reached():
        first.stop()
        assert (first.isActive, first.exception(), first.awaitTermination(1)) == (
            False, None, True,
        )  # fmt: skip
    again = train(files.stream(), trigger={"availableNow": True})
    assert again.awaitTermination(SOON_S)
    assert again.id == first.id
    one, other = on_spark.ended(feed)
    used = Counter(x for step in one + other for x in step)
    assert set(used) == set(range(606))
    assert {used[x] for x in range(4)} == {1}, "each row once"
    assert used[4] == 2, "the large one's first part twice"


def has_enough(name: str, ctx: NodeContext) -> int:
    """Read 20 rows; another reads as long as there are any."""
    feed, rows = ctx.get_data_feed(qname_in=name), 0
    while not feed.should_stop() and rows < (20 if ctx.rank else 1000):
        rows += len(feed.next_batch(5))
    if not feed.should_stop():
        feed.terminate()
    return rows


def test_query_ends_when_a_node_has_had_enough_and_what_cannot_be_is_refused(
    spark_cluster: SparkSession, on_spark: Lab, feed: str, tmp_path: Path
) -> None:
    files, train = Files(spark_cluster, tmp_path), partial(on_spark.cluster.train_stream, feed=feed)
    on_spark.begin(has_enough, feed)
    for wrong in (spark_cluster.range(3), parts(3)):
        with pytest.raises(ConfigError, match="takes a streaming DataFrame"):
            train(wrong)  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"(?i)continuous"):  # of Spark
        train(files.stream(), trigger={"continuous": "1 second"})
    with pytest.raises(ConfigError, match="train_stream"):
        on_spark.cluster.feed(files.stream(), feed=feed)
    query = train(files.stream(), query_name="enough", trigger="0 seconds")
    assert query.name == "enough"
    for _ in range(8):
        files.write(10)
    assert query.awaitTermination(SOON_S)
    assert query.exception() is None
    read, enough = on_spark.ended(feed)
    assert enough == 20
    assert read >= 10


def test_query_ends_when_a_node_fails_and_the_cluster_raises_its_error(
    spark_cluster: SparkSession, tmp_path: Path
) -> None:
    def fail(args: None, ctx: NodeContext) -> None:
        ctx.get_data_feed().next_batch(1)
        raise ValueError("no such layer")

    files = Files(spark_cluster, tmp_path)
    files.write(10)
    with (
        pytest.raises(NodeFailedError, match="no such layer"),
        sparkdl.launch(spark_cluster, fail, None, 1, framework="plain") as cluster,
    ):
        query = cluster.train_stream(files.stream(), timeout_s=SOON_S)
        with suppress(StreamingQueryException):  # the query may be stopped before
            query.awaitTermination(SOON_S)
        assert not query.isActive
