"""`TorchState`: models, optimizers and what else has a `state_dict`, with plain objects beside.

Runs in: child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/torch/elastic/state.py
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError
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
        kwargs: further attributes. Samplers, schedulers, and whatever else has `state_dict` and
            `load_state_dict`, are kept by these; all others as they are.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        everything = {"model": model, "optimizer": optimizer, **kwargs}
        self._kept = {
            name: _kept(value)
            for name, value in everything.items()
            if hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        }
        for name in self._kept:
            # Past `__setattr__`, which would save each value a second time.
            object.__setattr__(self, name, everything[name])
        super().__init__(**{n: v for n, v in everything.items() if n not in self._kept})

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name in self.__dict__.get("_kept", ()):
                self._kept[name] = _kept(value)

    def save(self) -> None:
        """Keep copies in memory, of tensors on the CPU."""
        self._kept = {name: _kept(getattr(self, name)) for name in self._kept}
        super().save()

    def restore(self) -> None:
        """Make all what `save` has kept."""
        for name, state in self._kept.items():
            # A copy, because PyTorch's optimizers go on with the tensors that they are given.
            getattr(self, name).load_state_dict(copy.deepcopy(state))
        super().restore()

    def sync(self) -> None:
        """Make the state of all processes that of rank 0, and keep it."""
        for name in self._kept:
            _sync(getattr(self, name))
        super().sync()
        self.save()

    def snapshot(self) -> Any:
        """Return what `save` has kept."""
        return {"states": self._kept, "objects": self._saved_state}

    def load_snapshot(self, snapshot: Any) -> None:
        """Take it over.

        Raises:
            ConfigError: if no attribute here has a state that it has.
        """
        states = snapshot["states"]
        if unknown := [name for name in states if name not in self._kept]:
            raise ConfigError(
                f"the last commit has the state of {unknown[0]!r}, which this TorchState has not "
                f"(it keeps {[*self._kept]}): give it the same attributes, or choose another "
                "checkpoint_dir"
            )
        self._kept |= states
        super().load_snapshot(snapshot["objects"])

    def reset(self) -> None:
        """Share out the samplers' remaining indices again."""
        for name in self._kept:
            value = getattr(self, name)
            if callable(getattr(value, "reset", None)) and hasattr(value, "num_replicas"):
                value.reset()


def _sync(value: Any) -> None:
    """Load the state of rank 0; a module's tensors travel without being pickled."""
    import torch

    if isinstance(value, torch.optim.Optimizer):
        broadcast_optimizer_state(value)
        return
    state = value.state_dict()
    if not isinstance(value, torch.nn.Module):
        value.load_state_dict(broadcast_object(state))
        return
    rest = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
    broadcast_parameters({k: v for k, v in state.items() if k not in rest})
    if rest := broadcast_object(rest):
        value.load_state_dict({**value.state_dict(), **rest})


def _kept(value: Any) -> Any:
    """Return a copy of a state, of tensors on the CPU: a GPU's memory holds them already."""
    return mapped(value.state_dict(), _copied)


def _copied(value: Any) -> Any:
    import torch

    is_tensor = isinstance(value, torch.Tensor)
    return value.detach().to("cpu", copy=True) if is_tensor else copy.deepcopy(value)
