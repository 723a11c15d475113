"""`MirroredStrategyRunner` of spark-tensorflow-distributor, by sparkdl's launcher.

Runs in: driver

https://github.com/tensorflow/ecosystem/tree/master/spark/spark-tensorflow-distributor
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError, SparkConfigError
from sparkdl.core.jobs import context_of
from sparkdl.core.links import docs_page
from sparkdl.core.options import Feeding
from sparkdl.driver.launch import launch
from sparkdl.driver.options import Observe
from sparkdl.driver.payload import pickled
from sparkdl.frameworks.tensorflow import InStrategy
from sparkdl.torch_distributor import active_session, check_encryption
from sparkdl.torch_program import Program, value_of

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_IGNORE_SSL = "tensorflow.spark.distributor.ignoreSsl"


class MirroredStrategyRunner:
    """Runs a TensorFlow training function on several nodes, which compute the same weights.

    Args:
        num_slots: how many GPUs train in all; without GPUs, how many task slots.
        local_mode: whether one process of the driver's machine trains, with that many GPUs.
        use_gpu: whether nodes have GPUs: as many each as Spark gives to a task.
        gpu_resource_name: accepted if it is `gpu`, the only name that Spark's own GPUs have.
        use_custom_strategy: whether the function makes its own `tf.distribute` strategy. Otherwise
            it is called in the scope of a `MultiWorkerMirroredStrategy`.
        options: of `sparkdl.launch`, by keyword: `observe`, `startup`, `max_restarts`, …

    Raises:
        ConfigError: a ValueError, if `num_slots` is no positive number, or cannot be shared out.
        SparkConfigError: a RuntimeError, if `use_gpu` and Spark's configuration has no GPUs.
    """

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
        self._spark = active_session("MirroredStrategyRunner", "", is_needed=not local_mode)
        self._is_here = local_mode
        self._use_custom_strategy = use_custom_strategy
        self._num_gpus = num_slots if use_gpu else 0
        self._num_tasks = 1 if local_mode else num_slots
        if self._spark is not None and use_gpu and not local_mode:
            self._num_tasks, self._num_gpus = _shared_out(self._spark, num_slots)
        self._options = {"observe": Observe(log_to_driver=True), **options}

    @property
    def sc(self) -> SparkContext | None:
        """The SparkContext; `None` with `local_mode`, and over Spark Connect."""
        return None if self._is_here or self._spark is None else context_of(self._spark)

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
        if self._spark is not None and not self._is_here:
            check_encryption(self._spark, _IGNORE_SSL, "TensorFlow")
        train = train_fn if self._use_custom_strategy else InStrategy(train_fn)
        pickled(partial(train, **kwargs), None)  # names what cannot be
        is_here = self._is_here
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
            # Executors do not see the driver's folder, so there values travel as results.
            program = Program(train, (), kwargs, "first", folder if is_here else None, False)
            launched = launch(
                *(None if is_here else self._spark, program, None, self._num_tasks),
                executor="local" if is_here else "spark",
                num_gpus=self._num_gpus,
                feeding=Feeding(fed=False),
                **self._options,
            )
            with launched as cluster:
                return value_of(cluster.results()[0])


def _shared_out(spark: SparkSession, num_slots: int) -> tuple[int, int]:
    """Return how many nodes there are, and the GPUs of each.

    Raises:
        SparkConfigError: if Spark gives no GPUs to tasks.
        ConfigError: if some node would have fewer GPUs than others.
    """
    key = "spark.task.resource.gpu.amount"
    amount = int(float(spark.conf.get(key, "0") or 0))
    if amount < 1:
        raise SparkConfigError(
            f"use_gpu=True needs GPUs for Spark's tasks, and {key} is below 1 or unset. Set it "
            f"({docs_page('gpus')}), or use_gpu=False"
        )
    # A single task has more GPUs than are asked for.
    if num_slots < amount:
        return 1, num_slots
    if num_slots % amount:
        raise ConfigError(
            f"num_slots={num_slots}: must be a multiple of the {amount} GPUs that each task has "
            f"({key}), so that all nodes have equally many"
        )
    return num_slots // amount, amount
