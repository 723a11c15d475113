"""Structured Streaming feeds a cluster on Spark: offsets, stops from either side, failures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, NodeFailedError
from sparkdl.core.options import Feeding
from sparkdl.node.context import NodeContext
from sparkdl.tfos import TFCluster
from tests.doubles.meetings import STEP_S, Meetings, meet, parts, train

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SOON_S = 60
LITTLE = 1 << 16
"""Bytes of feed memory that make feeders wait."""


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


def launch(spark: SparkSession, map_fun: Any, args: Any, **options: Any) -> sparkdl.Cluster:
    return sparkdl.launch(spark, map_fun, args, 2, framework="plain", **options)


def test_query_goes_on_from_its_checkpoint_and_repeats_what_was_not_committed(
    spark_cluster: SparkSession, tmp_path: Path
) -> None:
    """The second query is stopped by Spark, while feeders wait for a node that stands still."""
    files, offsets = Files(spark_cluster, tmp_path), str(tmp_path / "offsets")
    with Meetings() as meetings, Meetings() as held:
        args = {"port": meetings.port, "tail": "short", "held": held.port, "pause": [1, 1]}
        with launch(
            spark_cluster, train, args, feeding=Feeding(memory_nbytes=LITTLE, disk_nbytes=0)
        ) as cluster:

            def start() -> Any:
                return cluster.train_stream(
                    files.stream(), timeout_s=STEP_S, checkpoint_location=offsets
                )

            for rows in (3, 1, 20):
                files.write(rows)
            first = start()
            first.processAllAvailable()
            files.write(2)
            first.processAllAvailable()
            assert first.isActive
            assert first.lastProgress is not None
            assert first.lastProgress["batchId"] == 3
            first.stop()
            assert (first.isActive, first.exception(), first.awaitTermination(1)) == (
                False, None, True,
            )  # fmt: skip

            files.write(3000, wide=1 << 13)
            second = start()
            assert second.id == first.id
            assert cluster._controller.wait_for(
                lambda view: sum(c.rows_received for c in view.feeds.values()) > 26 + 64,
                Deadline.after(SOON_S),
            )
            (query,) = spark_cluster.streams.active
            query.stop()
            assert (second.awaitTermination(1), second.exception()) == (True, None)
            meet(held.port)

            third = start()
            third.processAllAvailable()
            third.stop()
            results = cluster.results(SOON_S)
    lengths = [[len(epoch) for epoch in node] for node in results]
    assert lengths[0] == lengths[1]
    used = [sorted(x for node in results for step in node[n] for x in step) for n in range(3)]
    assert used[0] == list(range(26))
    assert 0 < len(used[1]) < 3000
    assert used[2] == list(range(26, 3026)), "what was not committed comes again"


def has_enough(args: None, ctx: NodeContext) -> int:
    """Read 20 rows; another reads as long as there are any."""
    feed, rows = ctx.get_data_feed(), 0
    while not feed.should_stop() and rows < (20 if ctx.rank else 1000):
        rows += len(feed.next_batch(5))
    if not feed.should_stop():
        feed.terminate()
    return rows


def test_query_ends_when_a_node_has_had_enough_and_what_cannot_be_is_refused(
    spark_cluster: SparkSession, tmp_path: Path
) -> None:
    files = Files(spark_cluster, tmp_path)
    with launch(spark_cluster, has_enough, None) as cluster:
        for wrong in (spark_cluster.range(3), parts(3)):
            with pytest.raises(ConfigError, match="takes a streaming DataFrame"):
                cluster.train_stream(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="micro-batches"):
            cluster.train_stream(files.stream(), trigger={"continuous": "1 second"})
        with pytest.raises(ConfigError, match="train_stream"):
            cluster.feed(files.stream())
        query = cluster.train_stream(files.stream(), query_name="enough", trigger="0 seconds")
        assert query.name == "enough"
        with pytest.raises(ConfigError, match="belongs to a stream"):
            cluster.feed(spark_cluster.range(3))
        for _ in range(8):
            files.write(10)
        assert query.awaitTermination(SOON_S)
        assert query.exception() is None
        read, enough = cluster.results(SOON_S)
        assert enough == 20
        assert read >= 10


def test_query_fails_with_what_a_node_died_of(spark_cluster: SparkSession, tmp_path: Path) -> None:
    def fail(args: None, ctx: NodeContext) -> None:
        ctx.get_data_feed().next_batch(1)
        raise ValueError("no such layer")

    files = Files(spark_cluster, tmp_path)
    files.write(10)
    mode = TFCluster.InputMode.SPARK
    cluster = TFCluster.run(
        spark_cluster.sparkContext, fail, None, 2, input_mode=mode, framework="plain"
    )
    with pytest.raises(NodeFailedError, match="no such layer"), cluster:
        query = cluster.train_stream(files.stream(), SOON_S, trigger={"availableNow": True})
        with pytest.raises(NodeFailedError, match="no such layer"):
            query.awaitTermination(SOON_S)
        assert isinstance(query.exception(), NodeFailedError)
        cluster.shutdown()
