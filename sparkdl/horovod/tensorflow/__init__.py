"""Horovod's API for TensorFlow: `import sparkdl.horovod.tensorflow as hvd`. See docs/horovod.md.

Runs in: child
"""

from __future__ import annotations

from typing import Any

from sparkdl.core.errors import RemovedError
from sparkdl.horovod.common import (
    Adasum,
    Average,
    HorovodInternalError,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    group_of,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from sparkdl.horovod.tensorflow import elastic
from sparkdl.horovod.tensorflow.compression import Compression
from sparkdl.horovod.tensorflow.functions import (
    allgather_object,
    barrier,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from sparkdl.horovod.tensorflow.ops import allgather, alltoall, broadcast, grouped_allgather
from sparkdl.horovod.tensorflow.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
)
from sparkdl.horovod.tensorflow.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from sparkdl.horovod.tensorflow.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "group_of",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":  # a class of Keras, which is imported on first use
        from sparkdl.horovod.tensorflow.sync_batch_norm import layer_class

        return layer_class()
    if name == "BroadcastGlobalVariablesHook":
        raise RemovedError(
            "hvd.BroadcastGlobalVariablesHook is for TensorFlow 1: call hvd.broadcast_variables("
            "model.variables, root_rank=0), or use BroadcastGlobalVariablesCallback in fit"
        )
    raise AttributeError(f"module 'sparkdl.horovod.tensorflow' has no attribute {name!r}")
