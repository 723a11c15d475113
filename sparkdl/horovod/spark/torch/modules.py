"""Modules and optimizers of PyTorch between driver and processes, and modules that score rows.

Runs in: driver, child, feeder
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from sparkdl.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

Shape = Sequence[int]


def save_start(file: Path, **values: Any) -> None:
    """Write objects of PyTorch, their classes too where others cannot import them.

    Raises:
        ConfigError: if one cannot be pickled.
    """
    import torch

    try:
        torch.save(values, file, pickle_module=cloudpickle)
    except Exception as error:
        raise ConfigError(
            f"the model or its optimizer cannot be pickled: {error}. Create what cannot travel in "
            "the module's methods, when it is first used"
        ) from error


def load_start(file: Path) -> dict[str, Any]:
    """Return what `save_start` wrote; it runs what the pickle says."""
    import torch

    found: dict[str, Any] = torch.load(file, "cpu", weights_only=False)
    return found


def packed_module(module: Any) -> Any:
    """Return a module as it can be pickled: TorchScript as its bytes."""
    import torch

    if not isinstance(module, torch.jit.ScriptModule):
        return module
    buffer = io.BytesIO()
    # pickle refuses TorchScript.
    torch.jit.save(module, buffer)
    return buffer.getvalue()


def unpacked_module(packed: Any) -> Any:
    """Undo `packed_module`."""
    import torch

    return torch.jit.load(io.BytesIO(packed)) if isinstance(packed, bytes) else packed


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer without its parameters, so that it can be made again for another copy of them.

    Attributes:
        kind: its class.
        groups: for each parameter group the places of its parameters among the model's.
        state: its `state_dict()`.
    """

    kind: type[torch.optim.Optimizer]
    groups: list[list[int]]
    state: dict[str, Any]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> OptimizerState:
        """Take an optimizer's state.

        Raises:
            ConfigError: if its parameters are not the model's.
        """
        params = list(model.parameters())
        places = {id(param): place for place, param in enumerate(params)}
        own = [group["params"] for group in optimizer.param_groups]
        if all(id(param) in places for group in own for param in group):
            groups = [[places[id(param)] for param in group] for group in own]
        elif len(own) == 1 and [p.shape for p in own[0]] == [p.shape for p in params]:
            groups = [list(range(len(params)))]  # made of a copy of the model
        else:
            raise ConfigError(
                "the optimizer's parameters are not the model's: make it of the model that the "
                "estimator is given, optimizer=SGD(model.parameters(), …)"
            )
        return cls(type(optimizer), groups, optimizer.state_dict())

    def optimizer_for(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer for a copy of the model."""
        params = list(model.parameters())
        # In PyTorch's state the groups have numbers in the place of parameters.
        saved: list[dict[str, Any]] = self.state["param_groups"]
        groups = [
            {
                **{n: x for n, x in group.items() if n != "params"},
                "params": [params[i] for i in own],
            }
            for group, own in zip(saved, self.groups, strict=True)
        ]
        rate = {"lr": saved[0]["lr"]} if "lr" in saved[0] else {}  # some classes demand one
        made = self.kind(groups, **rate)
        # Momenta and counts of steps, so that the training goes on and does not begin.
        made.load_state_dict(self.state)
        return made


def multiply_rates(groups: Sequence[dict[str, Any]], factor: float) -> None:
    """Multiply the learning rates of parameter groups."""
    for group in groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * factor


def shaped(rows: torch.Tensor, shape: Shape | None) -> torch.Tensor:
    """Return rows [rows, …] in the shape that the user gave for a batch, or for a row."""
    if shape is None:
        return rows
    if -1 not in shape and rows.numel() != _product(shape):
        shape = (-1, *shape)
    return rows.reshape(tuple(shape))


def row_shape(shape: Shape) -> tuple[int, ...]:
    """Return the shape of a batch of any number of rows."""
    return tuple(shape) if shape and shape[0] == -1 else (-1, *shape)


def _product(shape: Shape) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def as_list(outputs: Any) -> list[Any]:
    """Return a model's outputs as a list."""
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


@dataclass(frozen=True)
class TorchScoring:
    """Loads a module, and returns a function that scores with it.

    Attributes:
        content: what `packed_module` gave, as `torch.save` writes it.
        shapes: of a batch of each input, None as the column is.
    """

    content: bytes
    shapes: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def of(cls, module: Any, shapes: Sequence[Shape | None]) -> TorchScoring:
        """Take a module as it is now."""
        import torch

        buffer = io.BytesIO()
        torch.save(packed_module(module), buffer, pickle_module=cloudpickle)
        return cls(
            buffer.getvalue(),
            tuple(None if shape is None else row_shape(shape) for shape in shapes),
        )

    def __call__(self) -> Callable[..., list[Any]]:
        """Load it; on the GPU that Spark gave the task, if any."""
        import torch

        module = unpacked_module(torch.load(io.BytesIO(self.content), "cpu", weights_only=False))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        module.eval().to(device)

        def score(*columns: Any) -> list[Any]:
            inputs = [
                shaped(torch.tensor(column), shape).to(device)
                for column, shape in zip(columns, self.shapes, strict=True)
            ]
            with torch.inference_mode():
                outputs = as_list(module(*map(_as_float, inputs)))
            # numpy has no bfloat16.
            return [output.float().cpu().numpy() for output in outputs]

        return score


def _as_float(values: torch.Tensor) -> torch.Tensor:
    """Return values as the training had them: `float32`."""
    return values.float()
