"""`Reducer`: reduces the gradients of one optimizer during the backward pass, in buckets.

Buckets are reduced from the last parameter to the first, the order of a backward pass, each as soon
as it and those before it are complete, in a group of the optimizer's own: it does not matter what
else is reduced meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from sparkdl.collectives.group import Group
from sparkdl.collectives.transport import Reduction
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common.compression import Compressor
from sparkdl.horovod.common.operations import plan, slot_of
from sparkdl.horovod.torch.kernels import after_stream_of

if TYPE_CHECKING:
    import torch


class OrderOfCallsError(ConfigError, AssertionError):
    """An optimizer's methods were called in an order that loses gradients."""


class Bucket:
    """Gradients in a row. Where a process has none it sends zeros; sparse ones travel as dense."""

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        import torch

        self.params = list(params)
        self._sizes = [param.numel() for param in self.params]
        like = self.params[0]
        self.flat = torch.zeros(sum(self._sizes), dtype=like.dtype, device=like.device)
        self.waits_for = len(self.params)
        self._rows = self._shaped(self.flat)
        self._sparse: set[int] = set()

    def _shaped(self, flat: torch.Tensor) -> list[torch.Tensor]:
        rows = zip(flat.split(self._sizes), self.params, strict=True)
        return [row.view(param.shape) for row, param in rows]

    def fill(self, place: int, grad: torch.Tensor | None) -> None:
        if grad is None:
            self._rows[place].zero_()
        elif grad.is_sparse:
            self._sparse.add(place)  # also of later steps without a gradient
            self._rows[place].copy_(grad.to_dense())
        else:
            self._rows[place].copy_(grad)
        self.waits_for -= 1

    def spread(self, reduced: torch.Tensor) -> None:
        import torch

        grads, results = [], []
        for place, result in enumerate(self._shaped(reduced)):
            param = self.params[place]
            if place in self._sparse:
                param.grad = result.to_sparse(1)
            elif param.grad is None:
                # A copy, because the bucket is filled again in the next step.
                param.grad = result.to(param.dtype, copy=True)
            else:
                grads.append(param.grad)
                results.append(result)
        if grads:
            # One kernel for many gradients, as PyTorch's optimizers do.
            torch._foreach_copy_(grads, results)
        self.waits_for = len(self.params)


class Reducer:
    """Reduces the gradients of some parameters, once a step.

    Args:
        named: names and parameters, the same on all processes.
        group: of the processes, for this reducer alone.
        passes: backward passes before a step.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        group: Group,
        how: Reduction,
        compression: type[Compressor],
        passes: int,
    ) -> None:
        self._names = [name for name, _ in named]
        self._params = [param for _, param in named]
        self._known = {id(param) for param in self._params}
        self._group = group
        self._how, self._compression = how, compression
        self._check_same()
        self._buckets: list[Bucket] = []
        self._places: dict[int, tuple[int, int]] = {}
        self._passes = passes
        self.is_replaced = False
        self._futures: list[Future[Any]] = []
        self.reset()
        # After the accumulation, because `grad` holds the sum of several passes only then.
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._hook(number))
            for number, param in enumerate(self._params)
        ]

    @property
    def is_busy(self) -> bool:
        """Whether there are gradients of a backward pass that no step has used."""
        return self._has_begun

    def reset(self, passes: int | None = None) -> None:
        """Forget the gradients of an unfinished step.

        Args:
            passes: backward passes before each step from now on.
        """
        for future in self._futures:
            future.exception()  # a running reduction still writes into its bucket
        for bucket in self._buckets:
            bucket.waits_for = len(bucket.params)
        self._passes = self._passes if passes is None else passes
        self._left = [self._passes] * len(self._params)
        self._filled: set[int] = set()
        self._futures = []
        self._next = 0
        self._has_begun = False

    def detach(self) -> None:
        """Leave the gradients alone: another optimizer reduces some of them."""
        self.is_replaced = True
        for hook in self._hooks:
            hook.remove()

    def check(self, params: Iterable[torch.Tensor]) -> None:
        """Check that no parameter would be stepped without the others' gradients."""
        if self.is_replaced:
            raise OrderOfCallsError(
                "another DistributedOptimizer has been made of these parameters, which reduces "
                "their gradients: step that one"
            )
        new = sum(param.grad is not None and id(param) not in self._known for param in params)
        if new:
            raise OrderOfCallsError(
                f"{new} parameters have gradients that are not reduced: they were frozen, or not "
                "in the optimizer, when DistributedOptimizer wrapped it. Wrap it again"
            )

    def synchronize(self) -> None:
        """Reduce the remaining gradients, wait, and put the results into the gradients."""
        import torch

        with torch.no_grad():
            for number in range(len(self._params)):
                # Parameters without a gradient here: the other processes may have one.
                if number not in self._filled:
                    self._fill(number)
            for bucket, future in zip(self._buckets, self._futures, strict=True):
                bucket.spread(future.result())
        self.reset()

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            import torch

            if self._left[number] <= 0:
                raise OrderOfCallsError(
                    f"the gradient of {self._names[number]} came more than "
                    f"{self._passes} times before optimizer.step(): set backward_passes_per_step "
                    "to the number of backward passes in a step"
                )
            self._has_begun = True
            self._left[number] -= 1
            if self._left[number] == 0:
                with torch.no_grad():
                    self._fill(number)

        return hook

    def _plan(self) -> None:
        """Make the buckets, once: not before the first step, as models may move to a GPU."""
        if self._buckets:
            return
        planned = plan([slot_of(param) for param in self._params])
        self._buckets = [Bucket([self._params[number] for number in bucket]) for bucket in planned]
        self._places = {
            number: (which, place)
            for which, bucket in enumerate(planned)
            for place, number in enumerate(bucket)
        }

    def _fill(self, number: int) -> None:
        """Put a gradient into its bucket; start buckets that are complete, in their order."""
        self._plan()
        which, place = self._places[number]
        self._buckets[which].fill(place, self._params[number].grad)
        self._filled.add(number)
        # In order: all members must reduce the same bucket, whatever was ready first.
        while self._next < len(self._buckets) and not self._buckets[self._next].waits_for:
            self._futures.append(self._group.submit(self._reduction(self._next)))
            self._next += 1

    def _reduction(self, number: int) -> Callable[[], torch.Tensor]:
        flat = self._buckets[number].flat

        def work() -> torch.Tensor:
            narrow, ctx = self._compression.compress(flat)
            self._group.all_reduce_(narrow, self._how, f"gradients {number}")
            return self._compression.decompress(narrow, ctx)

        return after_stream_of(flat, work)

    def _check_same(self) -> None:
        """Raise `ConfigError` if the processes have different parameters."""
        mine = [
            f"{name} {list(param.shape)} {param.dtype}"
            for name, param in zip(self._names, self._params, strict=True)
        ]
        for rank, other in enumerate(self._group.all_gather_object(mine)):
            if other != mine:
                different = sorted(set(other).symmetric_difference(mine))
                raise ConfigError(
                    f"rank {self._group.ranks[rank]} does not train the same parameters, or not "
                    f"in the same order: {different[:4] or 'the order differs'}. Make the "
                    "optimizer of the same parameters on all ranks"
                )
