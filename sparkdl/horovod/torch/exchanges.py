"""Exchanges: rows and values of some processes at others.

Runs in: child

All processes of the process set call the same operations in the same order. Those with `_async`
return a handle for `synchronize`; those that end in `_` change the tensor itself; gradients flow
back through the others. https://horovod.readthedocs.io/en/v0.28.1/api.html#module-horovod.torch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.collectives.base import Group
from sparkdl.horovod.common.process_sets import ProcessSet, global_process_set, group_of
from sparkdl.horovod.torch import gradients, kernels
from sparkdl.horovod.torch.calls import done, named, start
from sparkdl.horovod.torch.compression import Compressor
from sparkdl.horovod.torch.handles import Handle

if TYPE_CHECKING:
    import torch

Tensors = Sequence["torch.Tensor"]
Codec = type[Compressor]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the rows of all processes by rank; gradients flow back.

    Args:
        tensor: `[rows, …]`; the number of rows may differ between processes.

    Raises:
        CollectiveError: see `allreduce`.
    """
    return gradients.gather(group_of(process_set), tensor, name or "")


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `allgather`; without gradients."""
    return start(
        process_set,
        named("allgather", name),
        lambda group: kernels.gather(group, tensor, name or "")[0],
        tensor,
    )


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return the rows of all processes of each tensor; gradients flow back."""
    return [allgather(tensor, name, process_set) for tensor in tensors]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `grouped_allgather`; without gradients."""
    return start(
        process_set,
        named("grouped_allgather", name),
        lambda group: [kernels.gather(group, t, name or "")[0] for t in tensors],
        *tensors,
    )


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor of process `root_rank`; gradients flow back to it.

    Args:
        tensor: of the same shape and dtype on all processes.
        root_rank: in the world, also with a process set.

    Raises:
        ConfigError: if `root_rank` is not in the process set.
        CollectiveError: see `allreduce`.
    """
    return gradients.broadcast(group_of(process_set), tensor, root_rank, name or "")


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `broadcast`; without gradients."""
    return start(
        process_set,
        named("broadcast", name),
        lambda group: kernels.broadcast(group, tensor, root_rank, name or ""),
        tensor,
    )


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Fill the tensor itself, and return it; see `broadcast`."""
    done(
        process_set,
        named("broadcast", name),
        lambda group: kernels.broadcast(group, tensor, root_rank, name or "", in_place=True),
    )
    return tensor


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `broadcast_`."""

    def work(group: Group) -> torch.Tensor:
        kernels.broadcast(group, tensor, root_rank, name or "", in_place=True)
        return tensor

    return start(process_set, named("broadcast", name), work, tensor)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send a part of the rows to each process; gradients flow back.

    Args:
        tensor: `[rows, …]`.
        splits: how many rows each process gets, by rank; by default the same number.

    Returns:
        The rows received by rank of the sender; with `splits` also how many came from each,
        int32 `[size]`.

    Raises:
        ConfigError: if the splits do not fit the rows.
        CollectiveError: see `allreduce`.
    """
    rows, got = gradients.all_to_all(group_of(process_set), tensor, splits, name or "")
    return rows if splits is None else (rows, got)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `alltoall`; without gradients."""

    def work(group: Group) -> Any:
        rows, got = kernels.all_to_all(group, tensor, splits, name or "")
        return rows if splits is None else (rows, got)

    return start(process_set, named("alltoall", name), work, tensor)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all processes of the set have called this.

    Raises:
        CollectiveError: see `allreduce`.
    """
    group_of(process_set).barrier()
