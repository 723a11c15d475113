"""Nodes and feeders on real Spark clusters: each kind of master, and what dies with what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FrameworkMissingError, NodeFailedError
from sparkdl.core.options import Feeding, Startup
from sparkdl.driver.executors.sessions import encrypting_setting
from sparkdl.driver.feeds import transitions
from sparkdl.driver.lifecycle.state import is_empty
from tests.doubles.sessions import jobs_of
from tests.doubles.until import until
from tests.driver.executors import map_funs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl import Cluster

GONE_S = 15.0


def launch(spark: SparkSession, map_fun: Any, args: Any = None, **options: Any) -> Cluster:
    options = {"framework": "plain", "nodes": 2, "feeding": Feeding(timeout_s=60.0), **options}
    return sparkdl.launch(spark, map_fun, args, **options)


def has_no_jobs(spark: SparkSession) -> bool:
    """Wait until no job is active; return whether that came."""
    tracker = spark.sparkContext.statusTracker()
    return until(lambda: not tracker.getActiveJobsIds(), 60)


def check_feeding(spark: SparkSession, nodes: int = 2) -> str:
    """Feed a DataFrame and an RDD; return the group of the jobs."""
    frame = spark.range(1000, numPartitions=5)
    with launch(spark, map_funs.count_rows, nodes=nodes) as cluster:
        report = cluster.feed(frame, epochs=2)
        cluster.feed(spark.sparkContext.parallelize(range(1000), 3))
        results = cluster.results(60)
    assert report.rows_fed == 2000
    assert report.rows_unused == 0
    rows = [result["rows"] for result in results]
    assert sum(rows) == 3000
    assert sum(result["total"] for result in results) == 3 * sum(range(1000))
    assert max(rows) - min(rows) <= 10
    return f"sparkdl {cluster.spec.cluster_id}"


def test_nodes_that_need_all_slots_are_fed_by_jobs_that_say_what_they_are(
    spark_local: SparkSession,
) -> None:
    group = check_feeding(spark_local, nodes=spark_local.sparkContext.defaultParallelism)
    told = [job for job in jobs_of(spark_local) if job.group == group]
    assert {job.group in job.tags for job in told} == {True}
    assert {job.description for job in told} == {
        f"{group}: nodes",
        f"{group}: feed 'input', epochs 0-1",
        f"{group}: feed 'input', epoch 2",
    }


def test_tables_of_the_driver_are_fed_without_a_job_each_row_once_an_epoch(
    spark_cluster: SparkSession,
) -> None:
    frame = pd.DataFrame({"id": range(1000)})
    table = pa.table({"id": range(1000, 3000)})
    with launch(spark_cluster, map_funs.count_rows) as cluster:
        assert cluster.feed(frame, epochs=2).rows_used == 2000
        assert cluster.feed([table.slice(0, 500), table.slice(500)]).rows_used == 2000
        with pytest.raises(ConfigError, match=r"builtins.dict cannot be fed; give a DataFrame .*"):
            cluster.feed({"id": [1]})
        results = cluster.results(60)
    assert sum(result["total"] for result in results) == 2 * sum(range(1000)) + sum(
        range(1000, 3000)
    )
    jobs = [job.description for job in jobs_of(spark_cluster)]
    assert not any(f"{cluster.spec.cluster_id}: feed" in text for text in jobs if text)


def test_attached_nodes_keep_their_slots_and_inference_answers_each_row_in_order(
    spark_cluster: SparkSession,
) -> None:
    tracker = spark_cluster.sparkContext.statusTracker()
    numbers = spark_cluster.sparkContext.parallelize(range(100), 5)
    with launch(spark_cluster, map_funs.double, startup=Startup(placement="attached")) as cluster:
        assert len(tracker.getActiveJobsIds()) == 1
        assert cluster.infer(numbers).collect() == [2 * n for n in range(100)]
        with pytest.raises(ConfigError, match="schema='double' is for a DataFrame; leave it out"):
            cluster.infer(numbers, schema="double")
        assert len(tracker.getActiveJobsIds()) == 1
    assert not tracker.getActiveJobsIds()


def test_action_on_results_says_the_cause_also_when_the_nodes_have_gone(
    spark_local: SparkSession,
) -> None:
    """The error is Spark's own there, and its text is the task's."""
    from pyspark.errors import PythonException

    with launch(spark_local, map_funs.fail_at_a_row, nodes=1) as cluster:
        frame = cluster.infer(spark_local.range(100), schema="result long")
        with pytest.raises(PythonException, match="no such layer"):
            frame.count()
        deadline = Deadline.after(60)
        assert cluster._controller.wait_for(lambda view: is_empty(view.state), deadline)
        with pytest.raises(PythonException, match=r"\[SPARKDL-CLUSTER-FAILED\] .*no such layer"):
            frame.count()
        with pytest.raises(NodeFailedError, match="no such layer"):
            cluster.infer(spark_local.range(100).rdd)
        cluster.abort()


def test_detached_nodes_give_their_slots_back_and_take_the_same_steps_on_uneven_partitions(
    spark_cluster: SparkSession,
) -> None:
    context = spark_cluster.sparkContext
    skewed = context.parallelize([1, 1000, 0], 3).flatMap(lambda n: [(i,) for i in range(n)])
    frame = spark_cluster.createDataFrame(skewed, "id long")
    args = {"batch_size": 64, "epochs": 2}
    with launch(
        spark_cluster, map_funs.steps_of_epochs, args, startup=Startup(placement="detached")
    ) as cluster:
        assert has_no_jobs(spark_cluster)
        cluster.feed(frame, epochs=2)
        first, second = cluster.results(60)
    assert [len(epoch) for epoch in first] == [len(epoch) for epoch in second] == [8, 8]
    for epoch in range(2):
        assert sum(first[epoch]) + sum(second[epoch]) in (1001, 1002)  # one row may be given twice


def test_too_few_slots_name_the_setting(spark_local: SparkSession) -> None:
    with pytest.raises(
        ConfigError, match=r"9 nodes need 9 task slots.*master local\[9\] .*executor='local'"
    ):
        launch(spark_local, map_funs.nothing, nodes=9)


def test_node_that_cannot_start_fails_no_task(spark_cluster: SparkSession) -> None:
    before = {job.number for job in jobs_of(spark_cluster)}
    with pytest.raises((ConfigError, FrameworkMissingError), match="num_gpus=64"):
        launch(spark_cluster, map_funs.nothing, num_gpus=64)
    started = [job for job in jobs_of(spark_cluster) if job.number not in before]
    assert [job.description.partition(": ")[2] for job in started].count("nodes") == 1
    assert sum(job.failed_tasks for job in started) == 0


def test_job_of_a_feed_that_nobody_wants_is_cancelled_however_slow_its_source(
    spark_cluster: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transitions, "REASON_S", 2.0)

    def rows_and_no_end(_: Any) -> Any:
        yield from [bytes(1 << 18)] * 64
        threading.Event().wait()

    def has_enough(args: None, ctx: Any) -> None:
        feed = ctx.get_data_feed()
        feed.next_batch(1)
        feed.terminate()
        while not feed.should_stop():
            feed.next_batch(1)

    rdd = spark_cluster.sparkContext.parallelize([1], 1).mapPartitions(rows_and_no_end)
    with launch(spark_cluster, has_enough, nodes=1) as cluster:
        report = cluster.feed(rdd, timeout_s=GONE_S * 4)
    assert report.epochs == 0


def test_session_or_context_that_was_stopped_is_refused_by_what_it_is(
    spark_session_on: Callable[[str], SparkSession],
) -> None:
    spark = spark_session_on("local[1]")
    context: Any = spark.sparkContext
    spark.stop()
    for stopped, name in ((spark, "SparkSession"), (context, "SparkContext")):
        with pytest.raises(ConfigError, match=f"the {name} has been stopped. Start another one"):
            launch(stopped, map_funs.count_rows, nodes=1)


@pytest.mark.parametrize("setting", ["spark.ssl.rpc.enabled", "spark.ssl.enabled"])
def test_setting_by_which_spark_encrypts_is_found(spark_local: SparkSession, setting: str) -> None:
    assert encrypting_setting(spark_local) == ""
    spark_local.conf.set(setting, "True")
    try:
        assert encrypting_setting(spark_local) == setting
    finally:
        spark_local.conf.unset(setting)


def test_spark_makes_small_batches_for_a_feed_unless_the_session_says_how_large(
    spark_local: SparkSession,
) -> None:
    limit = "spark.sql.execution.arrow.maxBytesPerBatch"
    try:
        spark_local.conf.get(limit)
    except PySparkException:
        pytest.skip("this Spark limits batches by rows alone")

    def sizes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = [batch.num_rows for batch in batches]
        yield pa.RecordBatch.from_pydict({"id": rows})

    texts = spark_local.range(2000, numPartitions=1).selectExpr("repeat('x', 8192) AS text")
    with launch(spark_local, map_funs.count_rows, nodes=1) as cluster:
        assert cluster.feed(texts.mapInArrow(sizes, "id long")).rows_fed == 3
        spark_local.conf.set(limit, "64m")
        try:
            assert cluster.feed(texts.mapInArrow(sizes, "id long")).rows_fed == 1
        finally:
            spark_local.conf.unset(limit)
        assert cluster.results(60)[0]["total"] == 2 * 2000
    assert spark_local.sparkContext.getLocalProperty(limit) is None
