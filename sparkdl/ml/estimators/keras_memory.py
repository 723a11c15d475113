"""What a training knows besides its model: the history, and the state of each early stopping.

Runs in: child

Keras begins both anew with every `fit`. After a restart the history would lack the epochs before,
and an early stopping would not know its best weights. Both are saved with each checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparkdl.core.errors import CheckpointError

_FILE = "memory.json"


def early_stoppings(callbacks: Iterable[Any]) -> list[Any]:
    """Return those of Keras' callbacks that `state_of` takes."""
    return [each for each in callbacks if hasattr(each, "best_weights")]


def state_of(stopping: Any) -> list[Any]:
    """Return the state of an early stopping as arrays: numbers, then its best weights."""
    weights = stopping.best_weights or ()
    # NaN stands for an early stopping that has seen no epoch yet.
    best = np.nan if stopping.best is None else stopping.best
    numbers = [best, stopping.wait, stopping.best_epoch, stopping.stopped_epoch, len(weights)]
    return [np.array(numbers, np.float64), *weights]


def take_state(stopping: Any, arrays: list[Any]) -> None:
    """Give an early stopping its state, and take it off the front of `arrays`."""
    best, *counts = arrays.pop(0)
    stopping.wait, stopping.best_epoch, stopping.stopped_epoch, num_weights = map(int, counts)
    stopping.best = None if np.isnan(best) else float(best)
    stopping.best_weights = arrays[:num_weights] or None
    del arrays[:num_weights]


class Memory:
    """The history so far, and the early stoppings among the callbacks of a `fit`.

    Attributes:
        history: metric to its values, one for each epoch, those before a restart included.
        has_stopped: whether the training of the checkpoint had stopped early.
    """

    def __init__(self, callbacks: Iterable[Any], folder: Path | None) -> None:
        """Read the checkpoint to resume from, in `folder`.

        Raises:
            CheckpointError: if its file cannot be read.
        """
        self._stoppings = early_stoppings(callbacks)
        self._folder = folder if folder is not None and (folder / _FILE).exists() else None
        self.history: dict[str, list[float]] = {}
        self.has_stopped = False
        num_stoppings = 0
        if self._folder is not None:
            try:
                content = json.loads((self._folder / _FILE).read_bytes())
                self.history, self.has_stopped, num_stoppings = content
            except (OSError, ValueError, TypeError) as error:
                raise CheckpointError(
                    f"{self._folder / _FILE} cannot be read: {error}. Remove this checkpoint, to "
                    "resume from the one before it, or choose another checkpoint_dir"
                ) from error
        # Another number of them belongs to another program: its states would fit none.
        self._is_same = num_stoppings == len(self._stoppings)

    def restore(self) -> None:
        """Give the early stoppings their states, which `fit` has just reset."""
        if self._folder is None or not self._is_same:
            return
        for number, each in enumerate(self._stoppings):
            with np.load(_state(self._folder, number)) as found:
                take_state(each, [found[name] for name in found.files])

    def add(self, logs: Mapping[str, Any] | None, *, has_stopped: bool) -> None:
        """Add the values of an epoch, after the early stoppings have seen them."""
        self.has_stopped = has_stopped
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(float(value))

    def save(self, folder: Path) -> None:
        """Write the files of a checkpoint."""
        for number, each in enumerate(self._stoppings):
            # numpy's files do not know bfloat16, which float32 holds exactly.
            arrays = [x.astype(np.float32) if x.dtype.kind == "V" else x for x in state_of(each)]
            np.savez(_state(folder, number), *arrays)
        # Python's JSON has NaN and infinities.
        content = [self.history, self.has_stopped, len(self._stoppings)]
        (folder / _FILE).write_text(json.dumps(content))


def _state(folder: Path, number: int) -> Path:
    return folder / f"stopping-{number}.npz"
