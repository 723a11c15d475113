"""Backends run the processes of a training: `SparkBackend`, or a user's own.

Runs in: driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/common/backend.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparkdl.horovod.spark.runner import default_num_proc as default_num_proc
from sparkdl.horovod.spark.runner import refuse, run


class Backend:
    """Runs a function in processes that train together; derive from it to run them elsewhere."""

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, env: Any = None
    ) -> Any:
        """Call `fn` in each process, where `hvd.init()` finds the others; return results by rank.

        Args:
            env: variables to set in each process.
        """
        raise NotImplementedError

    def num_processes(self) -> int:
        """Return how many processes there will be."""
        raise NotImplementedError


class SparkBackend(Backend):
    """Runs the processes by `sparkdl.horovod.spark.run`.

    Args:
        num_proc: how many; by default Spark's default parallelism.
        env: variables to set in each process.
        kwargs: further arguments of `sparkdl.horovod.spark.run`.

    Raises:
        ConfigError: for `use_mpi`, `nics` or `executable`.
    """

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        # Here, because an estimator writes all rows before it calls `run`.
        refuse(**{name: kwargs.get(name) for name in ("use_mpi", "nics", "executable")})
        self._num_proc = num_proc or default_num_proc()
        self._env = dict(env or {})
        self._kwargs = kwargs

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, env: Any = None
    ) -> Any:
        """See `Backend.run`."""
        own = {**self._env, **(env or {})}
        # A driver hides GPUs from itself by this; the processes are given theirs.
        own.pop("CUDA_VISIBLE_DEVICES", None)
        return run(fn, args, kwargs, num_proc=self._num_proc, env=own, **self._kwargs)

    def num_processes(self) -> int:
        """See `Backend.num_processes`."""
        return self._num_proc
