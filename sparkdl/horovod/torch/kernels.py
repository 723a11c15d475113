"""What operations do with tensors in one process set, blocking; and how they become autograd's.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from sparkdl.collectives.gloo import GlooGroup
from sparkdl.collectives.group import Group, Op, even_splits
from sparkdl.collectives.tensors import TensorGroup
from sparkdl.collectives.transport import dtypes, scale_
from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.horovod.common.basics import op_of
from sparkdl.horovod.common.process_sets import ProcessSet, group_of, root_in

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Tensors = Sequence["torch.Tensor"]


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


def reduction(
    op: Any, average: bool | None, name: str | None, prescale: float, postscale: float
) -> Reduction:
    """Return how to reduce.

    Raises:
        ConfigError: for an operation that there is not, or factors that are no numbers.
    """
    if not all(isinstance(factor, (int, float)) for factor in (prescale, postscale)):
        raise ConfigError(f"prescale_factor={prescale!r}, postscale_factor={postscale!r}: numbers")
    return Reduction(op_of(op, average), name or "", float(prescale), float(postscale))


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
    given, tensors = tensors, [tensor.detach() for tensor in tensors]
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
    return list(given)


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
        rows = _rows(tensor)
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

    member = root_in(group, root)
    own, data = tensors_of(group), tensor.detach()
    same = in_place and data.is_contiguous()
    filled = data if same else data.clone(memory_format=torch.contiguous_format)
    if own is not None:
        own.broadcast_(filled, member, name)
    if not in_place:
        return filled
    if not same:
        data.copy_(filled)
    return tensor


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
        rows = _rows(tensor)
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
        return scale_(_rows(tensor), how.prescale * how.postscale)
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


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the rows; of a scalar, one row."""
    return tensor.reshape(1).clone() if tensor.dim() == 0 else tensor.clone()


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


def differentiable(
    forward: Callable[..., Sequence[torch.Tensor]],
    gradient: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return `forward(*tensors)`; its gradient is what `gradient` makes of the one from above."""
    return list(_operation().apply(forward, gradient, *tensors))


@cache
def _operation() -> Any:
    """Return a function of autograd, whose class needs PyTorch."""
    import torch

    class Operation(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, forward: Any, gradient: Any, *tensors: torch.Tensor) -> Any:
            ctx.gradient = gradient
            results = tuple(forward(*tensors))
            whole = [r for r in results if not (r.is_floating_point() or r.is_complex())]
            ctx.mark_non_differentiable(*whole)
            return results

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return None, None, *ctx.gradient(*grads)

    return Operation


class Handle:
    """An operation that was started; give it to `synchronize` or `poll`, or call it to wait."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __repr__(self) -> str:
        return f"Handle({'done' if self._future.done() else 'going on'})"

    def __call__(self) -> Any:
        """Wait for the result, as programs do with what `sparse_allreduce_async` returns."""
        return synchronize(self)

    def done(self) -> bool:
        """Whether the result is there."""
        return self._future.done()

    def result(self) -> Any:
        """Wait for the result; the operation's own deadline ends the wait."""
        return self._future.result()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result.

    Raises:
        CollectiveError: if it failed; `HorovodInternalError` is its other name.
        ConfigError: for what is no handle.
    """
    return _checked(handle).result()


def poll(handle: Handle) -> bool:
    """Whether an operation is done, so that `synchronize` returns at once.

    Raises:
        ConfigError: for what is no handle.
    """
    return _checked(handle).done()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ConfigError(f"{handle!r} is no handle: give what an _async operation returned")
    return handle


def run(
    process_set: ProcessSet, operation: str, name: str | None, work: Callable[[Group], Any]
) -> Any:
    """Call `work` with the group of a process set, and return its result; see `start`."""
    group = group_of(process_set)
    return group.run(lambda: work(group), _full_name(operation, name))


def start(
    process_set: ProcessSet,
    operation: str,
    name: str | None,
    tensors: Tensors,
    work: Callable[[Group], Any],
) -> Handle:
    """Start `work` in the group of a process set, beside the caller.

    Args:
        name: of the operation, of which one with this name can be under way.
        tensors: that it uses, which on a GPU may not be complete yet.

    Raises:
        ConfigError: if an operation of this name is under way.
    """
    group = group_of(process_set)

    def in_group() -> Any:
        return work(group)

    ready = after_stream_of(tensors[0], in_group) if tensors else in_group
    return Handle(group.submit(ready, _full_name(operation, name)))


def after_stream_of(tensor: torch.Tensor, work: Callable[[], T]) -> Callable[[], T]:
    """Return `work` for another thread, which waits there for what made `tensor`, on its GPU.

    Its result is complete when it returns. On the CPU that is so anyway.
    """
    if not tensor.is_cuda:
        return work
    import torch

    made = torch.cuda.Event()
    made.record(torch.cuda.current_stream(tensor.device))

    def on_gpu() -> T:
        with torch.cuda.device(tensor.device):
            stream = torch.cuda.current_stream()
            stream.wait_event(made)
            result = work()
            stream.synchronize()
            return result

    return on_gpu


def _full_name(operation: str, name: str | None) -> str | None:
    """Return the name of which one operation can be under way; none for one without a name."""
    return f"{operation} {name!r}" if name else None
