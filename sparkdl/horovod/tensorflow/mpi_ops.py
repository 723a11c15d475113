"""Horovod's `tensorflow.mpi_ops`: the operations, for programs that import them from there.

Runs in: child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/tensorflow/mpi_ops.py
"""

from __future__ import annotations

from typing import Any

from sparkdl.collectives.base import Op
from sparkdl.horovod import tensorflow as face
from sparkdl.horovod.common.basics import Sum, op_of
from sparkdl.horovod.common.process_sets import ProcessSet, global_process_set
from sparkdl.horovod.common.util import check_extension, gpu_available, num_rank_is_power_2
from sparkdl.horovod.tensorflow.reductions import allreduce

_ELSEWHERE = {
    *("DistributedGradientTape", "DistributedOptimizer", "PartialDistributedGradientTape"),
    *("PartialDistributedOptimizer", "SyncBatchNormalization", "elastic", "allgather_object"),
    *("allreduce", "broadcast_global_variables", "broadcast_object", "broadcast_object_fn"),
    *("broadcast_variables", "grouped_allreduce", "grouped_reducescatter", "reducescatter"),
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


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: Op | str = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor reduced over all members; the sum, unless `op` says otherwise."""
    return allreduce(
        tensor,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )


def __getattr__(name: str) -> Any:
    if name in _OPERATIONS:
        return getattr(face, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
