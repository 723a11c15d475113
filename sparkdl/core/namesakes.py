"""Names of other packages that users look for in `sparkdl`, and their replacements.

Databricks' Deep Learning Pipelines, and the package `sparkdl` on PyPI, which are
imported by the same name; their files may lie in the same folder as these: docs/deployment.md.
And Horovod's names that have no place in `sparkdl.horovod`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from sparkdl.core.texts import docs_page

_SCORE = "sparkdl.KerasEstimator and its KerasModel, or sparkdl.TFModel, score a DataFrame"
_ESTIMATOR = f"use sparkdl.KerasEstimator ({docs_page('spark-ml')})"
_IMAGES = "Spark reads images itself: spark.read.format('image') or format('binaryFile')"
_TFOS = "its modules are in sparkdl.tfos: from sparkdl.tfos import TFCluster"
ADVICE = {
    "DeepImageFeaturizer": _SCORE,
    "DeepImagePredictor": _SCORE,
    "KerasImageFileEstimator": _ESTIMATOR,
    "KerasImageFileTransformer": _SCORE,
    "KerasTransformer": _SCORE,
    "TFImageTransformer": _SCORE,
    "TFInputGraph": _SCORE,
    "TFTransformer": _SCORE,
    "TextEstimator": _ESTIMATOR,
    "estimators": _ESTIMATOR,
    "graph": _SCORE,
    "image": _IMAGES,
    "imageInputPlaceholder": _SCORE,
    "imageSchema": _IMAGES,
    "imageType": _IMAGES,
    "readImages": _IMAGES,
    "transformers": _SCORE,
    "udf": _SCORE,
    "xgboost": "use xgboost.spark, of the package xgboost",
}
"""By name of an attribute or module. An entry for a package applies to its modules."""
_OF_OTHERS = {
    "TFCluster": ("TensorFlowOnSpark", _TFOS),
    "TFNode": ("TensorFlowOnSpark", _TFOS),
    "TFParallel": ("TensorFlowOnSpark", _TFOS),
}
"""Names that people look for here: their home, and the advice."""
_READERS = (
    "read any Parquet files by sparkdl.make_spark_converter('file:///…'), or "
    "ctx.batches(64, feed=sparkdl.parquet(…)), or cluster.feed(sparkdl.parquet(…))"
)
_OF_PETASTORM = {
    **dict.fromkeys(("make_batch_reader", "make_reader", "reader", "tf_utils"), _READERS),
    "pytorch": f"its loaders: call converter.make_torch_dataloader, or {_READERS}",
    **dict.fromkeys(
        ("codecs", "etl", "ngram", "predicates", "unischema"),
        "for data sets with a Unischema: write plain Parquet by Spark, with arrays of numbers",
    ),
}
"""Advice on Petastorm's modules and names, beside its converter."""

_SERVICE = (
    "TensorFlow's data service beside the training: feed the rows by cluster.feed, or let nodes "
    "read files by sparkdl.parquet"
)
_ENGINE = "a part of Horovod's own launcher or engine, for which sparkdl has its own"
_ON_SPARK = f"{_ENGINE}: call sparkdl.horovod.spark.run"
_AGGREGATION = f"{_ENGINE}: DistributedOptimizer(backward_passes_per_step=…) adds gradients up"
_FACES = ("torch", "tensorflow", "keras")
_OF_HOROVOD = {
    "_keras": f"{_ENGINE}: import sparkdl.horovod.keras or sparkdl.horovod.tensorflow.keras",
    "data": "a loader that reads ahead: use torch.utils.data.DataLoader(num_workers=…), or "
    "ctx.torch_dataset",
    "mxnet": "Horovod for Apache MXNet, which has been retired: use PyTorch or TensorFlow",
    "ray": "Horovod's launcher on Ray: sparkdl.horovod.spark.run starts the processes on Spark, "
    "sparkdl.horovod.run on this machine",
    "runner": f"{_ENGINE}: call sparkdl.horovod.run, or in a shell `sparkdl run -np 2 python "
    "train.py`",
    **dict.fromkeys(
        (
            *("spark.common.cache", "spark.common.data_loader", "spark.common.serialization"),
            *("spark.data_loaders", "spark.keras.bare", "spark.keras.datamodule"),
            *("spark.keras.optimizer", "spark.keras.tensorflow", "spark.keras.util"),
            *("spark.lightning.datamodule", "spark.lightning.util", "spark.common.util"),
            *("spark.torch.datamodule", "spark.torch.util", "spark.common.datamodule"),
        ),
        "a part of Horovod's own estimators: those of sparkdl.horovod.spark feed the rows of a "
        "DataFrame, and fit_on_parquet those of Parquet files",
    ),
    "spark.common.backend.Backend": "a base class for launchers of your own, and processes are "
    "started in one way alone: use num_proc, or SparkBackend(num_proc)",
    **dict.fromkeys(
        ("spark.common.store.AbstractFilesystemStore", "spark.common.store.Store"),
        "a part of Horovod's stores: they have train_path, val_path and runs_path",
    ),
    **dict.fromkeys(
        (
            *("spark.conf", "spark.driver", "spark.gloo_run", "spark.mpi_run"),
            *("spark.runner._get_indices_in_rank_order", "spark.runner._launch_job"),
            *("spark.runner._make_mapper", "spark.runner._make_spark_thread"),
            *("spark.runner._notify_and_register_task_addresses", "spark.runner._task_fn"),
            *("spark.runner._register_task_addresses", "spark.task.gloo_exec_fn"),
            *("spark.task.mpirun_exec_fn", "spark.task.task_info", "spark.task.task_service"),
        ),
        _ON_SPARK,
    ),
    "spark.tensorflow": _SERVICE,
    "tensorflow.data": _SERVICE,
    "keras.reducescatter": "not Keras' alone: use sparkdl.horovod.tensorflow.reducescatter",
    "keras.callbacks.BestModelCheckpoint": "a ModelCheckpoint of Keras: call it with "
    "save_best_only=True",
    "common.elastic.State": "a base class: give hvd.elastic.ObjectState the objects to keep",
    **dict.fromkeys(
        (f"common.elastic.Update{part}StateCallback" for part in ("Batch", "Epoch")),
        "a count that a LambdaCallback of Keras keeps: on_epoch_end=lambda epoch, logs: "
        "setattr(state, 'epoch', epoch + 1)",
    ),
    **dict.fromkeys(
        (
            *(
                "tensorflow.PartialDistributedGradientTape",
                "tensorflow.PartialDistributedOptimizer",
            ),
            "keras.PartialDistributedOptimizer",
        ),
        "for layers that are not shared: apply their gradients by an optimizer of their own",
    ),
    **dict.fromkeys(
        (
            f"{module}.{name}_op"
            for module in ("tensorflow", "tensorflow.mpi_ops")
            for name in ("rank", "size", "local_rank", "local_size", "process_set_included")
        ),
        "a constant while the processes live: tf.constant(hvd.rank()), hvd.size() and so on",
    ),
    **dict.fromkeys(
        ("tensorflow.SyncBatchNormalization", "tensorflow.sync_batch_norm"),
        "batch normalization over all processes, in TensorFlow: use a larger batch for each "
        "process, or keras.layers.GroupNormalization",
    ),
    **dict.fromkeys(
        (
            *("tensorflow.BroadcastGlobalVariablesHook", "tensorflow.broadcast_global_variables"),
            "keras.broadcast_global_variables",
        ),
        "for TensorFlow 1: call hvd.broadcast_variables(model.variables, root_rank=0), or use "
        "BroadcastGlobalVariablesCallback in fit",
    ),
    "tensorflow.util": _ENGINE,
    "common.util": _ENGINE,
    **dict.fromkeys(
        ("torch.sparse_allreduce_async", "torch.mpi_ops.sparse_allreduce_async"),
        "for sparse tensors: reduce tensor.to_dense(); DistributedOptimizer takes sparse gradients",
    ),
    "tensorflow.gradient_aggregation": _AGGREGATION,
    "tensorflow.gradient_aggregation_eager": _AGGREGATION,
    **dict.fromkeys(
        (f"{face}.{name}_timeline" for face in _FACES for name in ("start", "stop")),
        "Horovod's own trace: use torch.profiler, or TensorFlow's or JAX's profiler, in the "
        f"training function ({docs_page('profiling')})",
    ),
}
"""Horovod's modules and names: the purpose of each, and the advice. Applies to submodules too."""


def advise(fullname: str) -> None:
    """Raise for a name or a module that is another package's; do nothing for others."""
    name = fullname.removeprefix("sparkdl.")
    if name in _OF_OTHERS:
        home, advice = _OF_OTHERS[name]
        raise _removed(f"sparkdl has no {name}, which is {home}'s: {advice}")
    if advice := _found(name, ADVICE):
        raise _removed(
            f"{fullname} belongs to another package that is imported as sparkdl (Databricks' "
            f"Deep Learning Pipelines), and this one is sparkdl-cluster: {advice}"
        )
    if name.startswith("horovod.") and (advice := _found(name[len("horovod.") :], _OF_HOROVOD)):
        raise _removed(f"sparkdl has no {fullname}: it is {advice}. See {docs_page('horovod')}")
    if name.startswith("petastorm.") and (
        advice := _found(name[len("petastorm.") :], _OF_PETASTORM)
    ):
        raise _removed(f"sparkdl has no {fullname}, which is Petastorm's: {advice}")


def missing_name(module: str, name: str) -> NoReturn:
    """Raise for a name that a module lacks: the end of its `__getattr__`."""
    advise(f"{module}.{name}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _found(name: str, table: Mapping[str, str]) -> str:
    while name and name not in table:
        name = name.rpartition(".")[0]
    return table.get(name, "")


def _removed(text: str) -> ImportError:
    from sparkdl.core.errors import RemovedModuleError  # not at each `import sparkdl`

    return RemovedModuleError(text)


class NamesakeModules:
    """An import finder that names the replacement of another package's module; runs last."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname.startswith("sparkdl."):
            advise(fullname)
