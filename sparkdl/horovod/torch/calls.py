"""What each of Horovod's operations does first: find its group, and understand its arguments.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkdl.collectives.base import Group
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common.basics import op_of
from sparkdl.horovod.common.process_sets import ProcessSet, group_of
from sparkdl.horovod.torch.handles import Handle, started
from sparkdl.horovod.torch.kernels import Reduction
from sparkdl.horovod.torch.streams import handed_over

if TYPE_CHECKING:
    import torch


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


def done(process_set: ProcessSet, name: str | None, work: Callable[[Group], Any]) -> Any:
    """Do `work` in the group of a process set; see `start`."""
    group = group_of(process_set)
    return group.run(lambda: work(group), name)


def start(
    process_set: ProcessSet,
    name: str | None,
    work: Callable[[Group], Any],
    *like: torch.Tensor,
) -> Handle:
    """Start `work` in the group of a process set, beside the caller.

    Args:
        name: of the operation, see `named`.
        like: the tensors that it uses, which on a GPU may not be complete yet.

    Raises:
        ConfigError: if an operation of this name is under way.
    """
    group = group_of(process_set)

    def mine() -> Any:
        return work(group)

    return started(group, handed_over(like[0], mine) if like else mine, name)


def named(operation: str, name: str | None) -> str | None:
    """Return the full name of an operation, of which one can be under way; none without a name."""
    return f"{operation} {name!r}" if name else None
