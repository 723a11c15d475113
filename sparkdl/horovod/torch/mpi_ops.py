"""Horovod's `torch.mpi_ops`: the operations, for programs that import them from there.

Runs in: child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/torch/mpi_ops.py
"""

from __future__ import annotations

from typing import Any

from sparkdl.horovod import torch as face
from sparkdl.horovod.common.basics import op_of
from sparkdl.horovod.common.util import check_extension, gpu_available, num_rank_is_power_2

_ELSEWHERE = {
    *("DistributedOptimizer", "SyncBatchNorm", "elastic", "allgather_object", "broadcast_object"),
    *("broadcast_optimizer_state", "broadcast_parameters"),
}
_OPERATIONS = [name for name in face.__all__ if name not in _ELSEWHERE]

handle_average_backwards_compatibility = op_of
"""The operation that `op` and the older `average` ask for together."""

__all__ = [
    "check_extension",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "num_rank_is_power_2",
    *_OPERATIONS,
]


def __getattr__(name: str) -> Any:
    if name in _OPERATIONS:
        return getattr(face, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
