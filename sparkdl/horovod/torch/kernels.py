"""The border of PyTorch: a call of the table becomes a function of autograd, or a handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from sparkdl.collectives.group import Group
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common.operations import Call, Counts, Tensors

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@cache
def _function() -> Any:
    """Return a function of autograd, whose class needs PyTorch."""
    import torch

    class Function(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, operation: Operation, group: Group, *tensors: torch.Tensor) -> Any:
            work = partial(operation.call.move, group, tensors)
            results, ctx.counts = group.run(work, operation.full_name)
            ctx.call, ctx.group, ctx.shapes = operation.call, group, [t.shape for t in tensors]
            operation.counts[:] = ctx.counts
            # Autograd refuses gradients of whole numbers.
            whole = [r for r in results if not (r.is_floating_point() or r.is_complex())]
            ctx.mark_non_differentiable(*whole)
            return tuple(results)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            mine = ctx.call.gradient(ctx.group, grads, ctx.counts)
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
        raise ConfigError(f"{handle!r} is no handle: give what an _async operation returned")
    return handle


@dataclass(frozen=True)
class Operation:
    """A call of an operation with its tensors; one method for each form runs it.

    Attributes:
        finish: makes the returned values, one a tensor, from the results and the counts.
        is_grouped: whether all of that is returned, or the first alone.
        counts: of the operation that `run` has done.
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
            *group.run(partial(self.call.move, group, self.tensors, True), self.full_name)
        )

    def start(self, in_place: bool = False) -> Future[Any]:
        """Start it beside the caller, and return a handle for `synchronize`; without gradients.

        Raises:
            ConfigError: if an operation of this kind and name is under way.
        """
        group = self.call.group

        def work() -> Any:
            return self._finished(*self.call.move(group, self.tensors, in_place))

        ready = after_stream_of(self.tensors[0], work) if self.tensors else work
        return group.submit(ready, self.full_name)

    def start_in_place(self) -> Future[Any]:
        """Start to change the tensors themselves, and return a handle for `synchronize`."""
        return self.start(in_place=True)

    @property
    def full_name(self) -> str | None:
        """The name that nothing else under way has; `None` for an operation without a name."""
        kind = f"grouped_{self.call.row.name}" if self.is_grouped else self.call.row.name
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
