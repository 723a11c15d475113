"""On a standalone cluster: a Python worker that carries a node is killed, then a Spark worker.

Spark repeats the task of the first. The second takes its executor along and nothing can replace it:
the world goes on with one node.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

import sparkdl
from sparkdl.core.deadline import Deadline
from tests.doubles import sessions
from tests.doubles.ledger import Plan, lost_and_doubled, train
from tests.doubles.nodes import processes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 2 * 8 * 200
BACK_S = 90.0


def test_killed_spark_worker_loses_no_row(
    spark_session_on: Callable[[str], SparkSession], tmp_path: Path
) -> None:
    spark = spark_session_on(sessions.STANDALONE)
    rows = spark.range(ROWS, numPartitions=3).withColumnRenamed("id", "row")
    with sparkdl.launch(
        spark,
        train,
        Plan(every=10, pause_s=0.1),
        2,
        framework="plain",
        show_progress=False,
        placement="attached",
        checkpoint_dir=str(tmp_path),
        max_restarts=9,
        min_nodes=1,
        elastic_timeout=15.0,
    ) as cluster:
        feeding = cluster.feed_async(rows)

        def wait_for_checkpoint(nodes: int, after: int) -> int:
            """Wait for a checkpoint of a world of so many nodes, after that generation."""

            def is_there(view: object) -> bool:
                state = view.state  # type: ignore[attr-defined]
                made = state.roster.checkpoint
                world = getattr(state, "world", None)
                return (
                    bool(made and world and made.generation == world.generation > after)
                    and len(world.members) == nodes
                )

            assert cluster._controller.wait_for(is_there, Deadline.after(BACK_S)), cluster
            return cluster.world.generation

        generation = wait_for_checkpoint(2, -1)
        python_worker = processes()["worker:1"].agent.parent()
        assert python_worker is not None
        python_worker.kill()

        generation = wait_for_checkpoint(2, generation)
        java = [p for p in processes()["worker:1"].agent.parents() if p.name() == "java"]
        worker = next(p for p in java if "worker.Worker" in " ".join(p.cmdline()))
        assert isinstance(worker, psutil.Process)
        worker.kill()

        feeding.result(2 * BACK_S)
        results = cluster.results(BACK_S)
        assert cluster.world.generation > generation
    assert lost_and_doubled(results, ROWS) == (0, 0)
