"""Reductions: one value of all processes' values.

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
from sparkdl.horovod.torch.calls import done, named, reduction, start
from sparkdl.horovod.torch.compression import Compression, Compressor
from sparkdl.horovod.torch.handles import Handle

if TYPE_CHECKING:
    import torch

Tensors = Sequence["torch.Tensor"]
Codec = type[Compressor]


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
    narrow, ctx = compression.compress(tensor)
    (reduced,) = gradients.reduce(group_of(process_set), [narrow], how)
    return compression.decompress(reduced, ctx)


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
    own = named("allreduce", name)
    return start(process_set, own, lambda group: kernels.reduce(group, [tensor], how)[0], tensor)


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
    own = named("allreduce", name)
    done(process_set, own, lambda group: kernels.reduce(group, [tensor], how, in_place=True))
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

    def work(group: Group) -> torch.Tensor:
        kernels.reduce(group, [tensor], how, in_place=True)
        return tensor

    return start(process_set, named("allreduce", name), work, tensor)


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
    pairs = [compression.compress(tensor) for tensor in tensors]
    narrow = [tensor for tensor, _ in pairs]
    reduced = gradients.reduce(group_of(process_set), narrow, how, "grouped_allreduce")
    return [compression.decompress(r, ctx) for r, (_, ctx) in zip(reduced, pairs, strict=True)]


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
    own = named("grouped_allreduce", name)
    return start(process_set, own, lambda group: kernels.reduce(group, tensors, how), *tensors)


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
    own = named("grouped_allreduce", name)
    done(process_set, own, lambda group: kernels.reduce(group, tensors, how, in_place=True))
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

    def work(group: Group) -> list[torch.Tensor]:
        kernels.reduce(group, tensors, how, in_place=True)
        return list(tensors)

    return start(process_set, named("grouped_allreduce", name), work, *tensors)


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
    own = named("sparse_allreduce", name)
    return start(process_set, own, lambda group: kernels.reduce_sparse(group, tensor, how), tensor)


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
        CollectiveError: see `allreduce`.
    """
    how = reduction(op, None, name, prescale_factor, postscale_factor)
    kernels.check_scatterable([tensor])
    narrow, ctx = compression.compress(tensor)
    return compression.decompress(gradients.reduce_scatter(group_of(process_set), narrow, how), ctx)


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
    own = named("reducescatter", name)
    return start(process_set, own, lambda group: kernels.reduce_scatter(group, tensor, how), tensor)


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
    return start(
        process_set,
        named("grouped_reducescatter", name),
        lambda group: [kernels.reduce_scatter(group, t, how) for t in tensors],
        *tensors,
    )
