"""`TorchState`: models, optimizers and what else has a `state_dict`, with plain objects beside.

Runs in: child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/torch/elastic/state.py
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common.elastic import ObjectState
from sparkdl.horovod.torch.elastic.sampler import ElasticSampler
from sparkdl.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    mapped,
)

if TYPE_CHECKING:
    import torch


class StateHandler:
    """Keeps one attribute of a `TorchState`. Programs register subclasses for types of their own.

    A commit writes all attributes of the handler except `value`, so these must be what `save` keeps
    and must be picklable.

    Args:
        value: the attribute.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep the state of the value in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Make the state of the value what `save` has kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state of the value on all processes that of rank 0."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Take another value, and save its state."""
        self.value = value
        self.save()


class SamplerStateHandler(StateHandler):
    """Keeps whatever has `state_dict` and `load_state_dict`: samplers, schedulers, scalers."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Keep a copy in memory, of tensors on the CPU."""
        # On the CPU: a commit must not take the GPU's memory a second time.
        self._saved = mapped(self.value.state_dict(), _copied)

    def restore(self) -> None:
        """Load what `save` has kept."""
        # A copy, because PyTorch's optimizers go on with the tensors that they are given.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Load the state of rank 0."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(SamplerStateHandler):
    """Keeps a `torch.nn.Module`."""

    def sync(self) -> None:
        """Load the state of rank 0; its tensors travel without being pickled."""
        import torch

        tensors = self.value.state_dict()
        rest = {k: v for k, v in tensors.items() if not isinstance(v, torch.Tensor)}
        broadcast_parameters({k: v for k, v in tensors.items() if k not in rest})
        if rest := broadcast_object(rest):
            self.value.load_state_dict({**self.value.state_dict(), **rest})


class OptimizerStateHandler(SamplerStateHandler):
    """Keeps a `torch.optim.Optimizer`."""

    def sync(self) -> None:
        """Load the state of rank 0."""
        broadcast_optimizer_state(self.value)


Registry = Sequence[tuple[Any, Any]]
_registry: Registry | None = None


def get_handler_registry() -> Registry:
    """Return pairs of a type and the class of its handler; the first that fits a value is used."""
    global _registry
    if _registry is None:
        import torch

        _registry = [
            (torch.nn.Module, ModelStateHandler),
            (torch.optim.Optimizer, OptimizerStateHandler),
            (ElasticSampler, SamplerStateHandler),
        ]
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Use other handlers for each `TorchState` that is made from now on."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """The state of a training with PyTorch.

    Args:
        model: kept by its `state_dict`.
        optimizer: likewise.
        kwargs: further attributes. A handler in `get_handler_registry` keeps those of its type.
            Schedulers, and other objects with `state_dict` and `load_state_dict`, are kept by these
            methods; all others as they are.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        everything = {"model": model, "optimizer": optimizer, **kwargs}
        found = {name: _handler(value) for name, value in everything.items()}
        self._handlers = {name: handler for name, handler in found.items() if handler is not None}
        for name, handler in self._handlers.items():
            # Past `__setattr__`, which would save each value at once.
            object.__setattr__(self, name, handler.value)
        super().__init__(**{n: v for n, v in everything.items() if n not in self._handlers})
        self.save()

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name in self.__dict__.get("_handlers", ()):
                self._handlers[name].set_value(value)

    def save(self) -> None:
        """Keep copies in memory, of tensors on the CPU."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Make all what `save` has kept."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Make the state of all processes that of rank 0, and keep it."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        self.save()

    def snapshot(self) -> Any:
        """Return what `save` has kept."""
        kept = {
            name: {key: kept for key, kept in vars(handler).items() if key != "value"}
            for name, handler in self._handlers.items()
        }
        return {"handlers": kept, "objects": self._saved_state}

    def load_snapshot(self, snapshot: Any) -> None:
        """Take it over.

        Raises:
            ConfigError: if no handler here keeps an attribute that it has.
        """
        for name, kept in snapshot["handlers"].items():
            if name not in self._handlers:
                raise ConfigError(
                    f"the last commit has the state of {name!r}, which no handler of this "
                    f"TorchState keeps (it keeps {[*self._handlers]}): give it the same "
                    "attributes, or choose another checkpoint_dir"
                )
            vars(self._handlers[name]).update(kept)
        super().load_snapshot(snapshot["objects"])

    def reset(self) -> None:
        """Share out the samplers' remaining indices again."""
        for handler in self._handlers.values():
            value = handler.value
            if callable(getattr(value, "reset", None)) and hasattr(value, "num_replicas"):
                value.reset()


def _handler(value: Any) -> Any:
    """Return the handler of an attribute, or `None` for a plain object."""
    for kind, handler in get_handler_registry():
        if isinstance(value, kind):
            return handler(value)
    has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return SamplerStateHandler(value) if has_state else None


def _copied(value: Any) -> Any:
    """Return a copy; of a tensor, on the CPU."""
    import torch

    is_tensor = isinstance(value, torch.Tensor)
    return value.detach().to("cpu", copy=True) if is_tensor else copy.deepcopy(value)
