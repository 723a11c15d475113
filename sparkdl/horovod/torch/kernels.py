"""What operations do with tensors, in one process set: blocking, without gradients.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.collectives.arithmetic import dtypes, scale_
from sparkdl.collectives.base import Group, Op, even_splits
from sparkdl.collectives.gloo import GlooGroup
from sparkdl.collectives.tensors import TensorGroup
from sparkdl.core.errors import ConfigError, FrameworkMissingError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Reduction:
    """How tensors are reduced.

    Attributes:
        name: the user's, which must be the same on all members; or none.
        prescale: factor before the reduction.
        postscale: factor after it.
    """

    op: Op
    name: str = ""
    prescale: float = 1.0
    postscale: float = 1.0


def tensors_of(group: Group) -> TensorGroup | None:
    """Return what moves tensors; `None` for a process that is alone.

    Raises:
        FrameworkMissingError: if the group has no transport for tensors of PyTorch.
    """
    if group.size == 1 and not isinstance(group, GlooGroup):
        return None
    if not isinstance(group, GlooGroup):
        raise FrameworkMissingError(
            f"the nodes reduce by {group.transport}, because not all of them have PyTorch. "
            "Install it on all of them: pip install torch"
        )
    return group.tensors


def reduce(
    group: Group, tensors: Sequence[torch.Tensor], how: Reduction, in_place: bool = False
) -> list[torch.Tensor]:
    """Return the tensors reduced; those of one dtype and device travel as one.

    Args:
        in_place: write the results into the tensors, and return these.

    Raises:
        ConfigError: for a dtype that cannot be reduced.
        CollectiveError: see `Group.all_reduce`.
    """
    tensors = [tensor.detach() for tensor in tensors]
    check_reducible(tensors)
    results: dict[int, torch.Tensor] = {}
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
        numbers = [i for i, t in enumerate(tensors) if (t.dtype, t.device) == kind]
        alike = [tensors[i] for i in numbers]
        flat = _flat(alike, in_place)
        what = f"{how.name} {[list(tensor.shape) for tensor in alike]}"
        own = tensors_of(group)
        if own is None:
            scale_(flat, how.prescale * how.postscale)
        else:
            own.all_reduce_(flat, how.op, what, how.prescale, how.postscale)
        results |= zip(numbers, _unflat(flat, alike), strict=True)
    if not in_place:
        return [results[i] for i in range(len(tensors))]
    for i, tensor in enumerate(tensors):
        if results[i].data_ptr() != tensor.data_ptr():
            tensor.copy_(results[i])
    return list(tensors)


def reduce_sparse(group: Group, tensor: torch.Tensor, how: Reduction) -> torch.Tensor:
    """Return a sparse tensor with the entries of all members, coalesced.

    Raises:
        ConfigError: for a dense tensor, or another operation than sum and average.
    """
    import torch

    if not tensor.is_sparse or how.op not in (Op.SUM, Op.AVERAGE):
        raise ConfigError(
            f"a {tensor.layout} tensor by {how.op.value}: sparse tensors alone, in COO layout, are "
            "reduced so, by hvd.Sum or hvd.Average"
        )
    mine = tensor.detach().coalesce()
    places, _ = gather(group, mine.indices().t().contiguous(), f"{how.name}.indices")
    values, _ = gather(group, mine.values(), f"{how.name}.values")
    if how.op is Op.AVERAGE:
        values = values / group.size
    return torch.sparse_coo_tensor(places.t(), values, tensor.shape).coalesce()


def gather(group: Group, tensor: torch.Tensor, name: str = "") -> tuple[torch.Tensor, list[int]]:
    """Return the rows of all members, and how many came from each."""
    own, tensor = tensors_of(group), tensor.detach()
    if own is None:
        rows = tensor.clone() if tensor.dim() else tensor.reshape(1).clone()
        return rows, [len(rows)]
    return own.all_gather(tensor, name)


def broadcast(
    group: Group, tensor: torch.Tensor, root: int, name: str = "", in_place: bool = False
) -> torch.Tensor:
    """Return the tensor of a member.

    Args:
        root: its rank in the world.
        in_place: write it into the tensor, and return that.

    Raises:
        ConfigError: if `root` is not in the group.
        CollectiveError: see `Group.all_reduce`.
    """
    import torch

    if root not in group.ranks:
        raise ConfigError(f"root_rank={root} is not in this process set: {list(group.ranks)}")
    own, tensor = tensors_of(group), tensor.detach()
    same = in_place and tensor.is_contiguous()
    filled = tensor if same else tensor.clone(memory_format=torch.contiguous_format)
    if own is not None:
        own.broadcast_(filled, group.ranks.index(root), name)
    return tensor.copy_(filled) if in_place and not same else filled


def all_to_all(
    group: Group, tensor: torch.Tensor, splits: torch.Tensor | None, name: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows received, and how many came from each, int32 `[size]`."""
    import torch

    own, tensor = tensors_of(group), tensor.detach()
    parts = None if splits is None else torch.as_tensor(splits)
    if parts is not None and parts.is_floating_point():
        raise ConfigError(f"splits of {parts.dtype}: give numbers of rows, as torch.int32")
    parts = None if parts is None else parts.tolist()
    if own is None:
        rows = tensor.clone() if tensor.dim() else tensor.reshape(1).clone()
        got = even_splits(len(rows), 1, parts)
    else:
        rows, got = own.all_to_all(tensor, parts, name)
    return rows, torch.tensor(got, dtype=torch.int32, device=tensor.device)


def reduce_scatter(group: Group, tensor: torch.Tensor, how: Reduction) -> torch.Tensor:
    """Return this member's share of the rows, reduced."""
    tensor = tensor.detach()
    check_reducible([tensor])
    own = tensors_of(group)
    if own is None:
        rows = tensor.clone() if tensor.dim() else tensor.reshape(1).clone()
        return scale_(rows, how.prescale * how.postscale)
    return own.reduce_scatter(tensor, how.op, how.name, how.prescale, how.postscale)


def check_reducible(tensors: Sequence[torch.Tensor]) -> None:
    """Raise `ConfigError` for a tensor that cannot be reduced."""
    import torch

    known = dtypes()
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in known:
            what = getattr(tensor, "dtype", type(tensor).__name__)
            raise ConfigError(f"{what} cannot be reduced; choose one of {known}")
        if tensor.is_sparse:
            raise ConfigError("a sparse tensor: use sparse_allreduce_async, or .to_dense()")


def check_scatterable(tensors: Sequence[torch.Tensor]) -> None:
    """Raise `ConfigError` for a scalar: its one row would go to the first member alone."""
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ConfigError("a scalar has no rows to share out: use allreduce, or the shape [rows]")


def _flat(tensors: Sequence[torch.Tensor], in_place: bool) -> torch.Tensor:
    """Return all numbers in a row: a copy, or the tensor's own if it may be changed."""
    import torch

    if len(tensors) > 1:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    (tensor,) = tensors
    if in_place and tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.clone(memory_format=torch.contiguous_format).view(-1)


def _unflat(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
