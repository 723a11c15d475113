"""`hvd.DistributedOptimizer`: an optimizer that steps by the gradients of all processes.

A `Reducer` reduces them during the backward pass, in buckets, from the last parameter to the first:
each as soon as it and those before it are complete, in a group of the optimizer's own, so that it
does not matter what else is reduced meanwhile.
https://github.com/horovod/horovod/blob/v0.28.1/horovod/torch/optimizer.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import ref

from sparkdl.collectives.group import Group
from sparkdl.collectives.transport import Op, Reduction
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common import Average, ProcessSet, global_process_set, group_of, op_of
from sparkdl.horovod.common.compression import Compression, Compressor
from sparkdl.horovod.common.operations import plan, slot_of
from sparkdl.horovod.common.process_sets import has_peers, report_step
from sparkdl.horovod.torch.mpi_ops import after_stream_of

if TYPE_CHECKING:
    import torch


class OrderOfCallsError(ConfigError, AssertionError):
    """An optimizer's methods were called in an order that loses gradients."""


class Bucket:
    """Flat gradient buffer. A process without a gradient sends zeros; sparse ones become dense."""

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

    def fill(self, index: int, grad: torch.Tensor | None) -> None:
        if grad is None:
            self._rows[index].zero_()
        elif grad.is_sparse:
            self._sparse.add(index)  # also of later steps without a gradient
            self._rows[index].copy_(grad.to_dense())
        else:
            self._rows[index].copy_(grad)
        self.waits_for -= 1

    def spread(self, reduced: torch.Tensor) -> None:
        import torch

        grads, results = [], []
        for index, result in enumerate(self._shaped(reduced)):
            param = self.params[index]
            if index in self._sparse:
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
    """Reduces the gradients of some parameters, once a step, in a group of its own."""

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
        self._bucket_of: dict[int, tuple[int, int]] = {}
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
        return self._has_begun

    def reset(self, passes: int | None = None) -> None:
        """Forget the gradients of an unfinished step; change the number of passes of each."""
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
        if self.is_replaced:
            raise OrderOfCallsError(
                "another DistributedOptimizer was made of these parameters later, and reduces "
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
        self._bucket_of = {
            number: (which, index)
            for which, bucket in enumerate(planned)
            for index, number in enumerate(bucket)
        }

    def _fill(self, number: int) -> None:
        """Put a gradient into its bucket; start buckets that are complete, in their order."""
        self._plan()
        which, index = self._bucket_of[number]
        self._buckets[which].fill(index, self._params[number].grad)
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


class Distributed:
    """Overrides mixed into a class of the user's optimizer."""

    param_groups: list[dict[str, Any]]
    _reducer: Reducer | None
    _parameter_names: dict[torch.nn.Parameter, str]
    _has_synchronized: bool
    _should_synchronize: bool
    _steps: int

    def synchronize(self) -> None:
        """Wait for the reduced gradients, and put them into the parameters' `grad`.

        Use it to change gradients before `step`, as by clipping, and call `step` inside
        `skip_synchronize`.

        Raises:
            CollectiveError: if a process was lost, or did not come in time.
            OrderOfCallsError: if parameters came or were unfrozen meanwhile, or another
                DistributedOptimizer has been made of them.
        """
        if self._reducer is not None:
            self._reducer.check(param for group in self.param_groups for param in group["params"])
            self._reducer.synchronize()
        self._has_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` does not synchronize: `synchronize` has been called already."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize the gradients, unless inside `skip_synchronize`, and step by them.

        The step is reported to the driver, for its table and its hang watch.
        """
        if self._should_synchronize:
            if self._has_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(): the gradients are reduced twice. Call step() "
                    "within `with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            self.synchronize()
        self._has_synchronized = False
        result = super().step(closure)  # type: ignore[misc]
        self._steps += 1
        report_step(self._steps)
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget the gradients.

        Raises:
            OrderOfCallsError: between `loss.backward()` and `step` or `synchronize`.
        """
        if self._reducer is not None and self._reducer.is_busy:
            raise OrderOfCallsError(
                "optimizer.zero_grad() after loss.backward() and before optimizer.step() or "
                "optimizer.synchronize(): the gradients are being reduced. Call zero_grad() "
                "before backward() or after step()"
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Take over a saved state; gradients that were not used are forgotten."""
        if self._reducer is not None:
            self._reducer.reset()
        self._has_synchronized, self._should_synchronize = False, True
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes there are before each step."""
        if self._reducer is not None:
            self._reducer.reset(_checked_passes(passes))


def DistributedOptimizer(  # noqa: N802, PLR0913 (Horovod's name and options)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class whose `step` uses the gradients of all processes.

    Gradients are reduced in buckets while the backward pass goes on. It shares state and parameter
    groups with `optimizer`, which is not to be used beside it. All processes of the set call this.

    Args:
        optimizer: any of PyTorch's.
        named_parameters: like `model.named_parameters()`; names are only for messages.
        compression: of what travels.
        backward_passes_per_step: gradients of this many backward passes are added up locally, and
            reduced once.
        op: `hvd.Average` or `Sum`; `Min`, `Max` and `Product` too.
        gradient_predivide_factor: gradients are divided by it before they are summed, and by the
            rest of the number of processes afterwards; only with `hvd.Average`.
        num_groups, groups: accepted; buckets are made by size.
        sparse_as_dense: accepted; sparse gradients travel as dense ones, and `step` gets sparse
            ones.
        process_set: which processes; on others the optimizer is as it was.

    Raises:
        ConfigError: for duplicate names, parameters without a name, or conflicting options; if the
            processes have different parameters.
        RemovedError: for `op=hvd.Adasum`.
        NotInitializedError: before `hvd.init()`.
    """
    operation = op_of(op)
    if gradient_predivide_factor != 1.0 and operation is not Op.AVERAGE:
        raise ConfigError("gradient_predivide_factor needs op=hvd.Average")
    named = _named(optimizer, named_parameters)
    # `Average` divides by the number of processes between the two.
    factors = 1 / gradient_predivide_factor, gradient_predivide_factor
    how = Reduction(operation, *factors)
    # The others have no gradients that could be waited for.
    trained = [(name, param) for name, param in named if param.requires_grad]
    passes = _checked_passes(backward_passes_per_step)
    reducer = None
    if has_peers(process_set):
        everybody = group_of(process_set)
        # Connections of its own, so that other operations may come between its buckets.
        group = everybody.subgroup(range(everybody.size))
        assert group is not None, "a group of all its members has this one"
        reducer = Reducer(trained, group, how, compression, passes)
        _own([param for _, param in trained], reducer)
    base = type(optimizer)
    # Not by its constructor, whose arguments are unknown: it shares the state of the other one.
    distributed: Any = object.__new__(type(base.__name__, (Distributed, base), {}))
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(distributed).update(own)  # except a scheduler's wrapper, which steps the old one
    distributed._reducer = reducer
    distributed._parameter_names = {param: name for name, param in named}
    distributed._has_synchronized, distributed._should_synchronize = False, True
    distributed._steps = 0
    return distributed


def _named(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> list[tuple[str, torch.nn.Parameter]]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if named is None:
        return [(f"parameter {number}", param) for number, param in enumerate(params)]
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ConfigError(
            "named_parameters must be pairs of name and parameter, like model.named_parameters()"
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"named_parameters has these names more than once: {twice}. Name each parameter "
            "differently, as model.named_parameters() does"
        )
    by_id = {id(param): name for name, param in pairs}
    missing = sum(id(param) not in by_id for param in params)
    if missing:
        raise ConfigError(
            f"named_parameters has no name for {missing} of the optimizer's {len(params)} "
            "parameters: give the named parameters of all models that it trains"
        )
    return [(by_id[id(param)], param) for param in params]


def _checked_passes(passes: int) -> int:
    if type(passes) is not int or passes < 1:
        raise ConfigError(f"backward_passes_per_step={passes!r} must be a whole number, 1 or more")
    return passes


def _own(params: Sequence[torch.Tensor], reducer: Reducer) -> None:
    """Detach the reducers that have had gradients of these parameters: there is one at a time."""
    owners = _owners()
    before = {id(it): it for param in params if param in owners and (it := owners[param]())}
    for it in before.values():
        it.detach()
    for param in params:
        owners[param] = ref(reducer)


@cache
def _owners() -> MutableMapping[torch.Tensor, ref[Reducer]]:
    from torch.utils.weak import WeakIdKeyDictionary

    # By identity, because tensors compare element by element.
    owners: MutableMapping[torch.Tensor, ref[Reducer]] = WeakIdKeyDictionary()
    return owners
