"""`import sparkdl.horovod.torch as hvd`: Horovod's API for PyTorch.

Runs in: child

Inside `sparkdl.launch(…, framework="torch")`; in a process of its own it is alone, rank 0 of 1.
https://horovod.readthedocs.io/en/v0.28.1/api.html#module-horovod.torch
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparkdl.horovod.common import face
from sparkdl.horovod.common.face import *  # noqa: F403 (what all faces have)
from sparkdl.horovod.torch.compression import Compression
from sparkdl.horovod.torch.exchanges import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from sparkdl.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from sparkdl.horovod.torch.handles import poll, synchronize
from sparkdl.horovod.torch.joining import join
from sparkdl.horovod.torch.optimizer import DistributedOptimizer
from sparkdl.horovod.torch.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)

if TYPE_CHECKING:
    from sparkdl.horovod.torch import elastic

__all__ = [
    *face.__all__,
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",  # noqa: F405 (`__getattr__` gives it)
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNorm":
        from sparkdl.horovod.torch.sync_batch_norm import sync_batch_norm

        return sync_batch_norm()
    if name == "elastic":
        return import_module("sparkdl.horovod.torch.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
