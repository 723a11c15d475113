"""A DStream feeds a cluster until somebody wants no more of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import NodeFailedError
from sparkdl.node.context import NodeContext
from sparkdl.tfos import TFCluster
from sparkdl.tfos.reservation import Client


@pytest.fixture
def ssc(spark_cluster: SparkSession) -> Iterator[Any]:
    """A streaming context of short intervals."""
    from pyspark.streaming import StreamingContext

    seconds: Any = 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DStreams are deprecated
        context = StreamingContext(spark_cluster.sparkContext, seconds)
    yield context
    context.stop(stopSparkContext=False, stopGraceFully=False)


def stream(ssc: Any, rdds: int, rows: int) -> Any:
    return ssc.queueStream([ssc.sparkContext.parallelize(range(rows), 2) for _ in range(rdds)])


def run(ssc: Any, map_fun: Any, args: Any = None, nodes: int = 1) -> TFCluster.TFCluster:
    return TFCluster.run(
        *(ssc.sparkContext, map_fun, args, nodes),
        input_mode=TFCluster.InputMode.SPARK,
        framework="plain",
    )


def count(args: int, ctx: NodeContext) -> int:
    """Read `args` rows, or all until the end of the feed."""
    feed, rows = ctx.get_data_feed(), 0
    while not feed.should_stop() and rows < args:
        rows += len(feed.next_batch(1))
    if not feed.should_stop():
        feed.terminate()
    return rows


@pytest.mark.deep
def test_stream_ends_when_a_client_asks_and_all_rows_until_then_are_read(
    ssc: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = run(ssc, count, 1 << 30)
    cluster.train(stream(ssc, 3, 20))
    host, port = cluster.cluster_meta["server_addr"]
    assert f"tfos.reservation {host} {port}" in caplog.text
    ssc.start()
    controller = cluster.cluster._controller
    assert controller.wait_for(
        lambda view: sum(count.given.rows for count in view.feeds.values()) >= 60,
        Deadline.after(120),
    )
    with closing(Client(cluster.cluster_meta["server_addr"])) as client:
        assert client.request_stop() == "OK"
    cluster.shutdown(ssc)
    assert sum(cluster.cluster.results()) == 60


@pytest.mark.deep
def test_stream_ends_when_a_node_fails_and_its_error_is_told(ssc: Any) -> None:
    def fail(args: Any, ctx: NodeContext) -> None:
        ctx.get_data_feed().next_batch(1)
        raise ValueError("no such layer")

    cluster = run(ssc, fail)
    cluster.train(stream(ssc, 3, 20))
    ssc.start()
    with pytest.raises(NodeFailedError, match="no such layer"):
        cluster.shutdown(ssc)
