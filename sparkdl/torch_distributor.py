"""`TorchDistributor`: pyspark's, by sparkdl's launcher.

Runs in: driver

https://spark.apache.org/docs/latest/api/python/reference/api/pyspark.ml.torch.distributor.TorchDistributor.html
"""

from __future__ import annotations

import inspect
import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError, SparkConfigError
from sparkdl.core.links import docs_page
from sparkdl.core.options import Feeding
from sparkdl.driver.launch import launch
from sparkdl.driver.options import Observe
from sparkdl.driver.payload import pickled
from sparkdl.torch_program import Program, Returned, script_of, value_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdl.driver.handle import Cluster

_log = logging.getLogger(__name__)
_OWN = {"spark", "map_fun", "args", "nodes", "framework", "executor", "num_gpus"}
_IGNORE_SSL = "pytorch.spark.distributor.ignoreSsl"


class TorchDistributor:
    """Runs a PyTorch function or program in several processes, on Spark or on the driver.

    Takes the arguments of pyspark's class, sets the same variables in the processes, and returns
    the same: change the import. Additional arguments come after these, by keyword. In the function
    `sparkdl.node.context.current()` is the node's context: its feed, its checkpoints.

    Args:
        num_processes: how many processes train.
        local_mode: whether they run on this machine, not on Spark's executors.
        use_gpu: whether each process has a GPU; without, it sees none.
        feed: data for the training: a DataFrame, an RDD, files of `sparkdl.parquet`; with
            `local_mode` rows, a `pyarrow.Table` or such files. The function reads
            `current().torch_dataset(…)`.
        epochs: how often it is fed.
        max_restarts: how often all processes restart after a failure.
        checkpoint_dir: folder for `ctx.checkpoint`; restarted processes resume from the last one.
        feeding: of `sparkdl.launch`.
        observe: of `sparkdl.launch`; by default what the processes print is printed, as they do.
        options: others of `sparkdl.launch`.

    Raises:
        ValueError: if `num_processes` is less than 1, or an option is unknown.
        RuntimeError: without an active SparkSession, which `local_mode` on CPUs does not need, or
            if Spark's configuration has no GPUs for `use_gpu`.
    """

    def __init__(  # noqa: PLR0913 (pyspark's, and one option one name)
        self,
        num_processes: int = 1,
        local_mode: bool = True,
        use_gpu: bool = True,
        _ssl_conf: str = _IGNORE_SSL,
        *,
        feed: Any = None,
        epochs: int = 1,
        max_restarts: int = 0,
        checkpoint_dir: str | None = None,
        feeding: Feeding = Feeding(),
        observe: Observe = Observe(log_to_driver=True),
        **options: Any,
    ) -> None:
        if num_processes <= 0:
            raise ConfigError(f"num_processes has to be a positive integer, not {num_processes}")
        unknown = options.keys() - (inspect.signature(launch).parameters.keys() - _OWN)
        if unknown:
            raise ConfigError(
                f"TorchDistributor takes no {', '.join(sorted(unknown))}; the options of "
                f"sparkdl.launch that it takes are all but {', '.join(sorted(_OWN))}"
            )
        is_needed = not local_mode or use_gpu
        self.spark = active_session("TorchDistributor", ", use_gpu=False", is_needed=is_needed)
        self.local_mode, self.use_gpu, self.ssl_conf = local_mode, use_gpu, _ssl_conf
        self.num_processes = num_processes
        if use_gpu:
            assert self.spark is not None
            self.num_processes = _with_gpus(self.spark, num_processes, local_mode)
        self._feed, self._epochs, self._feeding = feed, epochs, feeding
        self._options = {
            "max_restarts": max_restarts,
            "checkpoint_dir": checkpoint_dir,
            "observe": observe,
            **options,
        }

    @property
    def num_tasks(self) -> int:
        """How many Spark tasks there are: one for each process."""
        return self.num_processes

    @property
    def input_params(self) -> dict[str, Any]:
        """The arguments, by pyspark's names."""
        names = ("local_mode", "num_processes", "use_gpu", "num_tasks")
        return {name: getattr(self, name) for name in names}

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Run it in all processes, and return what the first one returned.

        Args:
            train_object: a function, called with `args` and `kwargs`; or the path of a program on
                this machine, which runs as `__main__` with `args` as its command line.

        Returns:
            The value of rank 0, anything that can be pickled, without `local_mode` into some 12 MB;
            `None` of a program.

        Raises:
            ValueError: if a program is given keyword arguments, or something cannot be pickled.
            RuntimeError: if Spark is set to encrypt its connections (`spark.ssl.enabled`).
            NodeFailedError: if a process failed, with its own error as root cause; a RuntimeError,
                as pyspark's.
            ResultError: if the value cannot travel.
        """
        return self._run("first", train_object, args, kwargs)[0]

    def run_all(
        self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Do what `run` does, and return the values of all processes, by rank."""
        return self._run("all", train_object, args, kwargs)

    def start(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Cluster:
        """Begin to run it, and return the running cluster, a context manager.

        `cluster.results()` waits, and returns plain values and arrays, by rank. Feed it with
        `cluster.feed`: it does not know of `TorchDistributor(feed=…)`.

        Raises:
            ConfigError: if this distributor was given a `feed`; and what `run` raises.
        """
        if self._feed is not None:
            raise ConfigError(
                "TorchDistributor(feed=…).start() would have to feed behind your back; leave out "
                "feed=, and call cluster.feed(data, epochs=…) or cluster.feed_async"
            )
        return self._launch(self._program("plain", train_object, args, kwargs, None), is_fed=True)

    def _run(
        self, returned: Returned, train_object: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
            program = self._program(returned, train_object, args, kwargs, folder)
            with self._launch(program, is_fed=self._feed is not None) as cluster:
                if self._feed is not None:
                    cluster.feed(self._feed, epochs=self._epochs)
                return [value_of(value) for value in cluster.results()]

    def _program(
        self,
        returned: Returned,
        train_object: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        folder: str | None,
    ) -> Program:
        is_away = not self.local_mode
        if isinstance(train_object, str):
            if kwargs:
                raise ConfigError(
                    "Running pytorch file does not support key-word type arguments: "
                    f"{', '.join(kwargs)}. Give them as '--name=value'"
                )
            return Program(script_of(train_object), args, {}, "none", None, is_away)
        if not callable(train_object):
            raise ConfigError(
                f"train_object must be a function or a path, not {type(train_object).__name__}"
            )
        pickled(partial(train_object, *args, **kwargs), None)  # names what cannot be
        # Executors do not see the driver's folder, so there values travel as results.
        return Program(train_object, args, kwargs, returned, None if is_away else folder, is_away)

    def _launch(self, program: Program, *, is_fed: bool) -> Cluster:
        if not self.local_mode:
            assert self.spark is not None
            check_encryption(self.spark, self.ssl_conf, "PyTorch")
        return launch(
            None if self.local_mode else self.spark,
            program,
            None,
            self.num_processes,
            framework="torch",
            executor="local" if self.local_mode else "spark",
            num_gpus=1 if self.use_gpu else 0,
            feeding=replace(self._feeding, fed=is_fed),
            **self._options,
        )


def check_encryption(spark: SparkSession, ignore: str, framework: str) -> None:
    """Refuse to train unencrypted where Spark encrypts.

    Args:
        ignore: the setting that allows it.

    Raises:
        SparkConfigError: if Spark's `spark.ssl.enabled` is true, and `ignore` is not.
    """
    # As pyspark's distributors do.
    if spark.conf.get("spark.ssl.enabled", "false") != "true":
        return
    text = (
        f"spark.ssl.enabled=true asks for TLS encryption, and {framework}'s own connections "
        "between the nodes have none"
    )
    if spark.conf.get(ignore, "false") != "true":
        raise SparkConfigError(f"{text}. Set {ignore}=true to train all the same")
    _log.warning("%s; %s=true allows it", text, ignore)


def active_session(who: str, unless: str, *, is_needed: bool) -> SparkSession | None:
    """Return the active session.

    Args:
        who: needs it.
        unless: what works without, beside `local_mode=True`.

    Raises:
        SparkConfigError: if there is none, and it is needed.
    """
    from sparkdl.driver.executors import sessions

    session = sessions.active_session()
    if session is None and is_needed:
        raise SparkConfigError(
            f"{who} needs an active SparkSession: create one first. Only local_mode=True{unless} "
            "works without"
        )
    return session


def _with_gpus(spark: SparkSession, num_processes: int, local_mode: bool) -> int:
    """Return how many processes get a GPU.

    Raises:
        SparkConfigError: if Spark is not set up to give GPUs to them.
    """
    if local_mode:
        key = "spark.driver.resource.gpu.amount"
        there = int(spark.conf.get(key, "0") or 0)
        if there < 1:
            raise SparkConfigError(
                f"GPU resources were not configured properly on the driver: {key!r} is unset. "
                "Set it, or use_gpu=False"
            )
        if num_processes > there:
            _log.warning(
                "num_processes=%d is more than the %d GPUs on the driver, and only that many "
                "processes run. Lower num_processes, or set use_gpu=False",
                *(num_processes, there),
            )
        # Fewer processes and no error, as in pyspark.
        return min(num_processes, there)
    keys = ("spark.task.resource.gpu.amount", "spark.executor.resource.gpu.amount")
    task, executor = (float(spark.conf.get(key, "0") or 0) for key in keys)
    if task < 1 and executor < 1:
        raise SparkConfigError(
            f"'{keys[0]}' was unset, so gpu usage is unavailable. Set it or {keys[1]!r}, see "
            f"{docs_page('gpus')}, or use_gpu=False"
        )
    if task > 1:
        raise SparkConfigError(
            f"{keys[0]}={task:g}: here each of the {num_processes} processes is a task of its own, "
            f"with one GPU; set it to 1, or unset it and set {keys[1]!r}"
        )
    return num_processes
