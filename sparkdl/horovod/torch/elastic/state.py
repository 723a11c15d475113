"""`TorchState`: models, optimizers and what else has a `state_dict`, with plain objects beside.

Runs in: child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/torch/elastic/state.py
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from sparkdl.horovod.common.elastic import ObjectState
from sparkdl.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    mapped,
)

if TYPE_CHECKING:
    import torch


class TorchState(ObjectState):
    """The state of a training with PyTorch.

    Args:
        model: kept by its `state_dict`.
        optimizer: likewise.
        kwargs: further attributes. Models, optimizers, schedulers, samplers, and whatever has
            `state_dict` and `load_state_dict`, are kept by these; others as they are.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        everything = {"model": model, "optimizer": optimizer, **kwargs}
        self._holders = [name for name, value in everything.items() if _is_holder(value)]
        for name in self._holders:
            setattr(self, name, everything[name])
        self._saved_holders: dict[str, Any] = {}
        super().__init__(**{n: v for n, v in everything.items() if n not in self._holders})
        self.save()

    def save(self) -> None:
        """Keep copies in memory, of tensors on the CPU."""
        self._saved_holders = {
            name: mapped(getattr(self, name).state_dict(), _copied) for name in self._holders
        }
        super().save()

    def restore(self) -> None:
        """Make all what `save` has kept."""
        for name, saved in self._saved_holders.items():
            getattr(self, name).load_state_dict(copy.deepcopy(saved))
        super().restore()

    def sync(self) -> None:
        """Make the state of all processes that of rank 0, and keep it."""
        import torch

        for name in self._holders:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                tensors = value.state_dict()
                rest = {k: v for k, v in tensors.items() if not isinstance(v, torch.Tensor)}
                broadcast_parameters({k: v for k, v in tensors.items() if k not in rest})
                if rest := broadcast_object(rest):
                    value.load_state_dict({**value.state_dict(), **rest})
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value)
            else:
                value.load_state_dict(broadcast_object(value.state_dict()))
        super().sync()
        self.save()

    def snapshot(self) -> Any:
        """Return what `save` has kept."""
        return {"holders": self._saved_holders, "objects": self._saved_state}

    def load_snapshot(self, snapshot: Any) -> None:
        """Take it over."""
        self._saved_holders = snapshot["holders"]
        super().load_snapshot(snapshot["objects"])

    def reset(self) -> None:
        """Share out anew what samplers have left."""
        for name in self._holders:
            value = getattr(self, name)
            if callable(getattr(value, "reset", None)) and hasattr(value, "num_replicas"):
                value.reset()


def _is_holder(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _copied(value: Any) -> Any:
    """Return a copy; of a tensor, on the CPU."""
    import torch

    is_tensor = isinstance(value, torch.Tensor)
    return value.detach().to("cpu", copy=True) if is_tensor else copy.deepcopy(value)
