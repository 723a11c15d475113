"""GPUs that Spark itself discovers, by a script that prints them, on clusters that have none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.core.errors import ConfigError
from sparkdl.tfos import TFCluster
from tests.doubles.sessions import CLUSTER, GPUS_PER_WORKER, SparkSessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl import NodeContext

GPU = "spark.{}.resource.gpu.{}"


def count_rows(args: Any, ctx: NodeContext) -> tuple[str, str, str, int, int]:
    """Read the feed to its end; return the GPUs that this node sees, and how many rows it read."""
    feed, rows = ctx.get_data_feed(), 0
    while not feed.should_stop():
        rows += len(feed.next_batch(100))
    order = os.environ["CUDA_DEVICE_ORDER"]
    return ctx.job_name, os.environ["CUDA_VISIBLE_DEVICES"], order, ctx.num_gpus, rows


def check_fed_nodes(spark: SparkSession, number: int, **options: Any) -> None:
    """Train on rows that Spark feeds; each node sees a GPU of its own."""
    cluster = TFCluster.run(
        spark.sparkContext,
        count_rows,
        {"num_gpus": 1},
        num_executors=2,
        input_mode=TFCluster.InputMode.SPARK,
        framework="plain",
        **options,
    )
    with cluster:
        cluster.train(spark.range(100, numPartitions=4), num_epochs=1)
        results = cluster.cluster.results(60)
    assert [(job, order, count) for job, _gpu, order, count, _rows in results] == [
        ("worker", "PCI_BUS_ID", 1)
    ] * 2
    gpus = [int(gpu) for _job, gpu, _order, _count, _rows in results]
    assert len(set(gpus)) == 2
    assert set(gpus) <= set(range(number))
    assert sum(rows for *_words, rows in results) == 100


def test_nodes_ask_for_the_gpus_of_their_executors_and_feeders_need_none(
    spark_standalone: SparkSession,
) -> None:
    """Executors have GPUs, tasks have none: each node's task takes one, by a profile."""
    check_fed_nodes(spark_standalone, 2 * GPUS_PER_WORKER)
    with pytest.raises(ConfigError, match=r"num_gpus=2, and Spark gives an executor 1 GPUs"):
        sparkdl.launch(spark_standalone, count_rows, nodes=2, framework="plain", num_gpus=2)


@pytest.mark.deep  # a cluster of its own for what test_placement decides, seen end to end
def test_nodes_get_the_gpus_of_their_tasks_and_give_the_slots_back_to_feeders(
    spark_sessions: SparkSessions, spark_session_on: object
) -> None:
    """Each task has a GPU, and there are as many as nodes: two slots, though four cores."""
    spark = spark_sessions.get(
        CLUSTER,
        {
            GPU.format("worker", "amount"): "1",
            GPU.format("worker", "discoveryScript"): str(spark_sessions.discovery_script(1)),
            GPU.format("executor", "amount"): "1",
            GPU.format("task", "amount"): "1",
        },
    )
    check_fed_nodes(spark, 2)
    with pytest.raises(
        ConfigError, match=r"3 nodes need 3 task slots .* 2 task slots .*1 GPU each"
    ):
        sparkdl.launch(spark, count_rows, nodes=3, framework="plain")
    with pytest.raises(ConfigError, match="num_gpus=2, and Spark gives a task 1 GPUs"):
        sparkdl.launch(spark, count_rows, nodes=1, framework="plain", num_gpus=2)
