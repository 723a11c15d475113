"""Operations through which gradients flow back.

Runs in: child

Their gradients are Horovod's: what a process has put in gets the reduced gradient of what all have
got. https://github.com/horovod/horovod/blob/v0.28.1/horovod/torch/mpi_ops.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sparkdl.collectives.arithmetic import scale_
from sparkdl.collectives.base import Group, Op
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.torch import kernels
from sparkdl.horovod.torch.calls import named
from sparkdl.horovod.torch.kernels import Reduction

if TYPE_CHECKING:
    import torch

AVERAGE = Reduction(Op.AVERAGE)


def reduce(
    group: Group, tensors: Sequence[torch.Tensor], how: Reduction, operation: str = "allreduce"
) -> list[torch.Tensor]:
    """Return the tensors reduced; their gradients are reduced the same way.

    Args:
        operation: Horovod's name of it, of which one with the name of `how` can be under way.
    """
    return list(functions().Reduce.apply(group, how, operation, *tensors))


def gather(group: Group, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the rows of all members; the gradient of each is the average of all members'."""
    result: torch.Tensor = functions().Gather.apply(group, name, tensor)
    return result


def broadcast(group: Group, tensor: torch.Tensor, root: int, name: str) -> torch.Tensor:
    """Return the tensor of `root`; its gradient there is the average of all members'."""
    result: torch.Tensor = functions().Broadcast.apply(group, root, name, tensor)
    return result


def all_to_all(
    group: Group, tensor: torch.Tensor, splits: torch.Tensor | None, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange rows, and how many came from each; gradients go back to where the rows are from."""
    rows, got = functions().Exchange.apply(group, splits, name, tensor)
    return rows, got


def reduce_scatter(group: Group, tensor: torch.Tensor, how: Reduction) -> torch.Tensor:
    """Return this member's share of the reduced rows.

    The gradient is that of all shares, by Horovod's measure: times the number of members for a
    sum, as if each had reduced all rows and taken its own.
    """
    result: torch.Tensor = functions().ReduceScatter.apply(group, how, tensor)
    return result


def _linear(how: Reduction) -> Reduction:
    if how.op not in (Op.SUM, Op.AVERAGE):
        raise ConfigError(
            f"there is no gradient of a reduction by {how.op.value}: detach the tensor, or use "
            "hvd.Sum or hvd.Average"
        )
    return replace(how, name="")


@cache
def functions() -> Any:
    """Return the functions of autograd, whose classes need PyTorch."""
    everything = (*_reductions(), *_moves())
    return SimpleNamespace(**{function.__name__: function for function in everything})


def _reductions() -> tuple[type, ...]:
    import torch

    class Reduce(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(
            ctx: Any, group: Group, how: Reduction, operation: str, *tensors: torch.Tensor
        ) -> Any:
            ctx.group, ctx.how = group, how
            own = named(operation, how.name)
            return tuple(group.run(lambda: kernels.reduce(group, tensors, how), own))

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            how = _linear(ctx.how)
            reduced = ctx.group.run(lambda: kernels.reduce(ctx.group, grads, how))
            return None, None, None, *reduced

    class ReduceScatter(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, group: Group, how: Reduction, tensor: torch.Tensor) -> Any:
            ctx.group, ctx.how, ctx.shape = group, how, tensor.shape
            own = named("reducescatter", how.name)
            return group.run(lambda: kernels.reduce_scatter(group, tensor, how), own)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            group, how = ctx.group, _linear(ctx.how)
            rows, _ = group.run(lambda: kernels.gather(group, grads[0]))
            factor = how.prescale * how.postscale * (group.size if how.op is Op.SUM else 1)
            return None, None, scale_(rows, factor).reshape(ctx.shape)

    return Reduce, ReduceScatter


def _moves() -> tuple[type, ...]:
    import torch

    class Gather(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, group: Group, name: str, tensor: torch.Tensor) -> Any:
            own = named("allgather", name)
            rows, ctx.counts = group.run(lambda: kernels.gather(group, tensor, name), own)
            ctx.group, ctx.shape = group, tensor.shape
            return rows

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            group = ctx.group
            (whole,) = group.run(lambda: kernels.reduce(group, grads, AVERAGE))
            start = sum(ctx.counts[: group.rank])
            return None, None, whole[start : start + ctx.counts[group.rank]].reshape(ctx.shape)

    class Broadcast(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, group: Group, root: int, name: str, tensor: torch.Tensor) -> Any:
            ctx.group, ctx.root = group, root
            own = named("broadcast", name)
            return group.run(lambda: kernels.broadcast(group, tensor, root, name), own)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            group = ctx.group
            (whole,) = group.run(lambda: kernels.reduce(group, grads, AVERAGE))
            mine = group.ranks[group.rank] == ctx.root
            return None, None, None, whole if mine else whole.zero_()

    class Exchange(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, group: Group, splits: Any, name: str, tensor: torch.Tensor) -> Any:
            own = named("alltoall", name)
            rows, got = group.run(lambda: kernels.all_to_all(group, tensor, splits, name), own)
            ctx.group, ctx.got, ctx.shape = group, got, tensor.shape
            ctx.mark_non_differentiable(got)
            return rows, got

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            group = ctx.group
            back, _ = group.run(lambda: kernels.all_to_all(group, grads[0], ctx.got))
            return None, None, None, back.reshape(ctx.shape)

    return Gather, Broadcast, Exchange
