"""TensorFlowOnSpark's way on Spark with TLS, which is on where Spark's own encryption is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.node.context import NodeContext
from sparkdl.tfos import TFCluster
from sparkdl.tfos.reservation import Client

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def spark(spark_cluster: SparkSession) -> Iterator[SparkSession]:
    spark_cluster.conf.set("spark.ssl.enabled", "true")
    yield spark_cluster
    spark_cluster.conf.unset("spark.ssl.enabled")


def train_and_double(args: Any, ctx: NodeContext) -> int:
    rows = sum(len(batch["id"]) for batch in ctx.batches(10))
    feed = ctx.get_data_feed(False, qname_in="score")
    while not feed.should_stop():
        feed.batch_results([2 * row for row in feed.next_batch(10)])
    return rows


@pytest.mark.deep
def test_cluster_on_spark_trains_scores_and_is_asked_over_tls(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    sc = spark.sparkContext
    caplog.set_level("INFO", "sparkdl.control.tls")
    cluster = TFCluster.run(
        *(sc, train_and_double, None, 2),
        input_mode=TFCluster.InputMode.SPARK,
        queues=["input", "score"],
        framework="plain",
    )
    with cluster:
        assert (
            "TLS is on, as spark.ssl.enabled is; Startup(tls=False) leaves it off"
            in caplog.messages
        )
        addresses = [info["addr"] for info in cluster.cluster_info]
        assert all(address.startswith("grpc+tls://") for address in addresses)
        cluster.train(spark.range(100, numPartitions=4), num_epochs=1)
        server = cluster.cluster_meta["server_addr"]
        assert server.trust is not None
        found = sc.parallelize([0], 1).map(lambda _: len(Client(server).get_reservations()))
        assert found.collect() == [2]
        doubled = cluster.inference(sc.parallelize(range(10), 2), qname="score")
        assert doubled.collect() == [2 * row for row in range(10)]
    assert sum(cluster.cluster.results()) == 100
