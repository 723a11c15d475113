"""Runs that know nothing of each other: what they are told, and what becomes of their errors."""

from __future__ import annotations

import os
import sys
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from sparkdl.core.errors import ConfigError, LaunchError, NodeFailedError
from sparkdl.core.options import Feeding
from sparkdl.driver.executors import local
from sparkdl.tfos import TFParallel
from sparkdl.tfos.TFSparkNode import TFNodeContext
from tests.doubles.until import until
from tests.driver.slots.test_placement import Executors, context


def tell(args: Any, ctx: TFNodeContext) -> Any:
    """Write what a run is told into a file of its own."""
    folder = args["folder"] if isinstance(args, dict) else args[1]
    told = [
        ctx.worker_num, ctx.executor_id, ctx.num_workers, ctx.job_name, ctx.mgr, ctx.cluster_spec,
        ctx.absolute_path("/data"), ctx.working_dir, sys.argv[0] if isinstance(args, list) else "",
        os.environ.get("TF_CONFIG"), os.getpid() != os.getppid(),
    ]  # fmt: skip
    Path(folder, f"run-{ctx.worker_num}").write_text(repr(told))
    return {"run": ctx.worker_num}


def numbers(*found: int) -> list[pa.RecordBatch]:
    return [pa.record_batch({"id": [number]}) for number in found]


def expected(number: int, count: int, argv0: str = "") -> str:
    return repr(
        [number, number, count, "", None, {}, "file:///data", os.getcwd(), argv0, None, True]
    )


def told(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_task_hands_on_gpus_of_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus(args: dict[str, Any], ctx: TFNodeContext) -> None:
        Path(args["folder"], "gpus").write_text(os.environ["CUDA_VISIBLE_DEVICES"])

    monkeypatch.setattr(local, "assigned_gpus", lambda: ("2", "3", "5"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    args = {"folder": str(tmp_path), "num_gpus": 2}
    list(TFParallel.RunTask(TFParallel.Run(gpus, 1, "file://", "/"), args)(numbers(0)))
    assert told(tmp_path) == {"gpus": "2,3"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((tell, {}, 0), "num_executors=0 must be at least 1"),
        (("tell", {}, 1), "map_fun must be a function"),
        ((tell, {"lock": threading.Lock()}, 1), "the argument 'lock'"),
    ],
)
@pytest.mark.parametrize("use_barrier", [True, False])
def test_what_cannot_work_is_refused_before_anything_starts(
    arguments: tuple[Any, Any, int], text: str, use_barrier: bool
) -> None:
    sc: Any = None
    with pytest.raises(ConfigError, match=text):
        TFParallel.run(sc, *arguments, use_barrier=use_barrier)


def test_more_runs_than_slots_fail_unless_spark_adds_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TFParallel, "EXECUTORS_WAIT_S", 0.1)
    two = Executors((1, 1))
    options: dict[str, Any] = {"feeding": Feeding(fed=False), "num_gpus": None}
    with pytest.raises(ConfigError, match=r"3 nodes need 3 task slots.*use_barrier=False"):
        TFParallel._check_slots(context("spark://m:7077", two), 3, **options)
    promised = context("k8s://m", two, spark_executor_instances="3")
    TFParallel._check_slots(promised, 3, **options)


def test_runs_are_all_at_once_and_give_values(spark_local: SparkSession, tmp_path: Path) -> None:
    def meet(args: list[str], ctx: TFNodeContext) -> Any:
        value = tell(args, ctx)
        until(lambda: len(list(Path(args[1]).iterdir())) == ctx.num_workers)
        return value

    values = TFParallel.run(spark_local.sparkContext, meet, ["me.py", str(tmp_path)], 2)
    assert told(tmp_path) == {f"run-{i}": expected(i, 2, "me.py") for i in range(2)}
    assert values == [{"run": 0}, {"run": 1}]


@pytest.mark.smoke
def test_error_of_a_run_is_told_with_its_own_traceback(
    spark_local: SparkSession,  # where a task that fails does so once, not four times
) -> None:
    def fail(args: Namespace, ctx: TFNodeContext) -> None:
        if ctx.worker_num == ctx.num_workers - 1:
            raise ValueError(f"no such file: {args.data}")

    sc, args = spark_local.sparkContext, Namespace(data="d")
    with pytest.raises(NodeFailedError, match="no such file: d") as caught:
        TFParallel.run(sc, fail, args, 2)
    assert caught.value.root_cause.node == "worker:1"
    with pytest.raises(LaunchError, match="raised ValueError: no such file: d") as told_:
        TFParallel.run(sc, fail, args, 1, use_barrier=False)
    assert "in fail" in str(told_.value)
    assert "java" not in str(told_.value)
    assert sc.parallelize([1]).collect() == [1], "the context stays"
