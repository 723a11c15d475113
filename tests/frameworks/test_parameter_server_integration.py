"""Parameter servers: a chief that steps on its workers with the rows fed to it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import sparkdl
from sparkdl.core.options import Feeding, Roles
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import all_gone, launch, processes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]


def sum_up(args: None, ctx: NodeContext) -> tuple[int, int, bool]:
    """Schedule a step for each batch of two epochs; each adds its rows up on the ps."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        total = tf.Variable(0, dtype=tf.int64)

    @tf.function  # type: ignore[untyped-decorator]
    def step(n: Any) -> None:
        total.assign_add(tf.reduce_sum(n))

    steps = 0
    while ctx.has_epoch():
        for n in ctx.dataset(8, x="n"):
            coordinator.schedule(step, args=(n,))
            steps += 1
        coordinator.join()
    return int(total.numpy()), steps, "/job:ps" in total.device


@pytest.mark.smoke
def test_the_chief_steps_on_its_workers_with_each_row_it_is_fed() -> None:
    roles = Roles(ps=1, chief="chief")
    with launch(sum_up, nodes=3, framework="tensorflow", roles=roles) as cluster:
        report = cluster.feed(pa.table({"n": range(137)}), epochs=2)
        cluster.end_feeds("input")
        assert cluster.results(120)[0] == (2 * sum(range(137)), 36, True)
    assert report.rows == {"chief:0": 274}


def name_or_hang(args: None, ctx: NodeContext) -> str:
    if ctx.job_name == "ps":
        signal.pause()
    return ctx.job_name


@pytest.mark.smoke
def test_ps_on_the_drivers_machine_takes_no_slot_of_spark(spark_cluster: SparkSession) -> None:
    options: dict[str, Any] = {"framework": "plain", "feeding": Feeding(fed=False)}
    with sparkdl.launch(
        spark_cluster,
        name_or_hang,
        None,
        5,
        roles=sparkdl.Roles(ps=1, ps_on_driver=True),
        **options,
    ) as cluster:  # of four slots
        ps = processes()["ps:0"]
        assert ps.agent.ppid() == os.getpid()
        results = cluster.results(120)
        assert all_gone([ps.child])
    assert results == [*(["worker"] * 4), None]
    assert all_gone([ps.agent])
