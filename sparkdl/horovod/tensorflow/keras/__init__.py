"""Horovod's API for tf.keras: `import sparkdl.horovod.tensorflow.keras as hvd`.

See docs/horovod.md.

Runs in: child
"""

from __future__ import annotations

import functools

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
from sparkdl.horovod.keras.loading import load
from sparkdl.horovod.tensorflow.compression import Compression
from sparkdl.horovod.tensorflow.functions import (
    allgather_object,
    barrier,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    join,
)
from sparkdl.horovod.tensorflow.keras import callbacks, elastic
from sparkdl.horovod.tensorflow.ops import allgather, broadcast
from sparkdl.horovod.tensorflow.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
)
from sparkdl.horovod.tensorflow.reductions import allreduce, reducescatter

load_model = functools.partial(load, "tf.keras")
"""See `sparkdl.horovod.keras.loading.load`."""

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
