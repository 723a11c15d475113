"""Objects, parameters and optimizers' states: the same on all processes.

https://github.com/horovod/horovod/blob/v0.28.1/horovod/torch/functions.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common import ProcessSet, global_process_set, group_of, rank
from sparkdl.horovod.common.elastic import on_cpu
from sparkdl.horovod.common.operations import fill
from sparkdl.horovod.common.process_sets import allgather_object, broadcast_object

if TYPE_CHECKING:
    import torch

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


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
    group.run(partial(fill, group, [tensor.detach() for tensor in tensors], root_rank))


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
