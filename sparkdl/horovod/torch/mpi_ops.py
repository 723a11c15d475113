"""Horovod's operations on tensors of PyTorch.

Runs in: child

All processes of the process set call the same operations in the same order. Those with `_async`
return a handle for `synchronize`; those that end in `_` change the tensor itself; gradients flow
back through the others, and are Horovod's: what a process has put in gets the reduced gradient of
what all have got. What can go wrong with `allreduce` can go wrong with all of them.
https://horovod.readthedocs.io/en/v0.28.1/api.html#module-horovod.torch
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkdl.collectives.group import Group, Op
from sparkdl.collectives.transport import scale_
from sparkdl.horovod.common import basics, group_of, op_of
from sparkdl.horovod.common.basics import *  # noqa: F403 (as in Horovod's)
from sparkdl.horovod.common.basics import ProcessSet, check_differentiable, global_process_set
from sparkdl.horovod.common.util import (  # noqa: F401 (as in Horovod's)
    check_extension,
    gpu_available,
    num_rank_is_power_2,
)
from sparkdl.horovod.torch import kernels
from sparkdl.horovod.torch.compression import Compression, Compressor
from sparkdl.horovod.torch.kernels import (  # noqa: F401 (operations)
    Handle,
    Reduction,
    Tensors,
    differentiable,
    poll,
    reduce,
    reduction,
    run,
    start,
    synchronize,
)
from sparkdl.horovod.torch.optimizer import join  # noqa: F401 (an operation)

if TYPE_CHECKING:
    import torch

OPERATIONS = (
    *("Compression", "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async"),
    *("allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_"),
    *("broadcast_async", "broadcast_async_", "grouped_allgather", "grouped_allgather_async"),
    *("grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async"),
    *("grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "join"),
    *("poll", "reducescatter", "reducescatter_async", "sparse_allreduce_async", "synchronize"),
)
__all__ = [
    *basics.__all__,
    *OPERATIONS,
    *("check_extension", "gpu_available", "handle_average_backwards_compatibility"),
    "num_rank_is_power_2",
]

handle_average_backwards_compatibility = op_of
"""The operation that `op` and the older `average` ask for together."""

Codec = type[Compressor]
AVERAGE = Reduction(Op.AVERAGE)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Codec = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor reduced over all processes; gradients flow back.

    Args:
        tensor: of the same shape and dtype on all processes.
        average: Horovod's older way of saying `op`.
        name: if given, it must be the same on all processes.
        compression: of what travels.
        op: `hvd.Average` (the default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor, postscale_factor: factors before and after the reduction.

    Raises:
        NotInitializedError: before `hvd.init()`.
        ConfigError: for a dtype that cannot be reduced, or a name that is under way already.
        MismatchError: if the processes called different things.
        CollectiveError: if not all processes called it in time, or one was lost.
    """
    how = reduction(op, average, name, prescale_factor, postscale_factor)
    return _all_reduce("allreduce", [tensor], how, compression, process_set)[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce`; without gradients."""
    how = reduction(op, average, name, prescale_factor, postscale_factor)
    return _start_reduction("allreduce", [tensor], how, process_set)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce the tensor itself, and return it; see `allreduce`."""
    how = reduction(op, average, name, prescale_factor, postscale_factor)
    run(process_set, "allreduce", name, lambda g: reduce(g, [tensor], how, in_place=True))
    return tensor


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `allreduce_`."""
    how = reduction(op, average, name, prescale_factor, postscale_factor)
    return _start_reduction("allreduce", [tensor], how, process_set, in_place=True)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Codec = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the tensors reduced, in one go; see `allreduce`."""
    how = reduction(op, average, name, prescale_factor, postscale_factor)
    return _all_reduce("grouped_allreduce", tensors, how, compression, process_set)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce`; without gradients."""
    how = reduction(op, average, name, prescale_factor, postscale_factor)
    return _start_reduction("grouped_allreduce", tensors, how, process_set)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce the tensors themselves, in one go, and return them; see `allreduce`."""
    how = reduction(op, average, name, prescale_factor, postscale_factor)
    run(process_set, "grouped_allreduce", name, lambda g: reduce(g, tensors, how, in_place=True))
    return list(tensors)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `grouped_allreduce_`."""
    how = reduction(op, average, name, prescale_factor, postscale_factor)
    return _start_reduction("grouped_allreduce", tensors, how, process_set, in_place=True)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: Any, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start reducing a sparse tensor; its result is sparse, with the entries of all processes.

    The handle can be called for the result, or be given to `synchronize`.

    Args:
        tensor: in COO layout.
        op: `hvd.Average` or `hvd.Sum`.

    Raises:
        ConfigError: for another operation, or a dense tensor.
    """
    how = reduction(op, None, name, 1.0, 1.0)
    work = partial(kernels.reduce_sparse, tensor=tensor, how=how)
    return start(process_set, "sparse_allreduce", name, [tensor], work)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Codec = Compression.none,
    op: Any = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this process's share of the rows, reduced; gradients flow back.

    Args:
        tensor: `[rows, …]` of one shape; the first processes get one row more if it must be.
        op: `hvd.Average` (the default), `Sum`, `Min`, `Max` or `Product`.

    Raises:
        ConfigError: for a scalar, which has no rows.
    """
    how = reduction(op, None, name, prescale_factor, postscale_factor)
    kernels.check_scatterable([tensor])
    narrow, ctx = compression.compress(tensor)
    group, shape = group_of(process_set), narrow.shape

    def scatter(tensor: torch.Tensor) -> list[torch.Tensor]:
        work = partial(kernels.reduce_scatter, tensor=tensor, how=how)
        return [run(process_set, "reducescatter", name, work)]

    def gradient(grad: torch.Tensor) -> list[torch.Tensor]:
        # Horovod's measure of a sum: as if each had reduced all rows and taken its own.
        check_differentiable(how.op)
        rows, _ = group.run(lambda: kernels.gather(group, grad))
        factor = how.prescale * how.postscale * (group.size if how.op is Op.SUM else 1)
        return [scale_(rows, factor).reshape(shape)]

    return compression.decompress(differentiable(scatter, gradient, [narrow])[0], ctx)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter`; without gradients."""
    how = reduction(op, None, name, prescale_factor, postscale_factor)
    kernels.check_scatterable([tensor])
    work = partial(kernels.reduce_scatter, tensor=tensor, how=how)
    return start(process_set, "reducescatter", name, [tensor], work)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Codec = Compression.none,
    op: Any = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this process's share of the rows of each tensor; gradients flow back."""
    kernels.check_scatterable(tensors)
    rest = (name, compression, op, process_set, prescale_factor, postscale_factor)
    return [reducescatter(tensor, *rest) for tensor in tensors]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Any = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `grouped_reducescatter`; without gradients."""
    how = reduction(op, None, name, prescale_factor, postscale_factor)
    kernels.check_scatterable(tensors)

    def work(group: Group) -> list[torch.Tensor]:
        return [kernels.reduce_scatter(group, tensor, how) for tensor in tensors]

    return start(process_set, "grouped_reducescatter", name, tensors, work)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the rows of all processes by rank; gradients flow back.

    Args:
        tensor: `[rows, …]`; the number of rows may differ between processes.
    """
    group, shape = group_of(process_set), tensor.shape
    counts: list[int] = []

    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        work = partial(kernels.gather, tensor=tensor, name=name or "")
        rows, counts[:] = run(process_set, "allgather", name, work)
        return [rows]

    def gradient(grad: torch.Tensor) -> list[torch.Tensor]:
        (whole,) = group.run(lambda: reduce(group, [grad], AVERAGE))
        start = sum(counts[: group.rank])
        return [whole[start : start + counts[group.rank]].reshape(shape)]

    return differentiable(gather, gradient, [tensor])[0]


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `allgather`; without gradients."""

    def work(group: Group) -> torch.Tensor:
        return kernels.gather(group, tensor, name or "")[0]

    return start(process_set, "allgather", name, [tensor], work)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return the rows of all processes of each tensor; gradients flow back."""
    return [allgather(tensor, name, process_set) for tensor in tensors]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start `grouped_allgather`; without gradients."""

    def work(group: Group) -> list[torch.Tensor]:
        return [kernels.gather(group, tensor, name or "")[0] for tensor in tensors]

    return start(process_set, "grouped_allgather", name, tensors, work)


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
    """
    group = group_of(process_set)

    def send(tensor: torch.Tensor) -> list[torch.Tensor]:
        work = partial(kernels.broadcast, tensor=tensor, root=root_rank, name=name or "")
        return [run(process_set, "broadcast", name, work)]

    def gradient(grad: torch.Tensor) -> list[torch.Tensor]:
        (whole,) = group.run(lambda: reduce(group, [grad], AVERAGE))
        return [whole if group.ranks[group.rank] == root_rank else whole.zero_()]

    return differentiable(send, gradient, [tensor])[0]


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `broadcast`; without gradients."""
    work = partial(kernels.broadcast, tensor=tensor, root=root_rank, name=name or "")
    return start(process_set, "broadcast", name, [tensor], work)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Fill the tensor itself, and return it; see `broadcast`."""
    work = partial(kernels.broadcast, tensor=tensor, root=root_rank, name=name or "", in_place=True)
    run(process_set, "broadcast", name, work)
    return tensor


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start `broadcast_`."""
    work = partial(kernels.broadcast, tensor=tensor, root=root_rank, name=name or "", in_place=True)
    return start(process_set, "broadcast", name, [tensor], work)


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
    """
    group, shape = group_of(process_set), tensor.shape
    counts: list[torch.Tensor] = []

    def send(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        work = partial(kernels.all_to_all, tensor=tensor, splits=splits, name=name or "")
        rows, got = run(process_set, "alltoall", name, work)
        counts[:] = [got]
        return rows, got

    def gradient(grad: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
        back, _ = group.run(lambda: kernels.all_to_all(group, grad, counts[0]))
        return [back.reshape(shape)]

    rows, got = differentiable(send, gradient, [tensor])
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

    return start(process_set, "alltoall", name, [tensor], work)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all processes of the set have called this."""
    group_of(process_set).barrier()


def _start_reduction(
    kind: str, tensors: Tensors, how: Reduction, process_set: ProcessSet, in_place: bool = False
) -> Handle:
    def work(group: Group) -> Any:
        results = reduce(group, tensors, how, in_place)
        return results if kind.startswith("grouped") else results[0]

    return start(process_set, kind, how.name, tensors, work)


def _all_reduce(
    kind: str, tensors: Tensors, how: Reduction, compression: Codec, process_set: ProcessSet
) -> list[torch.Tensor]:
    """Return the tensors reduced; their gradients are reduced the same way."""
    group = group_of(process_set)

    def forward(*tensors: torch.Tensor) -> Any:
        return run(process_set, kind, how.name, lambda group: reduce(group, tensors, how))

    def gradient(*grads: torch.Tensor) -> list[torch.Tensor]:
        check_differentiable(how.op)
        return group.run(lambda: reduce(group, grads, replace(how, name="")))

    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = differentiable(forward, gradient, [tensor for tensor, _ in pairs])
    return [compression.decompress(r, ctx) for r, (_, ctx) in zip(reduced, pairs, strict=True)]
