"""What carries a node dies, and Spark brings another one: the training begins anew with it.

It comes before the tests whose nodes stay up on the same executors.
"""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.driver.lifecycle.state import Running
from sparkdl.driver.options import Observe
from sparkdl.driver.view import ClusterView
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import Lines, all_gone
from tests.driver.executors.test_spark_integration import launch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BACK_S = 90.0
GONE_S = 15.0


def use_rows(args: dict[str, Any], ctx: NodeContext) -> list[int]:
    """Use rows, save them after every third step; in the first world wait for an end by force."""
    print(
        f"world {ctx.generation} child {os.getpid()} agent {os.environ['SPARKDL_AGENT_PID']}",
        flush=True,
    )
    last = ctx.last_checkpoint
    rows = json.loads(Path(last, f"rows-{ctx.rank}").read_text()) if last else []
    step = last.step if last else 0
    batches = ctx.batches(8, ["id"], even=True, tail="pad")
    while batches.reader.peek_batch() is not None:
        for batch in batches:
            rows += batch["id"][batch["sample_weight"] > 0].tolist()
            step += 1
            if step % 3 == 0:
                with ctx.checkpoint(step) as folder:
                    (folder / f"rows-{ctx.rank}").write_text(json.dumps(rows))
            if ctx.restarts == 0 and step == args["stops_at"]:
                threading.Event().wait()
    return rows


def executor_of(agent: int) -> psutil.Process:
    """Return an agent's executor: they share a folder. The Python worker between may have ended."""
    folder = psutil.Process(agent).cwd()
    executor = next(
        process
        for process in psutil.process_iter(["name", "cwd"])
        if process.info["name"] == "java" and process.info["cwd"] == folder
    )
    assert "CoarseGrainedExecutorBackend" in " ".join(executor.cmdline())
    return executor


def node_processes(lines: Lines) -> tuple[set[int], set[int]]:
    """Wait until both children have printed where they are; return pids of agents and children."""

    def found() -> list[list[str]] | None:
        told = [line.text.split() for line in lines.heard if line.text.startswith("world 0 ")]
        return told if len(told) == 2 else None

    with lines.changed:
        there = lines.changed.wait_for(found, BACK_S)
    assert there, lines.heard
    return {int(words[5]) for words in there}, {int(words[3]) for words in there}


@pytest.mark.smoke
def test_only_rows_of_a_lost_executor_return(spark_cluster: SparkSession, tmp_path: Path) -> None:
    """It takes a node, and the tasks that feed, with it."""
    lines = Lines()
    options: dict[str, Any] = {"max_restarts": 2, "checkpoint_dir": str(tmp_path)}
    options["observe"] = Observe(on_log=lines)
    frame = spark_cluster.range(0, 300, 1, numPartitions=4)
    with (
        launch(spark_cluster, use_rows, {"stops_at": 14}, **options) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        feeding = pool.submit(cluster.feed, frame, 2)
        saved = cluster._controller.wait_for(
            lambda view: has_checkpoint(view, 12), Deadline.after(BACK_S)
        )
        assert saved, cluster.status()
        agents, children = node_processes(lines)
        assert cluster.spec.placement == "detached", "their job has ended"
        them = [psutil.Process(pid) for pid in agents | children]
        executor_of(min(agents)).kill()
        report = feeding.result(BACK_S)
        results = cluster.results(BACK_S)
        assert "was lost" in cluster.status()
    assert all_gone(them, GONE_S)
    assert (report.rows_fed, report.rows_used, report.epochs) == (600, 600, 2)
    assert report.rows_covered == 2 * 12 * 8
    assert sorted(row for rows in results for row in rows) == sorted(2 * list(range(300)))


def has_checkpoint(view: ClusterView, step: int) -> bool:
    made = view.state.registry.checkpoint if isinstance(view.state, Running) else None
    return made is not None and made.step >= step
