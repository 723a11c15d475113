"""What operations do with tensors in one process set, blocking; and how they become autograd's.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from sparkdl.collectives.gloo import GlooGroup
from sparkdl.collectives.group import Group, Op, even_splits
from sparkdl.collectives.tensors import TensorGroup
from sparkdl.collectives.transport import dtypes, scale_
from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.horovod.common.basics import op_of
from sparkdl.horovod.common.buckets import Slot
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
    own = tensors_of(group)
    results: dict[int, torch.Tensor] = {}
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
        numbers = [i for i, t in enumerate(tensors) if (t.dtype, t.device) == kind]
        alike = [tensors[i] for i in numbers]
        row = flat(alike, in_place)
        if own is None:
            scale_(row, how.prescale * how.postscale)
        else:
            what = f"{how.name} {[list(tensor.shape) for tensor in alike]}"
            own.all_reduce_(row, how.op, what, how.prescale, how.postscale)
        if in_place:
            spread(row, alike)
        else:
            results |= zip(numbers, _unflat(row, alike), strict=True)
    return list(given) if in_place else [results[i] for i in range(len(tensors))]


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


def flat(tensors: Sequence[torch.Tensor], in_place: bool) -> torch.Tensor:
    """Return all numbers in a row: a copy, or the tensor's own if it may be changed."""
    import torch

    if len(tensors) > 1:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    (tensor,) = tensors
    if in_place and tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.clone(memory_format=torch.contiguous_format).view(-1)


def spread(row: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write all numbers in a row, as `flat` has made it, into the tensors that they are from."""
    if len(tensors) == 1 and row.data_ptr() == tensors[0].data_ptr():
        return
    for tensor, part in zip(tensors, _unflat(row, tensors), strict=True):
        if part.data_ptr() != tensor.data_ptr():
            tensor.copy_(part)


def _unflat(row: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = row.split([tensor.numel() for tensor in like]) if len(like) > 1 else [row]
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def slot_of(tensor: torch.Tensor) -> Slot:
    """Return what decides which tensors travel together."""
    return Slot(tensor.numel() * tensor.element_size(), f"{tensor.dtype} {tensor.device}")


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


def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result.

    Raises:
        CollectiveError: if it failed; `HorovodInternalError` is its other name.
        ConfigError: for what is no handle.
    """
    return _future_of(handle).result()


def poll(handle: Handle) -> bool:
    """Whether an operation is done, so that `synchronize` returns at once.

    Raises:
        ConfigError: for what is no handle.
    """
    return _future_of(handle).done()


def _future_of(handle: Handle) -> Future[Any]:
    if not isinstance(handle, Handle):
        raise ConfigError(f"{handle!r} is no handle: give what an _async operation returned")
    return handle._future


@dataclass(frozen=True)
class Operation:
    """What a call of Horovod's asks for; a method does it, in the form that was called.

    Attributes:
        kind: Horovod's name of it. One of the same kind and name cannot be under way beside it.
        name: the user's, or none.
        forward: results from the group, the tensors, and whether to write into these.
        gradient: the tensors' gradients from the group and those of the results; for `run`.
        finish: what is returned, one for each of the tensors, from the results.
        is_grouped: whether all of that is returned, or the first alone.
    """

    kind: str
    name: str | None
    process_set: ProcessSet
    tensors: Tensors
    forward: Callable[[Group, Tensors, bool], Tensors]
    gradient: Callable[[Group, Tensors], Tensors] | None = None
    finish: Callable[[Tensors], Sequence[Any]] = list
    is_grouped: bool = False

    def run(self) -> Any:
        """Do it; gradients flow back."""
        group = group_of(self.process_set)

        def forward(*tensors: torch.Tensor) -> Tensors:
            return group.run(partial(self.forward, group, tensors, False), self._full_name)

        def gradient(*grads: torch.Tensor) -> Tensors:
            assert self.gradient is not None
            return group.run(partial(self.gradient, group, grads))

        return self._result(differentiable(forward, gradient, self.tensors))

    def run_in_place(self) -> Any:
        """Change the tensors themselves, and return them."""
        group = group_of(self.process_set)
        work = partial(self.forward, group, self.tensors, True)
        return self._result(group.run(work, self._full_name))

    def start(self, in_place: bool = False) -> Handle:
        """Start it beside the caller, and return a handle for `synchronize`; without gradients.

        Raises:
            ConfigError: if an operation of this kind and name is under way.
        """
        group = group_of(self.process_set)

        def work() -> Any:
            return self._result(self.forward(group, self.tensors, in_place))

        ready = after_stream_of(self.tensors[0], work) if self.tensors else work
        return Handle(group.submit(ready, self._full_name))

    def start_in_place(self) -> Handle:
        """Start to change the tensors themselves, and return a handle for `synchronize`."""
        return self.start(in_place=True)

    @property
    def _full_name(self) -> str | None:
        kind = f"grouped_{self.kind}" if self.is_grouped else self.kind
        return f"{kind} {self.name!r}" if self.name else None

    def _result(self, results: Tensors) -> Any:
        finished = self.finish(results)
        return finished if self.is_grouped else finished[0]


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
