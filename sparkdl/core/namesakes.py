"""Names of other packages that users look for in `sparkdl`, and their replacements.

Databricks' Deep Learning Pipelines, and the package `sparkdl` on PyPI, which are
imported by the same name; their files may lie in the same folder as these: docs/deployment.md.
And Horovod's names that have no place in `sparkdl.horovod`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from sparkdl.core.texts import docs_page

_TFOS = "its modules are in sparkdl.tfos: from sparkdl.tfos import TFCluster"
_DATABRICKS = {
    "sparkdl.KerasEstimator and its KerasModel, or sparkdl.TFModel, score a DataFrame": (
        "DeepImageFeaturizer DeepImagePredictor KerasImageFileTransformer KerasTransformer "
        "TFImageTransformer TFInputGraph TFTransformer graph imageInputPlaceholder transformers udf"
    ),
    f"use sparkdl.KerasEstimator ({docs_page('spark-ml')})": (
        "KerasImageFileEstimator TextEstimator estimators"
    ),
    "Spark reads images itself: spark.read.format('image') or format('binaryFile')": (
        "image imageSchema imageType readImages"
    ),
    "use xgboost.spark, of the package xgboost": "xgboost",
}
"""Advice, and the attributes and modules that it is for. That for a package is for its modules."""
_READERS = (
    "read any Parquet files by sparkdl.make_spark_converter('file:///…'), or "
    "ctx.batches(64, feed=sparkdl.parquet(…)), or cluster.feed(sparkdl.parquet(…))"
)
_PETASTORM = {
    _READERS: "make_batch_reader make_reader reader tf_utils",
    f"its loaders: call converter.make_torch_dataloader, or {_READERS}": "pytorch",
    "for data sets with a Unischema: write plain Parquet by Spark, with arrays of numbers": (
        "codecs etl ngram predicates unischema"
    ),
}
_ENGINE = "a part of Horovod's own launcher or engine, for which sparkdl has its own"
_HOROVOD = {
    f"{_ENGINE}: import sparkdl.horovod.keras or sparkdl.horovod.tensorflow.keras": "_keras",
    "a loader that reads ahead: use torch.utils.data.DataLoader(num_workers=…), or "
    "ctx.torch_dataset": "data",
    "for Apache MXNet, which has been retired: use PyTorch or TensorFlow": "mxnet",
    f"{_ENGINE}: call sparkdl.horovod.run or sparkdl.horovod.spark.run, or in a shell `sparkdl run "
    "-np 2 python train.py`": (
        "ray runner common.util tensorflow.util spark.conf spark.driver spark.gloo_run "
        "spark.mpi_run spark.task.gloo_exec_fn spark.task.mpirun_exec_fn spark.task.task_info "
        "spark.task.task_service"
    ),
    "a part of Horovod's own estimators: those of sparkdl.horovod.spark feed the rows of a "
    "DataFrame, and fit_on_parquet those of Parquet files": (
        "spark.common.cache spark.common.data_loader spark.common.datamodule spark.common.util "
        "spark.common.serialization spark.data_loaders spark.keras.bare spark.keras.datamodule "
        "spark.keras.optimizer spark.keras.tensorflow spark.keras.util spark.lightning.datamodule "
        "spark.lightning.util spark.torch.datamodule spark.torch.util"
    ),
    "a base class for your own launchers, and there is only one way to start processes: use "
    "num_proc, or SparkBackend(num_proc)": "spark.common.backend.Backend",
    "a part of Horovod's stores: they have train_path, val_path and runs_path": (
        "spark.common.store.AbstractFilesystemStore spark.common.store.Store"
    ),
    "TensorFlow's data service beside the training: feed the rows by cluster.feed, or let nodes "
    "read files by sparkdl.parquet": "spark.tensorflow tensorflow.data",
    "not Keras' alone: use sparkdl.horovod.tensorflow.reducescatter": "keras.reducescatter",
    "a ModelCheckpoint of Keras: call it with save_best_only=True": (
        "keras.callbacks.BestModelCheckpoint"
    ),
    "a base class: give hvd.elastic.ObjectState the objects to keep": "common.elastic.State",
    "a count that a LambdaCallback of Keras keeps: on_epoch_end=lambda epoch, logs: "
    "setattr(state, 'epoch', epoch + 1)": (
        "common.elastic.UpdateBatchStateCallback common.elastic.UpdateEpochStateCallback"
    ),
    "for layers that are not shared: apply their gradients by their own optimizer": (
        "keras.PartialDistributedOptimizer tensorflow.PartialDistributedGradientTape "
        "tensorflow.PartialDistributedOptimizer"
    ),
    "a constant while the processes live: tf.constant(hvd.rank()), hvd.size() and so on": (
        "tensorflow.rank_op tensorflow.size_op tensorflow.local_rank_op tensorflow.local_size_op "
        "tensorflow.process_set_included_op tensorflow.mpi_ops.rank_op tensorflow.mpi_ops.size_op "
        "tensorflow.mpi_ops.local_rank_op tensorflow.mpi_ops.local_size_op "
        "tensorflow.mpi_ops.process_set_included_op"
    ),
    "batch normalization over all processes, in TensorFlow: use a larger batch for each process, "
    "or keras.layers.GroupNormalization": (
        "tensorflow.SyncBatchNormalization tensorflow.sync_batch_norm"
    ),
    "for TensorFlow 1: call hvd.broadcast_variables(model.variables, root_rank=0), or use "
    "BroadcastGlobalVariablesCallback in fit": (
        "keras.broadcast_global_variables tensorflow.BroadcastGlobalVariablesHook "
        "tensorflow.broadcast_global_variables"
    ),
    "for sparse tensors: reduce tensor.to_dense(); DistributedOptimizer takes sparse gradients": (
        "torch.sparse_allreduce_async torch.mpi_ops.sparse_allreduce_async"
    ),
    f"{_ENGINE}: DistributedOptimizer(backward_passes_per_step=…) adds gradients up": (
        "tensorflow.gradient_aggregation tensorflow.gradient_aggregation_eager"
    ),
    "Horovod's own trace: use torch.profiler, or TensorFlow's or JAX's profiler, in the training "
    f"function ({docs_page('observing')})": (
        "keras.start_timeline keras.stop_timeline tensorflow.start_timeline "
        "tensorflow.stop_timeline torch.start_timeline torch.stop_timeline"
    ),
}


def advise(fullname: str) -> None:
    """Raise for a name or a module that is another package's; do nothing for others."""
    name = fullname.removeprefix("sparkdl.")
    if name in ("TFCluster", "TFNode", "TFParallel"):
        raise _removed(f"sparkdl has no {name}, which is TensorFlowOnSpark's: {_TFOS}")
    if advice := _found(name, _DATABRICKS):
        raise _removed(
            f"{fullname} belongs to another package that is imported as sparkdl (Databricks' "
            f"Deep Learning Pipelines), and this one is sparkdl-cluster: {advice}"
        )
    package, _, name = name.partition(".")
    if package == "horovod" and (advice := _found(name, _HOROVOD)):
        raise _removed(f"sparkdl has no {fullname}: it is {advice}. See {docs_page('horovod')}")
    if package == "petastorm" and (advice := _found(name, _PETASTORM)):
        raise _removed(f"sparkdl has no {fullname}, which is Petastorm's: {advice}")


def missing_name(module: str, name: str) -> NoReturn:
    """Raise for a name that a module lacks: the end of its `__getattr__`."""
    advise(f"{module}.{name}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _found(name: str, table: Mapping[str, str]) -> str:
    by_name = {each: advice for advice, names in table.items() for each in names.split()}
    while name and name not in by_name:
        name = name.rpartition(".")[0]
    return by_name.get(name, "")


def _removed(text: str) -> ImportError:
    from sparkdl.core.errors import RemovedModuleError  # not at each `import sparkdl`

    return RemovedModuleError(text)


class NamesakeModules:
    """An import finder that names the replacement of another package's module; runs last."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname.startswith("sparkdl."):
            advise(fullname)
