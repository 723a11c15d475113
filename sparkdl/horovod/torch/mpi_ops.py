"""Horovod's operations on tensors of PyTorch.

All processes of the process set call the same operations in the same order. Operations with
`_async` return a handle for `synchronize`; operations that end in `_` change the tensor itself;
gradients flow back through the others. All of them raise the errors of `allreduce`.

Each operation is a function of Horovod's arguments that returns an `Operation`: a row of the table
in `horovod/common/operations.py`. `_form` derives Horovod's forms from it.
https://horovod.readthedocs.io/en/v0.28.1/api.html#module-horovod.torch
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial
from inspect import Parameter
from typing import TYPE_CHECKING, Any, TypeVar

from sparkdl.collectives.group import Group
from sparkdl.core.errors import ConfigError
from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.common import basics, group_of, rank
from sparkdl.horovod.common.basics import *  # noqa: F403 (as in Horovod's)
from sparkdl.horovod.common.basics import Average, ProcessSet, global_process_set
from sparkdl.horovod.common.compression import Compression, Compressor, narrowed
from sparkdl.horovod.common.elastic import on_cpu
from sparkdl.horovod.common.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    Call,
    Counts,
    Tensors,
    broadcast_into,
    reduction,
)
from sparkdl.horovod.common.process_sets import allgather_object, broadcast_object, join_all

if TYPE_CHECKING:
    import torch

__all__ = [
    *basics.__all__,
    "allgather_object",
    "broadcast_object",
    *("Compression", "allgather", "allgather_async", "allreduce"),
    *("allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async"),
    *("barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_"),
    *("broadcast_optimizer_state", "broadcast_parameters"),
    *("grouped_allgather", "grouped_allgather_async"),
    *("grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async"),
    *("grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "join"),
    *("poll", "reducescatter", "reducescatter_async", "synchronize"),
]


__getattr__ = functools.partial(missing_name, __name__)

T = TypeVar("T")
Codec = type[Compressor]


@cache
def _function() -> Any:
    import torch

    class Function(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, operation: Operation, group: Group, *tensors: torch.Tensor) -> Any:
            work = partial(operation.call.forward, group, tensors)
            results, ctx.counts = group.run(work, operation.full_name)
            ctx.call, ctx.group, ctx.shapes = operation.call, group, [t.shape for t in tensors]
            operation.counts[:] = ctx.counts
            # Autograd refuses gradients of whole numbers.
            whole = [r for r in results if not (r.is_floating_point() or r.is_complex())]
            ctx.mark_non_differentiable(*whole)
            return tuple(results)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            mine = ctx.call.backward(ctx.group, grads, ctx.counts)
            pairs = zip(mine, ctx.shapes, strict=True)
            return None, None, *(grad.reshape(shape) for grad, shape in pairs)

    return Function


def synchronize(handle: Future[Any]) -> Any:
    """Wait for an operation, and return its result.

    Raises:
        CollectiveError: if it failed; `HorovodInternalError` is its other name.
        ConfigError: if it is no handle.
    """
    return _checked(handle).result()


def poll(handle: Future[Any]) -> bool:
    """Whether an operation is done, so that `synchronize` returns at once.

    Raises: ConfigError: if it is no handle.
    """
    return _checked(handle).done()


def _checked(handle: Future[Any]) -> Future[Any]:
    if not isinstance(handle, Future):
        raise ConfigError(f"{handle!r}: must be a handle, which an _async operation returns")
    return handle


@dataclass(frozen=True)
class Operation:
    """A call of an operation with its tensors; one method for each form runs it.

    `finish` makes the returned values, one a tensor, from the results and the counts.
    """

    call: Call
    tensors: Tensors
    finish: Callable[[Tensors, Counts], Sequence[Any]] = lambda results, counts: results
    is_grouped: bool = False
    counts: Counts = field(default_factory=list)

    def run(self) -> Any:
        """Do it; gradients flow back."""
        results = _function().apply(self, self.call.group, *self.tensors)
        return self._finished(results, self.counts)

    def run_in_place(self) -> Any:
        """Change the tensors themselves, and return them."""
        group = self.call.group
        return self._finished(
            *group.run(partial(self.call.forward, group, self.tensors, True), self.full_name)
        )

    def start(self, in_place: bool = False) -> Future[Any]:
        """Start it beside the caller, and return a handle for `synchronize`; without gradients.

        Raises:
            ConfigError: if an operation of this kind and name is under way.
        """
        group = self.call.group

        def work() -> Any:
            return self._finished(*self.call.forward(group, self.tensors, in_place))

        ready = after_stream_of(self.tensors[0], work) if self.tensors else work
        return group.submit(ready, self.full_name)

    def start_in_place(self) -> Future[Any]:
        """Start to change the tensors themselves, and return a handle for `synchronize`."""
        return self.start(in_place=True)

    @property
    def full_name(self) -> str | None:
        """The name that nothing else under way has; `None` for an operation without a name."""
        kind = "grouped_" * self.is_grouped + self.call.operation.name
        return f"{kind} {self.call.name!r}" if self.call.name else None

    def _finished(self, results: Tensors, counts: Counts) -> Any:
        finished = self.finish(results, counts)
        return list(finished) if self.is_grouped else finished[0]


def after_stream_of(tensor: torch.Tensor, work: Callable[[], T]) -> Callable[[], T]:
    """Return `work` for another thread, which waits there for what made `tensor`, on its GPU.

    Its result is complete when it returns. On the CPU that is so anyway.
    """
    if not tensor.is_cuda:
        return work
    import torch

    # The thread has another stream, which does not wait for this one by itself.
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


def _form(
    name: str, build: Callable[..., Operation], do: Callable[[Operation], Any]
) -> Callable[..., Any]:
    """Return a form of an operation: a function of `build`'s arguments.

    Forms that begin with `grouped_` take several tensors, others one.
    """
    is_grouped = name.startswith("grouped_")
    first = "tensors" if is_grouped else "tensor"
    _, *rest = inspect.signature(build).parameters.values()
    if do is not Operation.run:
        rest = [parameter for parameter in rest if parameter.name != "compression"]
    own = inspect.Signature([Parameter(first, Parameter.POSITIONAL_OR_KEYWORD), *rest])

    def form(*args: Any, **kwargs: Any) -> Any:
        given = own.bind(*args, **kwargs).arguments
        tensors = given.pop(first)
        operation = build(list(tensors) if is_grouped else [tensors], **given)
        return do(replace(operation, is_grouped=is_grouped))

    form.__name__ = form.__qualname__ = name
    how, _, _ = (do.__doc__ or "").partition("\n")
    form.__doc__ = f"{inspect.getdoc(build)}\n\n{how}"
    form.__signature__ = own  # type: ignore[attr-defined]
    return form


def _all_reduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Codec = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Reduce a tensor, or several in one go, over all processes.

    Args:
        tensor: of the same shape and dtype on all processes.
        average: Horovod's older way of saying `op`.
        name: if given, it must be the same on all processes.
        compression: of what travels; where neither `_async` nor `_` ends the name.
        op: `hvd.Average` (the default), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor, postscale_factor: factors before and after the reduction.

    Raises:
        NotInitializedError: before `hvd.init()`.
        ConfigError: if the dtype cannot be reduced, or an operation of this name still runs.
        MismatchError: if the processes called different things.
        CollectiveError: if not all processes called it in time, or one was lost.
    """
    factors = prescale_factor, postscale_factor
    call = reduction(ALL_REDUCE, op, average, name, factors, process_set)
    return _narrowed(call, tensors, compression)


run, start = Operation.run, Operation.start
run_in_place, start_in_place = Operation.run_in_place, Operation.start_in_place

allreduce = _form("allreduce", _all_reduce, run)
allreduce_async = _form("allreduce_async", _all_reduce, start)
allreduce_ = _form("allreduce_", _all_reduce, run_in_place)
allreduce_async_ = _form("allreduce_async_", _all_reduce, start_in_place)
grouped_allreduce = _form("grouped_allreduce", _all_reduce, run)
grouped_allreduce_async = _form("grouped_allreduce_async", _all_reduce, start)
grouped_allreduce_ = _form("grouped_allreduce_", _all_reduce, run_in_place)
grouped_allreduce_async_ = _form("grouped_allreduce_async_", _all_reduce, start_in_place)


def _scatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Codec = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """Return this process's share of the rows of a tensor, or of several, reduced.

    Args:
        tensor: `[rows, …]` of one shape; the first processes get one row more if it must be.
        op: `hvd.Average` (the default), `Sum`, `Min`, `Max` or `Product`.

    Raises:
        ConfigError: for a scalar, which has no rows.
    """
    factors = prescale_factor, postscale_factor
    call = reduction(REDUCE_SCATTER, op, None, name, factors, process_set)
    if any(tensor.dim() == 0 for tensor in tensors):  # its one row would go to the first process
        raise ConfigError(
            "a tensor of shape [] has no rows to share out: use hvd.allreduce(), or the shape "
            "[rows]"
        )
    return _narrowed(call, tensors, compression)


def _narrowed(call: Call, tensors: Tensors, compression: Codec) -> Operation:
    narrow, widened = narrowed(tensors, compression)
    return Operation(call, narrow, lambda results, _: widened(results))


reducescatter = _form("reducescatter", _scatter, run)
reducescatter_async = _form("reducescatter_async", _scatter, start)
grouped_reducescatter = _form("grouped_reducescatter", _scatter, run)
grouped_reducescatter_async = _form("grouped_reducescatter_async", _scatter, start)


def _gather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation:
    """Return the rows of all processes by rank, of a tensor or of several.

    Args:
        tensor: `[rows, …]`; the number of rows may differ between processes.
    """
    return Operation(Call(ALL_GATHER, process_set, name), tensors)


allgather = _form("allgather", _gather, run)
allgather_async = _form("allgather_async", _gather, start)
grouped_allgather = _form("grouped_allgather", _gather, run)
grouped_allgather_async = _form("grouped_allgather_async", _gather, start)


def _broadcast(
    tensors: Tensors,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Return the tensor of process `root_rank`.

    Args:
        tensor: of the same shape and dtype on all processes.
        root_rank: in the world, also with a process set.

    Raises:
        ConfigError: if `root_rank` is not in the process set.
    """
    return Operation(Call(BROADCAST, process_set, name, root=root_rank), tensors)


broadcast = _form("broadcast", _broadcast, run)
broadcast_async = _form("broadcast_async", _broadcast, start)
broadcast_ = _form("broadcast_", _broadcast, run_in_place)
broadcast_async_ = _form("broadcast_async_", _broadcast, start_in_place)


def _all_to_all(
    tensors: Tensors,
    splits: torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """Send a part of the rows to each process, and return those received by rank of the sender.

    Args:
        tensor: `[rows, …]`.
        splits: how many rows each process gets, by rank; by default the same number. With it, a
            pair is returned: the rows, and how many came from each, int32 `[size]`.

    Raises:
        ConfigError: if the splits do not fit the rows.
    """
    import torch

    (tensor,) = tensors
    parts = None if splits is None else torch.as_tensor(splits)
    if parts is not None and parts.is_floating_point():
        raise ConfigError(f"splits of {parts.dtype}: give numbers of rows, as torch.int32")
    own = None if parts is None else parts.tolist()

    def finish(results: Tensors, counts: Counts) -> list[Any]:
        got = torch.tensor(counts[0], dtype=torch.int32, device=tensor.device)
        return [results[0] if splits is None else (results[0], got)]

    return Operation(Call(ALL_TO_ALL, process_set, name, splits=own), tensors, finish)


alltoall = _form("alltoall", _all_to_all, run)
alltoall_async = _form("alltoall_async", _all_to_all, start)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all processes of the set have called this."""
    group_of(process_set).barrier()


def join(device: int = -1) -> int:
    """Wait until all processes have called this; contribute zeros to their reductions.

    For processes with different numbers of batches: one without further batches calls this, and the
    others continue. Averages are over all processes, with zeros of the joined ones, as in Horovod.
    All processes must have made the same optimizers before.

    Args:
        device: accepted for compatibility with Horovod.

    Returns:
        The rank of the process that called it last, the same on all.

    Raises:
        CollectiveError: if a process was lost. A process that calls another operation than sums,
            averages and optimizer steps meanwhile is the only one to get it; the joined processes
            continue to wait.
        ConfigError: if there is an optimizer of a process set, which would wait for ever.
    """
    return join_all()


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Fill tensors with those of process `root_rank`.

    Args:
        params: like `model.state_dict()`, `model.named_parameters()` or `model.parameters()`.
        root_rank: in the world.

    Raises:
        ConfigError: if these are no tensors, or `root_rank` is not in the process set.
        CollectiveError: if a process was lost, did not come in time, or has other tensors.
    """
    import torch

    if isinstance(params, Mapping):
        # A dict's order may differ between processes.
        pairs = sorted(params.items())
    elif isinstance(params, Iterable):
        pairs = [param if isinstance(param, tuple) else ("", param) for param in params]
    else:
        raise ConfigError(
            f"params of type {type(params).__name__}: must be named tensors, like "
            "model.state_dict() or model.named_parameters()"
        )
    tensors = [value for _, value in pairs if value is not None]
    for name, value in pairs:
        if value is not None and not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"params[{name!r}] is a {type(value).__name__}, not a tensor: use broadcast_object"
            )
    group = group_of(process_set)
    group.run(partial(broadcast_into, group, [tensor.detach() for tensor in tensors], root_rank))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give an optimizer the state and the options of that of process `root_rank`.

    Works for all optimizers of PyTorch, LBFGS included, and without a step before.

    Args:
        root_rank: in the world.
        model: accepted; sparse parameters need no special care here.

    Raises:
        ConfigError: if `root_rank` is not in the process set.
        CollectiveError: if a process was lost, or did not come in time.
    """
    state = on_cpu(optimizer.state_dict()) if rank() == root_rank else None
    state = broadcast_object(state, root_rank, None, process_set)
    if rank() != root_rank:
        optimizer.load_state_dict(state)
