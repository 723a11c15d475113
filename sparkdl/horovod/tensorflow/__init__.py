"""Horovod's API for TensorFlow: `import sparkdl.horovod.tensorflow as hvd`. See docs/horovod.md.

Runs in: child
"""

from __future__ import annotations

from typing import Any

from sparkdl.core.errors import RemovedError
from sparkdl.horovod.common import face, group_of
from sparkdl.horovod.common.face import *  # noqa: F403 (what all faces have)
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
    *face.__all__,
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",  # noqa: F405 (`__getattr__` gives it)
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
    "elastic",
    "group_of",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
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
