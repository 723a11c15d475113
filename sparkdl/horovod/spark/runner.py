"""`run` and `run_elastic`: call a function in all processes of a training, return its results.

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/runner.py
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TextIO

from pyspark.sql import SparkSession

from sparkdl.core.errors import ConfigError
from sparkdl.core.jobs import context_of
from sparkdl.core.namesakes import missing_name
from sparkdl.core.options import Feeding, Recovery, Startup
from sparkdl.driver.executors.sessions import session_of
from sparkdl.driver.launch import launch
from sparkdl.driver.options import LogLine, Observe, reads_own_data
from sparkdl.horovod.spark.task import Task
from sparkdl.torch_program import value_of

_log = logging.getLogger(__name__)
__getattr__ = partial(missing_name, __name__)
_START_TIMEOUT_S = 600.0
# Horovod's default is no limit; sparkdl still gives up what fails the same way twice.
_ENDLESS_RESTARTS = 1000
_INSTEAD = {
    "executable": "set PYSPARK_PYTHON, Spark's own name for it",
    "host_discovery_script": "Spark finds the hosts: use sparkdl.horovod.spark.run_elastic",
    "nics": "leave it out. Where nodes choose a wrong address, set SPARKDL_NODE_HOST on the "
    "executors, the address under which others reach them",
    "output_filename": "give stdout=, a stream that gets the lines of all processes",
    "use_mpi": "leave it out: sparkdl uses no MPI",
}


def run(  # noqa: PLR0913 (Horovod's options)
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int | None = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    **options: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in `num_proc` processes on Spark; return the results by rank.

    The processes find each other by `hvd.init()`, of `sparkdl.horovod.torch`, `tensorflow` or
    `keras`.

    Args:
        fn: its result may be anything that can be pickled; from other machines some 12 MB at most.
        num_proc: how many; by default Spark's default parallelism.
        start_timeout: seconds until all must be there; by default `HOROVOD_SPARK_START_TIMEOUT`, or
            600.
        use_gloo: accepted; it is used anyway.
        extra_mpi_args: accepted; without MPI it has no effect, as in Horovod.
        env: variables to set in each process.
        stdout, stderr: where the lines of the processes go, as `[rank]<stdout>:line`; by default
            to the streams of this process. Standard error of C code and of subprocesses goes to
            `stdout`.
        verbose: 0 for no lines, unless a stream is given; `None` is 1.
        prefix_output_with_timestamp: whether lines begin with the time.
        options: further ones of `sparkdl.launch`: `spark`, `framework`, `num_gpus`, `executor`.

    Raises:
        ConfigError: for `use_mpi`, `nics` or `executable`; if an argument is invalid, or Spark has
            too few task slots.
        ReservationTimeoutError: if not all processes were there in time.
        NodeFailedError: if a process failed; a RuntimeError, as in Horovod. Errors of
            `sparkdl.launch` pass through.
    """
    refuse(use_mpi=use_mpi, nics=nics, executable=executable)
    is_silent = verbose == 0 and stdout is None and stderr is None
    printer = None if is_silent else _Printer(stdout, stderr, prefix_output_with_timestamp)
    task = Task(fn, tuple(args), kwargs or {}, env or {}, bool(printer))
    if any(not isinstance(item, str) for pair in task.env.items() for item in pair):
        raise ConfigError(f"env={task.env!r}: names and values must be strings")
    spark, is_one_machine = options.pop("spark", None), True
    if options.get("executor", "spark") == "local":
        if num_proc is None:
            raise ConfigError("executor='local' needs num_proc: how many processes")
        spark = None
    else:
        spark = session_of(spark)
        if num_proc is None:
            num_proc = default_num_proc(spark)
            _log.info("Starting %d processes, Spark's default parallelism", num_proc)
        context = context_of(spark)  # the host of a Spark Connect server may be another one
        is_one_machine = context is not None and str(context.master).startswith("local")
    if start_timeout is None:
        start_timeout = _seconds("HOROVOD_SPARK_START_TIMEOUT", _START_TIMEOUT_S)
    observe = options.get("observe", Observe())
    # The user's own choice of lines wins over Horovod's printing.
    if observe.log_to_driver is None and observe.on_log is None:
        observe = replace(observe, log_to_driver=False, on_log=printer)
    options = {
        "framework": "plain",  # Horovod's functions connect by `hvd.init`
        **options,
        "feeding": reads_own_data(options.get("feeding", Feeding())),
        "observe": observe,
        "startup": replace(options.get("startup", Startup()), timeout_s=start_timeout),
    }
    with ExitStack() as stack:
        if is_one_machine:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sparkdl-"))
            # On one machine a file is the way for results of any size; connections limit a message.
            task = replace(task, folder=folder)
        if options.get("checkpoint_dir", "") is None:
            if not is_one_machine:
                raise ConfigError(
                    "run_elastic(checkpoint_dir=...) must be a path or URL that all nodes reach: "
                    "state.commit() is kept there, and a restart resumes from it"
                )
            options["checkpoint_dir"] = f"{task.folder}/commits"
        cluster = stack.enter_context(launch(spark, task, None, num_proc, **options))
        return [value_of(data) for data in cluster.results()]


def run_elastic(  # noqa: PLR0913 (Horovod's options)
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    *,
    min_np: int | None = None,
    max_np: int | None = None,
    checkpoint_dir: str | None = None,
    **options: Any,
) -> list[Any]:
    """Call `fn` as `run` does, again and again after failures, at the last `state.commit()`.

    Args:
        fn, args, kwargs, num_proc, start_timeout: see `run`. After a loss lines still begin with
            the rank that their process had at the start.
        min_num_proc: continue with at least this many if lost ones stay away; by default all.
        max_num_proc: accepted; there are never more than `num_proc`.
        elastic_timeout: seconds that a restart waits for lost processes; by default
            `HOROVOD_ELASTIC_TIMEOUT`, or 600.
        reset_limit: how many restarts there may be within an hour; by default 1000.
        min_np, max_np: Horovod's older names.
        checkpoint_dir: path or URL of a folder that all nodes reach, where commits are kept; a
            training resumes from the last one in it. By default a temporary one, if all processes
            are on this machine.
        options: of `run`, by keyword.

    Returns:
        The results of the processes that were there at the end, by rank.

    Raises:
        ConfigError: without `checkpoint_dir` on a cluster; see `run`.
        NodeFailedError: if it failed more often than that, or twice the same way.
    """
    if elastic_timeout is None:
        elastic_timeout = _seconds("HOROVOD_ELASTIC_TIMEOUT", _START_TIMEOUT_S)
    options |= {
        "checkpoint_dir": checkpoint_dir,
        "max_restarts": _ENDLESS_RESTARTS if reset_limit is None else reset_limit,
        "recovery": replace(
            options.get("recovery", Recovery()),
            min_nodes=min_num_proc or min_np,
            wait_s=elastic_timeout,
        ),
    }
    return run(fn, args, kwargs, num_proc, start_timeout, **options)


def default_num_proc(spark: SparkSession | None = None) -> int:
    """Return Spark's default parallelism.

    Raises:
        ConfigError: without a Spark session, or with one of Spark Connect, which does not show it.
    """
    context = context_of(session_of(spark))
    if context is None:
        raise ConfigError("a Spark Connect server does not show its cores: set num_proc")
    return int(context.defaultParallelism)


@dataclass(frozen=True)
class _Printer:
    """Writes the lines of all processes to two streams, in Horovod's form."""

    stdout: TextIO | None
    stderr: TextIO | None
    with_time: bool

    def __call__(self, line: LogLine) -> None:
        now = time.asctime() if self.with_time else ""
        name = "stderr" if line.is_error else "stdout"
        # Looked up at each line, because notebooks and tests replace `sys.stdout`.
        stream = (self.stderr if line.is_error else self.stdout) or getattr(sys, name)
        stream.write(f"{now}[{line.node.removeprefix('worker:')}]<{name}>:{line.text}\n")
        stream.flush()


def refuse(**given: Any) -> None:
    """Refuse options of Horovod's that are given, and say what to use instead."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name}={value!r}: {_INSTEAD[name]}")


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise ConfigError(f"{variable}={text!r} must be a number of seconds") from None
