"""`Reducer`: reduces the gradients of one optimizer during the backward pass, in buckets.

Runs in: child

Gradients travel in the order in which they became ready in the first backward pass. Buckets are
reduced in an order that all processes share, each as soon as it and those before it are complete,
in a group of the optimizer's own: it does not matter what else is reduced meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from sparkdl.collectives.group import Group
from sparkdl.core.errors import CollectiveError, ConfigError
from sparkdl.horovod.common.buckets import plan
from sparkdl.horovod.common.exceptions import OrderOfCallsError
from sparkdl.horovod.common.operations import Call, slot_of
from sparkdl.horovod.torch.compression import Compressor
from sparkdl.horovod.torch.kernels import after_stream_of

if TYPE_CHECKING:
    import torch


class Bucket:
    """Gradients in a row, and behind them a 1 for each that this process has.

    Args:
        params: whose gradients they are.
        is_sparse: of each, whether a process has had a sparse one: where this one has none of its
            own, it gets a sparse one too.
    """

    def __init__(
        self, params: Sequence[torch.nn.Parameter], is_sparse: Sequence[bool] | None = None
    ) -> None:
        import torch

        self.params = list(params)
        self._is_sparse = list(is_sparse or [False] * len(self.params))
        sizes = [param.numel() for param in self.params]
        like = self.params[0]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=like.dtype, device=like.device)
        self.waits_for = len(sizes)
        self._has = [0.0] * len(sizes)
        self._sizes = [*sizes, len(sizes)]
        *rows, self._presence = self.flat.split(self._sizes)
        shaped = zip(rows, self.params, strict=True)
        self._rows = [row.view(param.shape) for row, param in shaped]

    def fill(self, place: int, grad: torch.Tensor | None) -> None:
        """Put a gradient in."""
        import torch

        if grad is None:
            self._rows[place].zero_()
        else:
            self._rows[place].copy_(grad.to_dense() if grad.is_sparse else grad)
        self._has[place] = float(grad is not None)
        self.waits_for -= 1
        if not self.waits_for:
            # Written once, with the last gradient: single elements would be a kernel each on a GPU.
            self._presence.copy_(torch.tensor(self._has))

    def spread(self, reduced: torch.Tensor, can_be_absent: bool) -> None:
        """Put reduced gradients where they are from; where no process has one, none."""
        import torch

        *rows, presence = reduced.split(self._sizes)
        is_there = [True] * len(rows)
        # Reading `presence` waits for the GPU, so only where a gradient may be missing.
        if can_be_absent and any(param.grad is None for param in self.params):
            is_there = (presence > 0).tolist()
        grads, results = [], []
        places = zip(self.params, rows, is_there, self._is_sparse, strict=True)
        for param, row, there, was_sparse in places:
            grad, result = param.grad, row.view(param.shape)
            if grad is None and not there:
                continue
            if was_sparse if grad is None else grad.is_sparse:
                param.grad = result.to_sparse(1)
            elif grad is None:
                # A copy, because the bucket is filled again in the next step.
                param.grad = result.to(param.dtype, copy=True)
            else:
                grads.append(grad)
                results.append(result)
        if grads:
            # One kernel for many gradients, as PyTorch's optimizers do.
            torch._foreach_copy_(grads, results)
        self.waits_for = len(rows)


@dataclass(frozen=True)
class Options:
    """How gradients are reduced.

    Attributes:
        call: the all-reduce, with its factors.
        passes: backward passes before a step.
    """

    call: Call
    compression: type[Compressor]
    passes: int = 1


class Reducer:
    """Reduces the gradients of some parameters, once a step.

    Args:
        named: names and parameters, the same on all processes.
        group: of the processes, for this reducer alone.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], group: Group, options: Options
    ) -> None:
        self._names = [name for name, _ in named]
        self._params = [param for _, param in named]
        self._known = {id(param) for param in self._params}
        self._group = group
        self._options = options
        group.register_step(WeakMethod(self._join_step))
        self._is_planned = False
        self._buckets: list[Bucket] = []
        self._places: dict[int, tuple[int, int]] = {}
        self._passes = options.passes
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
        self._order: list[int] = []  # of the first backward pass, until the buckets are planned
        self._futures = []
        self._next = 0
        self._has_begun = False

    def detach(self) -> None:
        """Leave the gradients alone: another optimizer reduces some of them."""
        self.is_replaced = True
        for hook in self._hooks:
            hook.remove()

    def check(self, params: Iterable[torch.Tensor]) -> None:
        """Check that no parameter would be stepped without the others' gradients.

        Args:
            params: of the optimizer now.

        Raises:
            OrderOfCallsError: if there are more than at first, or another optimizer has them.
        """
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
        """Reduce the remaining gradients, wait, and put the results into the gradients.

        Raises:
            CollectiveError: if a process was lost, or did not come in time.
            ConfigError: if the processes have different parameters.
        """
        import torch

        with torch.no_grad():
            if not self._is_planned:
                self._agree()
            for number in range(len(self._params)):
                # Parameters without a gradient in this step: the other processes may have one.
                if number not in self._filled:
                    self._fill(number)
            for bucket, future in zip(self._buckets, self._futures, strict=True):
                bucket.spread(future.result(), self._options.call.how.op.is_sum)
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
                    self._ready(number)

        return hook

    def _ready(self, number: int) -> None:
        if self._is_planned:
            self._fill(number)
        else:
            self._order.append(number)

    def _fill(self, number: int) -> None:
        """Put a gradient into its bucket; start buckets that are complete, in their order."""
        which, place = self._places[number]
        self._buckets[which].fill(place, self._params[number].grad)
        self._filled.add(number)
        # In order: all members must reduce the same bucket, whatever was ready first.
        while self._next < len(self._buckets) and not self._buckets[self._next].waits_for:
            work = self._reduction(self._buckets[self._next].flat, is_first=self._next == 0)
            self._futures.append(self._group.submit(work))
            self._next += 1

    def _reduction(self, flat: torch.Tensor, is_first: bool) -> Callable[[], torch.Tensor]:
        how, compression = self._options.call.how, self._options.compression

        def work() -> torch.Tensor:
            # The members agree once a step, with its first bucket, and not for each of them.
            if is_first:
                self._announce_step()
            narrow, ctx = compression.compress(flat)
            self._group.reduce_now_(narrow, how)
            return compression.decompress(narrow, ctx)

        return after_stream_of(flat, work)

    def _announce_step(self) -> None:
        how = self._options.call.how
        self._group.step(0, f"by {how}", how.op.is_sum)

    def _join_step(self) -> None:
        """Take part in a step with zeros, in the group's thread."""
        import torch

        if not self._is_planned:
            raise CollectiveError(
                "this process has joined before its first step; then hvd.join() cannot stand in "
                "for it"
            )
        for bucket in self._buckets:
            narrow, _ = self._options.compression.compress(torch.zeros_like(bucket.flat))
            self._group.reduce_now_(narrow, self._options.call.how)

    def prepare_to_join(self) -> None:
        """Agree with the others on the buckets, if there was no step yet."""
        if not self._is_planned:
            self._agree()

    def _agree(self) -> None:
        """Plan the buckets, by what all have met in their first backward pass."""
        mine: dict[str, Any] = {
            "params": [
                f"{name} {list(param.shape)} {param.dtype}"
                for name, param in zip(self._names, self._params, strict=True)
            ],
            "order": self._order,
            "sparse": [
                number
                for number, param in enumerate(self._params)
                if param.grad is not None and param.grad.is_sparse
            ],
        }
        everyone = self._group.all_gather_object(mine)
        for rank, other in enumerate(everyone):
            different = set(other["params"]).symmetric_difference(mine["params"])
            if other["params"] != mine["params"]:
                raise ConfigError(
                    f"rank {self._group.ranks[rank]} does not train the same parameters, or not "
                    f"in the same order: {sorted(different)[:4] or 'the order differs'}. Make the "
                    "optimizer of the same parameters on all ranks"
                )
        # The first process that has an order decides: all buckets must be the same.
        order: list[int] = next((other["order"] for other in everyone if other["order"]), [])
        sparse = {number for other in everyone for number in other["sparse"]}
        planned = plan([slot_of(param) for param in self._params], order)
        self._buckets = [
            Bucket([self._params[number] for number in bucket], [n in sparse for n in bucket])
            for bucket in planned
        ]
        self._places = {
            number: (which, place)
            for which, bucket in enumerate(planned)
            for place, number in enumerate(bucket)
        }
        self._is_planned = True
