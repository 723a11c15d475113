"""Nodes and feeders on real Spark clusters: each kind of master, and what dies with what."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

import sparkdl
from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.options import Feeding
from sparkdl.core.world import Member
from sparkdl.driver.executors.sessions import encrypting_setting
from sparkdl.driver.feeds import transitions
from sparkdl.feed.transfer.messages import Target
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Lab
from tests.doubles.map_funs import hang
from tests.doubles.proxy import Proxy
from tests.doubles.sessions import jobs_of
from tests.doubles.until import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl import Cluster

GONE_S = 15.0


def launch(spark: SparkSession, map_fun: Any, args: Any = None, **options: Any) -> Cluster:
    options = {"framework": "plain", "nodes": 2, "feeding": Feeding(timeout_s=60.0), **options}
    return sparkdl.launch(spark, map_fun, args, **options)


def has_no_jobs(spark: SparkSession) -> bool:
    tracker = spark.sparkContext.statusTracker()
    return until(lambda: not tracker.getActiveJobsIds(), 60)


def test_detached_nodes_give_their_slots_back_and_take_the_same_steps_on_uneven_partitions(
    spark_cluster: SparkSession, on_spark: Lab, feed: str
) -> None:
    def steps_of_epochs(feed: str, ctx: NodeContext) -> list[list[int]]:
        batches = ctx.batches(64, feed=feed, even=True)
        return [[len(batch["id"]) for batch in batches] for _ in range(2)]

    context = spark_cluster.sparkContext
    skewed = context.parallelize([1, 1000, 0], 3).flatMap(lambda n: [(i,) for i in range(n)])
    assert has_no_jobs(spark_cluster)
    on_spark.begin(steps_of_epochs, feed)
    on_spark.cluster.feed(spark_cluster.createDataFrame(skewed, "id long"), 2, feed)
    first, second = on_spark.ended(feed)
    assert [len(epoch) for epoch in first] == [len(epoch) for epoch in second] == [8, 8]
    for epoch in range(2):
        assert sum(first[epoch]) + sum(second[epoch]) in (1001, 1002)  # one row may be given twice


def total(feed: str, ctx: NodeContext) -> int:
    data, found = ctx.get_data_feed(qname_in=feed), 0
    while not data.should_stop():
        found += sum(getattr(row, "id", row) for row in data.next_batch(100))
    return found


def test_tables_of_the_driver_are_fed_without_a_job_each_row_once_an_epoch(
    spark_cluster: SparkSession, on_spark: Lab, feed: str
) -> None:
    cluster, table = on_spark.cluster, pa.table({"id": range(1000, 3000)})
    on_spark.begin(total, feed)
    assert cluster.feed(pd.DataFrame({"id": range(1000)}), 2, feed).rows_used == 2000
    assert cluster.feed([table.slice(0, 500), table.slice(500)], 1, feed).rows_used == 2000
    with pytest.raises(ConfigError, match=r"builtins.dict cannot be fed; give a DataFrame .*"):
        cluster.feed({"id": [1]}, 1, feed)
    assert sum(on_spark.ended(feed)) == 2 * sum(range(1000)) + sum(range(1000, 3000))
    assert not any(f"feed {feed!r}" in job.description for job in jobs_of(spark_cluster))


def test_spark_repeats_tasks_whose_pipe_breaks_in_a_batch_and_each_row_is_there_once(
    spark_cluster: SparkSession, on_spark: Lab, feed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows_of(feed: str, ctx: NodeContext) -> list[int]:
        data, rows = ctx.get_data_feed(qname_in=feed), list[int]()
        while not data.should_stop():
            rows += [row.id for row in data.next_batch(16)]
        return rows

    proxies, feed_targets = list[Proxy](), transitions.feed_targets

    def targets(members: Iterable[Member]) -> tuple[Target, ...]:
        first, second = feed_targets(members)
        if not proxies:  # it breaks within the keys of what goes to a node on the same machine
            proxies.append(stack.enter_context(Proxy(second.uri, break_at=1200)))
        return first, replace(second, uri=proxies[0].uri)

    rows = spark_cluster.range(400, numPartitions=4)
    on_spark.begin(rows_of, feed)
    monkeypatch.setattr(transitions, "feed_targets", targets)
    with ExitStack() as stack:
        assert on_spark.cluster.feed(rows, 1, feed).rows_fed == 400
    assert proxies[0].has_broken
    one, other = on_spark.ended(feed)
    assert sorted(one + other) == list(range(400))


def test_spark_makes_small_batches_for_a_feed_unless_the_session_says_how_large(
    spark_cluster: SparkSession, on_spark: Lab, feed: str
) -> None:
    limit = "spark.sql.execution.arrow.maxBytesPerBatch"
    try:
        spark_cluster.conf.get(limit)
    except PySparkException:
        pytest.skip("this Spark limits batches by rows alone")

    def sizes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = [batch.num_rows for batch in batches]
        yield pa.RecordBatch.from_pydict({"id": rows})

    texts = spark_cluster.range(2000, numPartitions=1).selectExpr("repeat('x', 8192) AS text")
    cluster, batches = on_spark.cluster, texts.mapInArrow(sizes, "id long")
    on_spark.begin(total, feed)
    assert cluster.feed(batches, 1, feed).rows_fed == 3
    spark_cluster.conf.set(limit, "64m")
    try:
        assert cluster.feed(batches, 1, feed).rows_fed == 1
    finally:
        spark_cluster.conf.unset(limit)
    assert sum(on_spark.ended(feed)) == 2 * 2000
    assert spark_cluster.sparkContext.getLocalProperty(limit) is None


def test_job_of_a_feed_that_nobody_wants_is_cancelled_however_slow_its_source(
    spark_cluster: SparkSession, on_spark: Lab, feed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transitions, "REASON_S", 2.0)

    def rows_and_no_end(_: Any) -> Any:
        yield from [bytes(1 << 18)] * 64
        threading.Event().wait()

    def has_enough(name: str, ctx: NodeContext) -> None:
        feed = ctx.get_data_feed(qname_in=name)
        feed.next_batch(1)
        feed.terminate()
        while not feed.should_stop():
            feed.next_batch(1)

    rdd = spark_cluster.sparkContext.parallelize([1], 1).mapPartitions(rows_and_no_end)
    on_spark.begin(has_enough, feed)
    assert on_spark.cluster.feed(rdd, feed=feed, timeout_s=GONE_S * 4).epochs == 0
    on_spark.ended(feed)


def save_and_lose_the_agent(dies: bool, ctx: NodeContext) -> None:
    """Use rows; in the first world node 1 may lose its agent, and with it what that holds."""
    for step, _ in enumerate(ctx.batches(8), start=1):
        if step == 2:
            with ctx.checkpoint(step) as folder:
                (folder / f"model-{ctx.rank}").touch()
        if dies and step == 4 and ctx.generation == 0 and ctx.rank == 1:
            os.kill(int(os.environ["SPARKDL_AGENT_PID"]), signal.SIGKILL)


@pytest.mark.smoke
def test_rows_that_spark_computes_otherwise_than_before_are_refused(
    spark_cluster: SparkSession, tmp_path: Path
) -> None:
    drawn = f.udf(lambda: os.urandom(8), "binary").asNondeterministic()
    frame = spark_cluster.range(400, numPartitions=2).select("id", drawn().alias("x"))
    for dies in (True, False):  # the second job goes on at the checkpoint of the first
        options: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "max_restarts": int(dies)}
        with (
            launch(spark_cluster, save_and_lose_the_agent, dies, **options) as cluster,
            pytest.raises(ConfigError, match=r"again, and its first \d+ rows are not those that"),
        ):
            cluster.feed(frame)


def test_node_that_cannot_start_fails_no_task(spark_cluster: SparkSession) -> None:
    before = {job.number for job in jobs_of(spark_cluster)}
    with pytest.raises((ConfigError, FrameworkMissingError), match="num_gpus=64"):
        launch(spark_cluster, hang, num_gpus=64)
    started = [job for job in jobs_of(spark_cluster) if job.number not in before]
    assert [job.description.partition(": ")[2] for job in started].count("nodes") == 1
    assert sum(job.failed_tasks for job in started) == 0


def test_setting_by_which_spark_encrypts_is_found(spark_local: SparkSession) -> None:
    setting = "spark.ssl.rpc.enabled"
    assert encrypting_setting(spark_local) == ""
    spark_local.conf.set(setting, "True")
    try:
        assert encrypting_setting(spark_local) == setting
    finally:
        spark_local.conf.unset(setting)
