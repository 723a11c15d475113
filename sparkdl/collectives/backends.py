"""PyTorch's process groups, made without its default one.

Runs in: child
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sparkdl.collectives.base import Op

if TYPE_CHECKING:
    from torch.distributed import Store


def reduce_options(op: Op, timeout_s: float) -> Any:
    """Return PyTorch's options of an all-reduce; an average is a sum to it."""
    from torch.distributed import AllreduceOptions, ReduceOp

    names = {Op.SUM: ReduceOp.SUM, Op.AVERAGE: ReduceOp.SUM, Op.MIN: ReduceOp.MIN}
    names |= {Op.MAX: ReduceOp.MAX, Op.PRODUCT: ReduceOp.PRODUCT}
    options = AllreduceOptions()
    options.reduceOp = names[op]
    options.timeout = timedelta(seconds=timeout_s)
    return options


def gloo(store: Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
    """Return a process group for CPUs, whose members are connected.

    Args:
        host: an address of this machine, to listen on.
    """
    from torch.distributed import PrefixStore, ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2
    try:
        device = ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError:  # the address is not one of this machine's own, as behind a NAT
        device = ProcessGroupGloo.create_default_device()
    options._devices = [device]
    return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)


def nccl(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """Return a process group for GPUs; its members connect when they first reduce."""
    from torch.distributed import PrefixStore, ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
