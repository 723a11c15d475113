"""GPUs that Spark itself discovers, by a script that prints them, on clusters that have none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import sparkdl
from sparkdl.core.errors import ConfigError
from sparkdl.tfos import TFCluster
from tests.doubles.sessions import GPUS_PER_WORKER

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl import NodeContext


def count_rows(args: Any, ctx: NodeContext) -> tuple[str, str, str, int, int]:
    """Read the feed to its end; return the GPUs that this node sees, and how many rows it read."""
    feed, rows = ctx.get_data_feed(), 0
    while not feed.should_stop():
        rows += len(feed.next_batch(100))
    order = os.environ["CUDA_DEVICE_ORDER"]
    return ctx.job_name, os.environ["CUDA_VISIBLE_DEVICES"], order, ctx.num_gpus, rows


@pytest.mark.deep  # a standalone cluster: `local-cluster` refuses profiles of tasks
def test_nodes_ask_for_the_gpus_of_their_executors_and_feeders_need_none(
    spark_standalone: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors have GPUs, tasks have none: each node's task takes one, by a profile."""
    seen = [f"GPU-{i}" for i in range(2 * GPUS_PER_WORKER)]
    # Of the Python workers of this test's jobs, in place of the executors' own.
    environment = spark_standalone.sparkContext.environment
    monkeypatch.setitem(environment, "CUDA_VISIBLE_DEVICES", ",".join(seen))
    options: Any = {"input_mode": TFCluster.InputMode.SPARK, "framework": "plain"}
    sc, args = spark_standalone.sparkContext, {"num_gpus": 1}
    with TFCluster.run(sc, count_rows, args, num_executors=2, **options) as cluster:
        cluster.train(spark_standalone.range(100, numPartitions=4), num_epochs=1)
        results = cluster.cluster.results(60)
    jobs, gpus, orders, counts, rows = zip(*results, strict=True)
    assert (set(jobs), set(orders), counts) == ({"worker"}, {"PCI_BUS_ID"}, (1, 1))
    assert len({*gpus} & {*seen}) == 2
    assert sum(rows) == 100
    with pytest.raises(ConfigError, match=r"num_gpus=2, and Spark gives an executor 1 GPUs"):
        sparkdl.launch(spark_standalone, count_rows, nodes=2, framework="plain", num_gpus=2)
