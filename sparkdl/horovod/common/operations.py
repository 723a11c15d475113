"""The table of Horovod's operations: what a group is called for, and the gradient rule of each.

Each row is written once, for a list of PyTorch's tensors. The public modules choose the row and
lend their tensors: PyTorch's as they are, TensorFlow's and Keras's by DLPack. Gradients are
Horovod's: a process's input gets the reduced gradient of all outputs.
https://horovod.readthedocs.io/en/v0.28.1/api.html

Why not TensorFlow's own collectives for its tensors? They would be a second way with rules of its
own (no `join`, no comparison of calls, one `init` a process), and are slower on CPUs
(docs/performance.md). The price is that all nodes have PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkdl.collectives.group import Group
from sparkdl.collectives.transport import Op, Reduction, dtypes, scale_
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common.basics import op_of
from sparkdl.horovod.common.process_sets import ProcessSet, global_process_set, group_of, root_in

if TYPE_CHECKING:
    import torch

Tensors = Sequence["torch.Tensor"]
Counts = list[list[int]]
"""For each tensor, the number of rows from each member; empty for operations without rows."""


@dataclass(frozen=True)
class Collective:
    """One operation.

    Attributes:
        forward: results and counts of tensors, which it may change if the last argument says so.
        backward: the tensors' gradients from those of the results, and the counts.
        keeps_shape: whether results have the shape of the tensors; else their own number of rows.
    """

    name: str
    forward: Callable[[Group, Call, Tensors, bool], tuple[Tensors, Counts]]
    backward: Callable[[Group, Call, Tensors, Counts], Tensors]
    keeps_shape: bool = False


@dataclass(frozen=True)
class Call:
    """A row of the table with the user's arguments, which are the same on all members.

    Attributes:
        root: of broadcasts, a rank in the world.
        splits: of `ALL_TO_ALL`: how many rows each member gets, this member's own; `None` for even
            ones.
    """

    operation: Collective
    process_set: ProcessSet = global_process_set
    name: str | None = None
    how: Reduction = Reduction()
    root: int = 0
    splits: Sequence[int] | None = None

    @property
    def group(self) -> Group:
        return group_of(self.process_set)

    @property
    def what(self) -> str:
        return self.name or ""

    def forward(
        self, group: Group, tensors: Tensors, in_place: bool = False
    ) -> tuple[Tensors, Counts]:
        """Do it here and now; return the results, and the counts for `gradient`."""
        data = [tensor.detach() for tensor in tensors]
        results, counts = self.operation.forward(group, self, data, in_place)
        return (tensors if in_place else results), counts

    def backward(self, group: Group, grads: Tensors, counts: Counts) -> Tensors:
        """Return the gradients of the tensors; the members call it alike, as they do `forward`."""
        # Without the user's name, which the operation itself may still have under way.
        call = replace(self, name=None)
        return group.run(partial(self.operation.backward, group, call, grads, counts))


def reduction(
    operation: Collective,
    op: Any,
    average: bool | None,
    name: str | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> Call:
    """Return a reduction as Horovod's arguments say."""
    if not all(isinstance(factor, (int, float)) for factor in factors):
        raise ConfigError(
            f"prescale_factor={factors[0]!r}, postscale_factor={factors[1]!r}: must be numbers"
        )
    how = Reduction(op_of(op, average), *map(float, factors))
    return Call(operation, process_set, name, how)


def _reduce(group: Group, call: Call, tensors: Tensors, in_place: bool) -> tuple[Tensors, Counts]:
    """Reduce tensors; those of one dtype and device travel as one."""
    check_reducible(tensors)
    results: dict[int, torch.Tensor] = {}
    # In the order of the tensors, so that all members reduce the kinds in the same order.
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
        numbers = [i for i, t in enumerate(tensors) if (t.dtype, t.device) == kind]
        alike = [tensors[i] for i in numbers]
        buffer = flat(alike, in_place)
        what = f"{call.what} {[list(tensor.shape) for tensor in alike]}"
        group.all_reduce_(buffer, call.how, what)
        if in_place:
            unflatten_into(buffer, alike)
        else:
            results |= zip(numbers, _unflat(buffer, alike), strict=True)
    return [results[i] for i in sorted(results)], []


def _reduce_gradient(group: Group, call: Call, grads: Tensors, counts: Counts) -> Tensors:
    check_differentiable(call.how.op)
    return _reduce(group, call, grads, False)[0]


def _mean(group: Group, grads: Tensors) -> Tensors:
    return _reduce(group, Call(ALL_REDUCE), grads, False)[0]


def _gather(group: Group, call: Call, tensors: Tensors, in_place: bool) -> tuple[Tensors, Counts]:
    found = [group.all_gather(tensor, call.what) for tensor in tensors]
    return [rows for rows, _ in found], [counts for _, counts in found]


def _gather_gradient(group: Group, call: Call, grads: Tensors, counts: Counts) -> Tensors:
    means = zip(_mean(group, grads), counts, strict=True)
    return [whole.split(rows)[group.rank] for whole, rows in means]


def _broadcast(
    group: Group, call: Call, tensors: Tensors, in_place: bool
) -> tuple[Tensors, Counts]:
    member, results = root_in(group, call.root), []
    for tensor in tensors:
        buffer = flat([tensor], in_place)
        group.broadcast_(buffer.view(tensor.shape), member, call.what)
        if in_place:
            unflatten_into(buffer, [tensor])
        results.append(buffer.view(tensor.shape))
    return results, []


def _broadcast_gradient(group: Group, call: Call, grads: Tensors, counts: Counts) -> Tensors:
    is_root = group.rank == root_in(group, call.root)
    # Only the root's tensor went into the results.
    return [grad if is_root else grad.zero_() for grad in _mean(group, grads)]


def _exchange(group: Group, call: Call, tensors: Tensors, in_place: bool) -> tuple[Tensors, Counts]:
    found = [group.all_to_all(tensor, call.splits, call.what) for tensor in tensors]
    return [rows for rows, _ in found], [counts for _, counts in found]


def _exchange_gradient(group: Group, call: Call, grads: Tensors, counts: Counts) -> Tensors:
    pairs = zip(grads, counts, strict=True)
    # The gradients of rows go back to the members that had sent them.
    return [group.all_to_all(grad, got)[0] for grad, got in pairs]


def _scatter(group: Group, call: Call, tensors: Tensors, in_place: bool) -> tuple[Tensors, Counts]:
    check_reducible(tensors)
    return [group.reduce_scatter(tensor, call.how, call.what) for tensor in tensors], []


def _scatter_gradient(group: Group, call: Call, grads: Tensors, counts: Counts) -> Tensors:
    # Horovod's measure of a sum: as if each had reduced all rows and taken its own.
    how = call.how
    check_differentiable(how.op)
    factor = how.prescale * how.postscale * (group.size if how.op is Op.SUM else 1)
    return [scale_(group.all_gather(grad)[0], factor) for grad in grads]


ALL_REDUCE = Collective("allreduce", _reduce, _reduce_gradient, keeps_shape=True)
ALL_GATHER = Collective("allgather", _gather, _gather_gradient)
BROADCAST = Collective("broadcast", _broadcast, _broadcast_gradient, keeps_shape=True)
ALL_TO_ALL = Collective("alltoall", _exchange, _exchange_gradient)
REDUCE_SCATTER = Collective("reducescatter", _scatter, _scatter_gradient)


def broadcast_into(group: Group, tensors: Tensors, root_rank: int) -> None:
    """Fill tensors with the root's; small ones of one dtype and device travel together."""
    root = root_in(group, root_rank)
    for bucket in plan([slot_of(tensor) for tensor in tensors]):
        part = [tensors[number] for number in bucket]
        buffer = flat(part, in_place=True)
        group.broadcast_(buffer, root, f"of {[list(tensor.shape) for tensor in part]}")
        unflatten_into(buffer, part)


def check_differentiable(op: Op) -> None:
    """Check that gradients flow back through a reduction."""
    if not op.is_sum:
        raise ConfigError(
            f"there is no gradient of a reduction by {op.value}: detach the tensor, or use "
            "hvd.Sum or hvd.Average"
        )


def check_reducible(tensors: Tensors) -> None:
    """Raise `ConfigError` for a tensor that cannot be reduced."""
    import torch

    known = dtypes()
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in known:
            what = getattr(tensor, "dtype", type(tensor).__name__)
            raise ConfigError(f"{what} cannot be reduced; choose one of {known}")
        if tensor.is_sparse:
            raise ConfigError("a sparse tensor: call .to_dense() first")


def flat(tensors: Tensors, in_place: bool) -> torch.Tensor:
    """Return all numbers in a flat buffer: a copy, or the tensor's own if it may be changed."""
    import torch

    first = tensors[0]
    if in_place and len(tensors) == 1 and first.is_contiguous():
        return first.view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten_into(buffer: torch.Tensor, tensors: Tensors) -> None:
    """Copy the flat buffer back into the tensors."""
    if len(tensors) == 1 and buffer.data_ptr() == tensors[0].data_ptr():
        return
    for tensor, part in zip(tensors, _unflat(buffer, tensors), strict=True):
        # A part may be the tensor's own memory already.
        if part.data_ptr() != tensor.data_ptr():
            tensor.copy_(part)


def _unflat(buffer: torch.Tensor, like: Tensors) -> list[torch.Tensor]:
    parts = buffer.split([tensor.numel() for tensor in like]) if len(like) > 1 else [buffer]
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def slot_of(tensor: torch.Tensor) -> Slot:
    return Slot(tensor.nbytes, f"{tensor.dtype} {tensor.device}")


# PyTorch's own sizes, of DistributedDataParallel's first bucket and its others.
FIRST_NBYTES = 1 << 20
NBYTES = 25 << 20


@dataclass(frozen=True)
class Slot:
    """A gradient's size, and its kind: dtype and device, the same within a bucket."""

    nbytes: int
    kind: str = ""


def plan(slots: Sequence[Slot]) -> tuple[tuple[int, ...], ...]:
    """Return the buckets of some megabytes in which gradients travel, in their order, as numbers.

    As in PyTorch's DistributedDataParallel (https://dl.acm.org/doi/10.14778/3415478.3415530) a
    bucket is reduced during the backward pass, as soon as its gradients are there. The backward
    pass begins with the last layers, so buckets are made from the last gradient to the first. The
    first one is small, so that the reduction begins early.
    """
    buckets: list[list[int]] = []
    unfilled: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    for number in reversed(range(len(slots))):
        slot = slots[number]
        limit = FIRST_NBYTES if len(buckets) == 1 else NBYTES
        if slot.kind not in unfilled or filled[slot.kind] + slot.nbytes > limit:
            unfilled[slot.kind], filled[slot.kind] = [], 0
            buckets.append(unfilled[slot.kind])
        unfilled[slot.kind].append(number)
        filled[slot.kind] += slot.nbytes
    return tuple(map(tuple, buckets))
