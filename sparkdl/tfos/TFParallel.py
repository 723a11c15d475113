"""TensorFlowOnSpark's `TFParallel`: runs of one function that know nothing of each other.

Runs in: driver, feeder, child

With `use_barrier` they are the nodes of one cluster, all at once; without, each is a cluster of its
own inside a Spark task, and starts when a task slot is free.
https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/TFParallel.py
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkdl.control.values import decode_value, encode_value
from sparkdl.core.errors import ConfigError, LaunchError, NodeFailedError
from sparkdl.core.jobs import named_jobs
from sparkdl.core.options import Feeding
from sparkdl.core.settings import Settings
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.driver.executors.sessions import default_fs, session_of
from sparkdl.driver.launch import launch
from sparkdl.driver.payload import pickle_user_code
from sparkdl.driver.slots.placement import EXECUTORS_WAIT_S, may_come, needs, read_topology
from sparkdl.node.task import Problem, parse_problem
from sparkdl.tfos.TFSparkNode import TFNodeContext
from sparkdl.tfos.util import num_gpus

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from sparkdl.node.context import NodeContext

__all__ = ["run"]


def run(
    sc: SparkContext | SparkSession | None,
    map_fn: Callable[[Any, Any], Any],
    tf_args: Any,
    num_executors: int,
    use_barrier: bool = True,
) -> list[Any]:
    """Run `map_fn(tf_args, ctx)` `num_executors` times, and return when all have returned.

    `ctx` is a `TFNodeContext` with `executor_id` (`worker_num`) from 0, `num_workers`, `defaultFS`
    and `working_dir`; the runs are independent, and none is fed.

    Args:
        sc: the SparkContext or session; over Spark Connect the session. `None` for the active one.
        tf_args: anything picklable; a list becomes `sys.argv` in the runs; `num_gpus` is read from
            a namespace or dict.
        num_executors: how many runs.
        use_barrier: all runs at once, so there have to be as many task slots. The call waits a
            moment for executors, longer only if Spark's settings promise enough of them. `False`
            runs them as slots come free, and Spark repeats one that has failed
            (`spark.task.maxFailures`).

    Raises:
        ConfigError: if an option is invalid or the cluster lacks room; nothing was started.
        NodeFailedError: if a run failed, with all runs at once.
        ResultError: if what a run returned cannot travel.
        LaunchError: if a run failed otherwise, or could not be started; it names the root cause.
    """
    if num_executors < 1:
        raise ConfigError(f"num_executors={num_executors} must be at least 1")
    pickle_user_code(map_fn, tf_args)  # which names what cannot be pickled
    session = session_of(sc)
    one = Run(map_fn, num_executors, default_fs(session), os.getcwd())
    if use_barrier:
        options: dict[str, Any] = {"num_gpus": num_gpus(tf_args), "feeding": Feeding(fed=False)}
        _check_slots(session, num_executors, **options)
        with launch(sc, one, tf_args, num_executors, framework="plain", **options) as cluster:
            return cluster.results()
    task = RunTask(one, tf_args)
    tasks = session.range(num_executors, numPartitions=num_executors)
    try:
        with named_jobs(session, "sparkdl", f"{num_executors} runs of TFParallel"):
            rows = tasks.mapInArrow(task, "run long, returned binary").collect()
    except Exception as error:
        problem = parse_problem(str(error))
        text = f"a run of TFParallel failed: {problem.text if problem else error}"
        raise LaunchError(text) from error
    return [decode_value(bytes(row.returned)) for row in sorted(rows)]


@dataclass(frozen=True)
class Run:
    """`map_fun` of a node: calls `map_fn` with the context of a run that is alone.

    Attributes:
        index: which run this is; `None` for the number of the node.
    """

    map_fn: Callable[[Any, Any], Any]
    num_workers: int
    default_fs: str
    working_dir: str
    index: int | None = None

    def __call__(self, args: Any, ctx: NodeContext) -> Any:
        alone = TFNodeContext(
            executor_id=ctx.executor_id if self.index is None else self.index,
            defaultFS=self.default_fs,
            working_dir=self.working_dir,
        )
        alone.num_workers = self.num_workers
        return self.map_fn(args, alone)


@dataclass(frozen=True)
class RunTask:
    """For `DataFrame.mapInArrow`: each row is the number of a run."""

    run: Run
    args: Any

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run each as a cluster of one node on this executor; give what each returned."""
        for number in chain.from_iterable(batch["id"].to_pylist() for batch in batches):
            one = replace(self.run, index=number)
            options: dict[str, Any] = {"executor": "local", "framework": "plain"}
            options |= {"feeding": Feeding(fed=False), "num_gpus": num_gpus(self.args)}
            try:
                with launch(None, one, self.args, 1, **options) as cluster:
                    (returned,) = cluster.results()
            except NodeFailedError as error:
                raise Problem(type(error).__name__, str(error)).error() from error
            yield pa.record_batch({"run": [number], "returned": [encode_value(returned)]})


def _check_slots(spark: SparkSession, runs: int, feeding: Feeding, **options: Any) -> None:
    """Check that all runs fit, unless Spark's settings promise executors that have not come yet.

    A barrier stage of Spark fails where it has fewer slots than tasks, so programs expect it.
    """
    settings = Settings(feeding=feeding)
    spec = ClusterSpec("", plan_nodes(runs), framework="plain", settings=settings, **options)
    topology = read_topology(spark, spec, EXECUTORS_WAIT_S)
    if topology and math.isinf(topology.most) and may_come(spec, topology):
        raise ConfigError(
            f"num_executors={runs}: {needs(runs)} at once, and Spark has {topology.describe()}. "
            "Ask for fewer runs, give Spark more executors or cores, or set use_barrier=False, "
            "which starts runs as slots come free"
        )
