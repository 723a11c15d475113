"""Inference on Spark: a DataFrame comes back with columns of results, an RDD as results."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PythonException
from pyspark.sql.types import FloatType, StructField, StructType

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, NodeFailedError
from sparkdl.driver.lifecycle.state import is_empty
from tests.doubles.nodes import processes
from tests.doubles.sessions import LOCAL, SparkSessions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdl import Cluster, NodeContext


def score(args: str, ctx: NodeContext) -> None:
    """Answer inference as the file `args` says by then: `kind`, `read` and `answer` at a time."""
    feed, how = ctx.get_data_feed(train_mode=False), {"read": 7}
    while not feed.should_stop():
        rows = feed.next_batch(how["read"])
        how = json.loads(Path(args).read_text())
        if how["kind"] == "none":
            raise ValueError("no such layer")
        results = [RESULTS[how["kind"]](row) for row in rows]
        for start in range(0, len(results), how["answer"]):
            feed.batch_results(results[start : start + how["answer"]])


RESULTS: dict[str, Any] = {
    "scalar": lambda row: row.id / 2,
    "dict": lambda row: {"half": row.id / 2, "name": f"n{row.id}"},
}


@dataclass(frozen=True)
class Scorer:
    """A cluster, and the file that says how its nodes answer."""

    cluster: Cluster
    how: Path

    def answer(self, kind: str, read: int = 7, answer: int = 1000) -> Cluster:
        """Have nodes give results of this kind, so many rows at a time; return the cluster."""
        self.how.write_text(json.dumps({"kind": kind, "read": read, "answer": answer}))
        return self.cluster


@pytest.fixture(scope="module")
def scorer(
    spark_sessions: SparkSessions, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scorer]:
    """A cluster that stays up for the tests on `spark_local`."""
    how = tmp_path_factory.mktemp("scorer") / "how"
    cluster = sparkdl.launch(
        spark_sessions.get(LOCAL),
        score,
        str(how),
        nodes=2,
        framework="plain",
        feeding=sparkdl.Feeding(timeout_s=60.0),
        startup=sparkdl.Startup(placement="attached"),
    )
    yield Scorer(cluster, how)
    cluster.abort()


def rich(spark: SparkSession, rows: int = 100) -> DataFrame:
    """Return columns of many types, one with a dot in its name."""
    return spark.range(rows, numPartitions=3).selectExpr(
        "id",
        "cast(id as string) as `a.b`",
        "timestamp_micros(id) as t",
        "cast(id as decimal(20, 3)) as d",
        "array(id, null) as l",
        "map('k', named_struct('x', id)) as m",
        "if(id % 2 = 0, null, cast(cast(id as string) as binary)) as b",
    )


@pytest.mark.smoke
def test_end_of_sparks_daemon_of_workers_is_not_that_of_attached_nodes(
    spark_local: SparkSession, scorer: Scorer
) -> None:
    """Spark 4.3 ends it, and with it its workers, when it cancels a task at a certain moment."""
    tasks = {node.agent.parent() for node in processes(nodes=2).values()}
    (daemon,) = {task.parent() for task in tasks if task is not None}
    assert daemon is not None
    os.killpg(daemon.pid, signal.SIGHUP)  # as it does before it ends
    scored = scorer.answer("scalar").infer(spark_local.range(9), schema="p float")
    assert [row.p for row in scored.collect()] == [i / 2 for i in range(9)]
    assert all(task is not None and task.is_running() for task in tasks)


def test_inference_answers_each_row_beside_the_columns_of_its_input(
    spark_local: SparkSession, scorer: Scorer
) -> None:
    frame = rich(spark_local)
    cluster = scorer.answer("scalar", read=7, answer=5)
    scored = cluster.infer(frame, schema="prediction float")
    result = StructField("prediction", FloatType())
    assert scored.schema == StructType([*frame.schema.fields, result])
    found = scored.collect()
    assert [row[:-1] for row in found] == [tuple(row) for row in frame.collect()]
    assert [row.prediction for row in found] == [i / 2 for i in range(100)]
    assert len(scored.limit(3).collect()) == 3  # whoever stops early leaves nothing behind
    assert scored.count() == 100


def test_results_of_dataframes_need_schema_and_no_job(
    spark_local: SparkSession, scorer: Scorer
) -> None:
    frame = spark_local.range(50, numPartitions=3)
    cluster = scorer.answer("dict")
    with pytest.raises(ConfigError, match=r"needs schema=.* Write schema='prediction double' if"):
        cluster.infer(frame)
    with pytest.raises(ConfigError, match="schema='double' is for a DataFrame; leave it out"):
        cluster.infer(frame.rdd, schema="double")
    tracker = spark_local.sparkContext.statusTracker()
    assert len(tracker.getActiveJobsIds()) == 1, "attached nodes keep their slots"
    alone = cluster.infer(frame.rdd).collect()
    assert alone == [{"half": i / 2, "name": f"n{i}"} for i in range(50)]
    kept = cluster.infer(frame.where("id < 0"), schema="half double, name string")
    assert kept.dtypes == [("id", "bigint"), ("half", "double"), ("name", "string")]
    assert kept.collect() == []
    with pytest.raises(PythonException, match=r"has undeclared 'name'.* Name the same fields"):
        cluster.infer(frame, schema="half double").collect()


@pytest.mark.smoke
def test_action_on_results_says_the_cause_also_when_the_nodes_have_gone(
    spark_local: SparkSession, scorer: Scorer
) -> None:
    """The error is Spark's own there, and its text is the task's."""
    cluster = scorer.answer("none")
    frame = cluster.infer(spark_local.range(100), schema="result long")
    with pytest.raises(PythonException, match="no such layer"):
        frame.count()
    assert cluster._controller.wait_for(lambda view: is_empty(view.state), Deadline.after(60))
    with pytest.raises(PythonException, match=r"\[SPARKDL-CLUSTER-FAILED\] .*no such layer"):
        frame.count()
    with pytest.raises(NodeFailedError, match="no such layer"):
        cluster.infer(spark_local.range(100).rdd)
