"""Names of Horovod's that have no place here, and what to use instead.

Runs in: anywhere
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from sparkdl.core.errors import RemovedModuleError

_PACKAGE = "sparkdl.horovod."
_SERVICE = (
    "TensorFlow's data service beside the training: feed the rows by cluster.feed, or let nodes "
    "read files by sparkdl.parquet"
)
_ENGINE = "a part of Horovod's own launcher or engine, for which sparkdl has its own"
_ON_SPARK = f"{_ENGINE}: call sparkdl.horovod.spark.run"
_AGGREGATION = f"{_ENGINE}: DistributedOptimizer(backward_passes_per_step=…) adds gradients up"
_ADVICE = {
    "_keras": f"{_ENGINE}: import sparkdl.horovod.keras or sparkdl.horovod.tensorflow.keras",
    "data": "a loader that reads ahead: use torch.utils.data.DataLoader(num_workers=…), or "
    "ctx.torch_dataset",
    "mxnet": "Horovod for Apache MXNet, which has been retired: use PyTorch or TensorFlow",
    "ray": "Horovod's launcher on Ray: sparkdl.horovod.spark.run starts the processes on Spark, "
    "sparkdl.horovod.run on this machine",
    "runner": f"{_ENGINE}: call sparkdl.horovod.run, or in a shell `sparkdl run -np 2 python "
    "train.py`",
    "spark.common": "for Horovod's estimators, which copy their data into a Store: "
    "sparkdl.KerasEstimator and sparkdl.TorchDistributor(feed=df) need none",
    "spark.conf": _ON_SPARK,
    "spark.data_loaders": "for Horovod's estimators: use ctx.torch_dataset",
    "spark.driver": _ON_SPARK,
    "spark.gloo_run": _ON_SPARK,
    "spark.keras": "Horovod's KerasEstimator: use sparkdl.KerasEstimator, which needs no Store",
    "spark.lightning": "Horovod's estimator for Lightning: give a function with a Trainer, and the "
    "DataFrame, to sparkdl.TorchDistributor(feed=df), see docs/lightning.md",
    "spark.mpi_run": _ON_SPARK,
    **dict.fromkeys(
        (
            *("spark.runner._get_indices_in_rank_order", "spark.runner._launch_job"),
            *("spark.runner._make_mapper", "spark.runner._make_spark_thread"),
            *("spark.runner._notify_and_register_task_addresses", "spark.runner._task_fn"),
            *("spark.runner._register_task_addresses", "spark.task.gloo_exec_fn"),
            *("spark.task.mpirun_exec_fn", "spark.task.task_info", "spark.task.task_service"),
        ),
        _ON_SPARK,
    ),
    "spark.tensorflow": _SERVICE,
    "spark.torch": "Horovod's TorchEstimator: give the training function and the DataFrame to "
    "sparkdl.TorchDistributor(feed=df), see docs/pytorch.md",
    "tensorflow.data": _SERVICE,
    "tensorflow.gradient_aggregation": _AGGREGATION,
    "tensorflow.gradient_aggregation_eager": _AGGREGATION,
}
"""What each module or name is, and what to use. What is said of a package holds of its modules."""


class AbsentModules(MetaPathFinder):
    """Says what to use instead of a module of Horovod's. It is asked after all other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Raise for a module of Horovod's; leave others to the usual error.

        Raises:
            RemovedModuleError: an ImportError, as without this.
        """
        refuse(fullname)


def absent_name(module: str, name: str) -> Any:
    """Raise for a name that a module lacks: the `__getattr__` of modules that Horovod fills more.

    Raises:
        RemovedModuleError: if it is Horovod's, see `refuse`.
        AttributeError: for others.
    """
    refuse(f"{module}.{name}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def refuse(fullname: str) -> None:
    """Raise for a module or a name of Horovod's that is absent; do nothing for others.

    Raises:
        RemovedModuleError: an ImportError, because `from module import name` keeps its message.
    """
    name = fullname.removeprefix(_PACKAGE)
    while name != fullname and name not in _ADVICE:
        name = name.rpartition(".")[0] or fullname
    if name != fullname:
        raise RemovedModuleError(
            f"sparkdl has no {fullname}: it is {_ADVICE[name]}. See docs/horovod.md"
        )
