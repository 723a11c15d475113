"""What carries a node dies, and Spark brings another one: the training begins anew with it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from sparkdl.core.deadline import Deadline
from sparkdl.driver.lifecycle.state import Running
from sparkdl.driver.options import Observe
from sparkdl.driver.view import View
from tests.doubles.nodes import Lines
from tests.driver.executors import map_funs
from tests.driver.executors.test_spark_integration import has_no_jobs, launch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BACK_S = 90.0
GONE_S = 15.0


def java_in(folder: str) -> psutil.Process:
    """Return the JVM that runs in a folder; others end meanwhile, or are zombies and have none."""
    return next(
        process
        for process in psutil.process_iter(["name", "cwd"])
        if process.info["name"] == "java" and process.info["cwd"] == folder
    )


def executor_of(agent: int) -> psutil.Process:
    """Return an agent's executor: they share a folder. The Python worker between may have ended."""
    executor = java_in(psutil.Process(agent).cwd())
    assert "CoarseGrainedExecutorBackend" in " ".join(executor.cmdline())
    return executor


def wait_until_gone(pids: set[int]) -> None:
    alive = {pid for pid in pids if psutil.pid_exists(pid)}
    _gone, left = psutil.wait_procs([psutil.Process(pid) for pid in alive], GONE_S)
    assert not left


def node_processes(lines: Lines, world: int = 0) -> tuple[int, set[int], set[int]]:
    """Wait until two children of a world, or of a later one, have printed where they are.

    Returns:
        The world, and the process ids of its agents and children.
    """

    def found() -> tuple[int, set[int], set[int]] | None:
        told = [line.text.split() for line in lines.heard if line.text.startswith("world ")]
        for now in sorted({int(words[1]) for words in told}):
            pids = {(int(words[3]), int(words[5])) for words in told if words[1] == str(now)}
            if now >= world and len(pids) == 2:
                return now, {agent for _, agent in pids}, {child for child, _ in pids}
        return None

    with lines.changed:
        there = lines.changed.wait_for(found, BACK_S)
    assert there, lines.heard
    return there


def kill_executor(spark: SparkSession, agent: psutil.Process) -> None:
    executor_of(agent.pid).kill()


def test_detached_nodes_come_back_though_their_job_has_ended(spark_cluster: SparkSession) -> None:
    lines = Lines()
    with launch(
        spark_cluster,
        map_funs.wait_in_the_first_world,
        max_restarts=2,
        observe=Observe(on_log=lines),
    ) as cluster:
        _, agents, children = node_processes(lines)
        assert has_no_jobs(spark_cluster)
        assert all(psutil.pid_exists(pid) for pid in agents | children)
        kill_executor(spark_cluster, psutil.Process(min(agents)))
        results = cluster.results(BACK_S)
        assert has_no_jobs(spark_cluster)
    assert [result[0] for result in results] == [0, 1]
    wait_until_gone(agents | children)


def test_rows_of_a_lost_executor_are_fed_again_and_no_others(
    spark_cluster: SparkSession, tmp_path: Path
) -> None:
    """It takes a node, and the tasks that feed, with it."""
    lines = Lines()
    frame = spark_cluster.range(0, 300, 1, numPartitions=4)
    with (
        launch(
            spark_cluster,
            map_funs.use_rows,
            {"stops_at": 14},
            max_restarts=2,
            checkpoint_dir=str(tmp_path),
            observe=Observe(on_log=lines),
        ) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        feeding = pool.submit(cluster.feed, frame, 2)
        saved = cluster._controller.wait_for(
            lambda view: has_checkpoint(view, 12), Deadline.after(BACK_S)
        )
        assert saved, cluster.status()
        _, agents, children = node_processes(lines)
        kill_executor(spark_cluster, psutil.Process(min(agents)))
        report = feeding.result(BACK_S)
        results = cluster.results(BACK_S)
        assert "was lost" in cluster.status()
    wait_until_gone(agents | children)
    assert (report.rows_fed, report.rows_used, report.epochs) == (600, 600, 2)
    assert report.rows_covered == 2 * 12 * 8
    assert sorted(row for rows in results for row in rows) == sorted(2 * list(range(300)))


def has_checkpoint(view: View, step: int) -> bool:
    made = view.state.roster.checkpoint if isinstance(view.state, Running) else None
    return made is not None and made.step >= step
