"""`hvd.DistributedOptimizer`: an optimizer that steps by the gradients of all processes.

https://github.com/horovod/horovod/blob/v0.28.1/horovod/torch/optimizer.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import ref

from sparkdl.collectives.transport import Op, Reduction
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common import Average, ProcessSet, global_process_set, group_of, op_of
from sparkdl.horovod.common.compression import Compression, Compressor
from sparkdl.horovod.common.process_sets import has_peers, report_step
from sparkdl.horovod.torch.reducer import OrderOfCallsError, Reducer

if TYPE_CHECKING:
    import torch


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
        named_parameters: like `model.named_parameters()`; names are for messages alone.
        compression: of what travels.
        backward_passes_per_step: gradients of so many backward passes are added up locally, and
            reduced once.
        op: `hvd.Average` or `Sum`; `Min`, `Max` and `Product` too.
        gradient_predivide_factor: gradients are divided by it before they are summed, and by the
            rest of the number of processes afterwards; with `hvd.Average` alone.
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
    """Return the optimizer's parameters with their names, in the optimizer's order."""
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
