"""What every node trains on: columns, batches, epochs; and what does not fit the model.

Runs in: driver, child, feeder
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from sparkdl.control.values import MAX_VALUE_NBYTES
from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.source import Tensor

VALIDATION = "validation"
"""The feed of the validation rows."""
Callbacks = Sequence[Any] | Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class Columns:
    """What is trained with.

    Attributes:
        features: column to the model's input; a single column feeds a single input of any name.
    """

    features: dict[str, str]
    label: str
    weight: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns of the features and the weight."""
        weight = [self.weight] if self.weight else []
        return tuple(dict.fromkeys([*self.features, *weight]))

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(dict.fromkeys([*self.inputs, self.label]))


@dataclass(frozen=True)
class EarlyStopping:
    """When the training ends before its last epoch; `patience` is None for never."""

    patience: int | None = None
    monitor: str | None = None
    min_delta: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every node is given, whatever the framework.

    Attributes:
        model_dir: folder for the model's file, where it is too large to travel.
        saves: after each epoch, to continue there after a failure.
        callbacks: the user's, or a function that makes them.
    """

    columns: Columns
    batch_size: int
    epochs: int
    name: str
    validates: bool = False
    shuffle: bool = False
    seed: int | None = None
    stopping: EarlyStopping = EarlyStopping()
    tensorboard_dir: str | None = None
    model_dir: str | None = None
    saves: bool = False
    callbacks: Callbacks = ()


def inputs_by_column(
    features: Mapping[str, str], inputs: Sequence[Tensor], advice: str = ""
) -> dict[str, Tensor]:
    """Return which column feeds which of the model's inputs; an only one feeds an only one.

    Args:
        advice: what else may be wrong, for the error.

    Raises:
        ConfigError: if an input has no column or two, or a column names no input.
    """
    if len(features) == len(inputs) == 1:
        return dict(zip(features, inputs, strict=True))
    by_name = {tensor.name: tensor for tensor in inputs}
    if sorted(features.values()) == sorted(by_name):
        return {column: by_name[name] for column, name in features.items()}
    raise ConfigError(
        f"the model has the inputs {', '.join(by_name)}, and input_mapping={dict(features)} must "
        f"give each of them one column: setInputMapping({{column: input, …}}){advice}"
    )


def check_size(column: str, size: int, tensor: Tensor) -> None:
    """Check how many values a row of a column holds.

    Raises:
        ConfigError: if the model's input takes another number.
    """
    dims = (tensor.shape or (None, None))[1:]
    if None not in dims and (wanted := prod(n or 0 for n in dims)) != size:
        raise ConfigError(
            f"column {column!r} holds {size} values in a row, and the model's input {tensor} takes "
            f"{wanted}"
        )


def check_travels(nbytes: int, model_dir: str | None) -> None:
    """Check that a model of so many bytes can be returned to the driver.

    Raises:
        ConfigError: if it is too large, and has no folder.
    """
    if model_dir is None and nbytes > MAX_VALUE_NBYTES * 9 // 10:
        raise ConfigError(
            f"the model's weights take {nbytes} bytes, and {MAX_VALUE_NBYTES} at most can travel "
            "to the driver: set model_dir to a folder that all nodes and the driver share"
        )
