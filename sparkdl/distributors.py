"""`TorchDistributor`, `DeepspeedTorchDistributor` and `MirroredStrategyRunner`, by our launcher.

Runs in: driver

https://spark.apache.org/docs/latest/api/python/reference/api/pyspark.ml.torch.distributor.TorchDistributor.html
https://spark.apache.org/docs/latest/api/python/reference/api/pyspark.ml.deepspeed.deepspeed_distributor.DeepspeedTorchDistributor.html
https://github.com/tensorflow/ecosystem/tree/master/spark/spark-tensorflow-distributor
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError, SparkConfigError
from sparkdl.core.options import Feeding
from sparkdl.driver.launch import launch
from sparkdl.driver.options import Observe
from sparkdl.driver.payload import pickled
from sparkdl.frameworks.tensorflow import InStrategy
from sparkdl.torch_program import Program, script_of, value_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)
_IGNORE_SSL = "pytorch.spark.distributor.ignoreSsl"


class _Distributor:
    """Runs one function or program on all nodes; the first one returns its value."""

    _framework = "tensorflow"
    ssl_conf: str
    """The setting that allows to train unencrypted where Spark encrypts."""
    spark: SparkSession | None

    def _set_up(self, local_mode: bool, options: dict[str, Any]) -> None:
        from sparkdl.driver.executors.sessions import active_session

        self.local_mode = local_mode
        self.spark = active_session()
        if self.spark is None and not local_mode:
            raise SparkConfigError(
                f"{type(self).__name__} needs an active SparkSession: create one first. Only "
                "local_mode=True works without"
            )
        self._options = {"observe": Observe(log_to_driver=True), **options}

    def _program(self, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        if isinstance(what, str):
            if kwargs:
                raise ConfigError(
                    "Running pytorch file does not support key-word type arguments: "
                    f"{', '.join(kwargs)}. Give them as '--name=value'"
                )
            return Program(script_of(what), args, {})
        if not callable(what):
            raise ConfigError(
                f"train_object must be a function or a path, not {type(what).__name__}"
            )
        pickled(partial(what, *args, **kwargs), None)  # names what cannot be
        return Program(what, args, kwargs)

    def _value(
        self, program: Program, nodes: int, num_gpus: int, feed: Any = None, epochs: int = 1
    ) -> Any:
        if self.spark is not None and not self.local_mode:
            _check_encryption(self.spark, self.ssl_conf)
        feeding = replace(self._options.get("feeding", Feeding()), fed=feed is not None)
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
            if self.local_mode:  # executors do not see it, so there values travel as results
                program = replace(program, folder=folder)
            with launch(
                None if self.local_mode else self.spark,
                program,
                None,
                nodes,
                framework=self._framework,
                executor="local" if self.local_mode else "spark",
                num_gpus=num_gpus,
                **{**self._options, "feeding": feeding},
            ) as cluster:
                if feed is not None:
                    cluster.feed(feed, epochs=epochs)
                return value_of(cluster.results()[0])


class TorchDistributor(_Distributor):
    """Runs a PyTorch function or program in several processes, on Spark or on the driver.

    Takes the arguments of pyspark's class, sets the same variables in the processes, and returns
    the same value: only the import changes. Additional arguments follow by keyword. In the
    function `sparkdl.node.context.current()` is the node's context: its feed, its checkpoints.

    Args:
        num_processes: how many processes train.
        local_mode: whether they run on this machine, not on Spark's executors.
        use_gpu: whether each process has a GPU; without, it sees none.
        feed: data for the training: a DataFrame, an RDD, files of `sparkdl.parquet`; with
            `local_mode` rows, a `pyarrow.Table` or such files. The function reads
            `current().torch_dataset(…)`.
        epochs: how often it is fed.
        options: of `sparkdl.launch`: `max_restarts`, `checkpoint_dir`, `observe`, … By default
            what the processes print is printed, as pyspark does.

    Raises:
        ValueError: if `num_processes` is less than 1.
        RuntimeError: without an active SparkSession, unless `local_mode`.
    """

    _framework = "torch"

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool = True,
        use_gpu: bool = True,
        _ssl_conf: str = _IGNORE_SSL,
        *,
        feed: Any = None,
        epochs: int = 1,
        **options: Any,
    ) -> None:
        if num_processes <= 0:
            raise ConfigError(f"num_processes has to be a positive integer, not {num_processes}")
        self._set_up(local_mode, options)
        self.num_processes, self.use_gpu, self.ssl_conf = num_processes, use_gpu, _ssl_conf
        self._feed, self._epochs = feed, epochs

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Run it in all processes, and return what the first one returned.

        Args:
            train_object: a function, called with `args` and `kwargs`; or the path of a program on
                this machine, which runs as `__main__` with `args` as its command line.

        Returns:
            The value of rank 0: anything that can be pickled, up to some 12 MB unless `local_mode`;
            `None` for a program.

        Raises:
            ValueError: if a program is given keyword arguments, or something cannot be pickled.
            RuntimeError: if Spark is set to encrypt its connections (`spark.ssl.enabled`), or
                there are too few GPUs.
            NodeFailedError: if a process failed, with its own error as root cause; a RuntimeError,
                as pyspark's.
            ResultError: if the value cannot travel.
        """
        program = self._program(train_object, args, kwargs)
        num_gpus = int(self.use_gpu)
        return self._value(program, self.num_processes, num_gpus, self._feed, self._epochs)

    def _program(self, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        return replace(super()._program(what, args, kwargs), is_own_group=not self.local_mode)


class DeepspeedTorchDistributor(TorchDistributor):
    """Runs a function or program that trains with DeepSpeed in several processes.

    A program finds `--deepspeed`, and with a configuration `--deepspeed_config FILE`, behind its
    own arguments, a function in `sys.argv`; the file is there on each node. DeepSpeed has to be
    installed where the processes run, not on the driver.

    Args:
        numGpus: processes on each node, each with one GPU if `useGpu`.
        nnodes: how many nodes; sparkdl starts `numGpus * nnodes` processes, wherever Spark has
            room for them.
        localMode: whether they run on this machine, not on Spark's executors.
        useGpu: whether each process has a GPU; without, it sees none.
        deepspeedConfig: DeepSpeed's configuration as a dict, or the path of its JSON file on this
            machine.
        options: of `TorchDistributor`, by keyword: `feed`, `max_restarts`, `checkpoint_dir`, …

    Raises:
        ConfigError: a ValueError, if a number is below 1, or the configuration is no JSON object,
            or cannot be read; and what `TorchDistributor` raises.
    """

    def __init__(
        self,
        numGpus: int = 1,  # noqa: N803 (pyspark's names)
        nnodes: int = 1,
        localMode: bool = True,  # noqa: N803
        useGpu: bool = True,  # noqa: N803
        deepspeedConfig: str | Mapping[str, Any] | None = None,  # noqa: N803
        **options: Any,
    ) -> None:
        for name, value in (("numGpus", numGpus), ("nnodes", nnodes)):
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        self.deepspeed_config = deepspeedConfig
        # The text itself, because the nodes may not see the driver's file.
        self._config = _json_of(deepspeedConfig)
        super().__init__(
            *(numGpus * nnodes, localMode, useGpu, "deepspeed.spark.distributor.ignoreSsl"),
            **options,
        )

    def _program(self, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        return replace(super()._program(what, args, kwargs), deepspeed=self._config)


class MirroredStrategyRunner(_Distributor):
    """Runs a TensorFlow training function on several nodes, which compute the same weights.

    Args:
        num_slots: how many GPUs train in all; without GPUs, how many task slots.
        local_mode: whether one process of the driver's machine trains, with that many GPUs.
        use_gpu: whether nodes have GPUs: as many each as Spark gives to a task, at least one.
        gpu_resource_name: accepted if it is `gpu`, the only name that Spark's own GPUs have.
        use_custom_strategy: whether the function makes its own `tf.distribute` strategy. Otherwise
            it is called in the scope of a `MultiWorkerMirroredStrategy`.
        options: of `sparkdl.launch`, by keyword: `observe`, `startup`, `max_restarts`, …

    Raises:
        ConfigError: a ValueError, if `num_slots` is no positive number, or cannot be shared out.
        SparkConfigError: a RuntimeError, without an active SparkSession, unless `local_mode`.
    """

    ssl_conf = "tensorflow.spark.distributor.ignoreSsl"

    def __init__(
        self,
        *,
        num_slots: int,
        local_mode: bool = False,
        use_gpu: bool = True,
        gpu_resource_name: str = "gpu",
        use_custom_strategy: bool = False,
        **options: Any,
    ) -> None:
        if num_slots <= 0:
            raise ConfigError(
                f"num_slots is set to {num_slots} but cannot be less than or equal to 0"
            )
        if use_gpu and gpu_resource_name != "gpu":
            raise ConfigError(
                f"gpu_resource_name={gpu_resource_name!r}: must be 'gpu'; name the resource so in "
                "Spark's configuration (spark.executor.resource.gpu.amount)"
            )
        if local_mode and not use_gpu and num_slots > 1:
            raise ConfigError(
                f"num_slots={num_slots}: Cannot run with more than 1 CPU machine in local mode. "
                "Set num_slots=1, or local_mode=False"
            )
        self._set_up(local_mode, options)
        self._use_custom_strategy = use_custom_strategy
        self._num_tasks, self._num_gpus = 1 if local_mode else num_slots, num_slots
        if not use_gpu:
            self._num_gpus = 0
        elif self.spark is not None and not local_mode:
            self._num_tasks, self._num_gpus = _shared_out(self.spark, num_slots)

    def get_num_tasks(self) -> int:
        """Return how many nodes train, each in a task of Spark."""
        return self._num_tasks

    def run(self, train_fn: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `train_fn(**kwargs)` on each node, and return the value of the first one.

        Raises:
            ConfigError: if it cannot work: more nodes than task slots, or no pickle of `train_fn`.
            RuntimeError: if Spark is set to encrypt its connections (`spark.ssl.enabled`).
            NodeFailedError: if a node failed; a RuntimeError.
        """
        train = train_fn if self._use_custom_strategy else InStrategy(train_fn)
        program = self._program(train, (), kwargs)
        return self._value(program, self._num_tasks, self._num_gpus)


def _check_encryption(spark: SparkSession, ignore: str) -> None:
    """Refuse to train unencrypted where Spark encrypts, as pyspark's distributors do."""
    if spark.conf.get("spark.ssl.enabled", "false") != "true":
        return
    text = (
        "spark.ssl.enabled=true asks for TLS encryption, and the framework's own connections "
        "between the nodes have none"
    )
    if spark.conf.get(ignore, "false") != "true":
        raise SparkConfigError(f"{text}. Set {ignore}=true to train anyway")
    _log.warning("%s; %s=true allows it", text, ignore)


def _json_of(config: str | Mapping[str, Any] | None) -> str:
    if config is None:
        return ""
    try:
        text = json.dumps(config) if isinstance(config, Mapping) else Path(config).read_text()
        is_object = isinstance(json.loads(text), dict)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"deepspeedConfig={config!r} cannot be used: {error}. Give a dict, or the path of a "
            "JSON file on the driver"
        ) from error
    if not is_object:
        raise ConfigError(f"deepspeedConfig={config!r}: must hold a JSON object")
    return text


def _shared_out(spark: SparkSession, num_slots: int) -> tuple[int, int]:
    """Return how many nodes there are, and the GPUs of each."""
    key = "spark.task.resource.gpu.amount"
    amount = max(1, int(float(spark.conf.get(key, "1") or 1)))
    # A single task has more GPUs than are asked for.
    if num_slots < amount:
        return 1, num_slots
    if num_slots % amount:
        raise ConfigError(
            f"num_slots={num_slots}: must be a multiple of the {amount} GPUs that each task has "
            f"({key}), so that all nodes have equally many"
        )
    return num_slots // amount, amount
