"""`import sparkdl.horovod.torch as hvd`: Horovod's API for PyTorch.

Runs in: child

Inside `sparkdl.launch(…, framework="torch")`; in a process of its own it is alone, rank 0 of 1.
https://horovod.readthedocs.io/en/v0.28.1/api.html#module-horovod.torch
"""

from __future__ import annotations

import sys
from typing import Any

from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.common import compression, elastic
from sparkdl.horovod.torch import mpi_ops
from sparkdl.horovod.torch.mpi_ops import *  # noqa: F403 (all of it)
from sparkdl.horovod.torch.optimizer import DistributedOptimizer

__all__ = [
    *mpi_ops.__all__,
    "DistributedOptimizer",
    "SyncBatchNorm",  # noqa: F405 (`__getattr__` gives it)
    "elastic",
]

# Where Horovod's programs import them from.
sys.modules |= {
    f"{__name__}.compression": compression,
    f"{__name__}.elastic": elastic,
    f"{__name__}.functions": mpi_ops,
}


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNorm":  # a class of PyTorch, which is imported on first use
        from sparkdl.horovod.torch.sync_batch_norm import sync_batch_norm

        return sync_batch_norm()
    return missing_name(__name__, name)
