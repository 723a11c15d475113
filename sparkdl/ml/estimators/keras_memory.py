"""What a training knows besides its model: the history, and the state of each early stopping.

Runs in: child

Keras begins both anew with every `fit`. After a restart the history would lack the epochs before,
and an early stopping would not know its best weights. Both are saved with each checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sparkdl.core.errors import CheckpointError

_FILE = "memory.json"


class Stopping(msgspec.Struct, frozen=True):
    """The state of one `keras.callbacks.EarlyStopping`, without its best weights."""

    best: float | None
    wait: int
    best_epoch: int
    stopped_epoch: int
    num_weights: int


class _Content(msgspec.Struct, frozen=True):
    # None stands for NaN and infinities, which JSON does not have.
    history: dict[str, list[float | None]]
    stoppings: tuple[Stopping, ...]
    has_stopped: bool


class Memory:
    """The history so far, and the early stoppings among the callbacks of a `fit`.

    Attributes:
        history: metric to its values, one for each epoch, those before a restart included.
        has_stopped: whether the training of the checkpoint had stopped early.
    """

    def __init__(self, callbacks: Iterable[Any], folder: Path | None) -> None:
        """Read what a checkpoint holds.

        Args:
            folder: of the checkpoint to resume from.

        Raises:
            CheckpointError: if its file cannot be read.
        """
        self._stoppings = [each for each in callbacks if hasattr(each, "best_weights")]
        self._folder = folder if folder is not None and (folder / _FILE).exists() else None
        self._content = _Content({}, (), has_stopped=False)
        if self._folder is not None:
            try:
                content = (self._folder / _FILE).read_bytes()
                self._content = msgspec.json.decode(content, type=_Content)
            except (OSError, msgspec.MsgspecError, UnicodeError) as error:
                raise CheckpointError(
                    f"{self._folder / _FILE} cannot be read: {error}. Remove this checkpoint, to "
                    "resume from the one before it, or choose another checkpoint_dir"
                ) from error
        self.history = {
            name: [np.nan if value is None else value for value in values]
            for name, values in self._content.history.items()
        }
        self.has_stopped = self._content.has_stopped

    def restore(self) -> None:
        """Give the early stoppings their states, which `fit` has just reset."""
        # Another number of them belongs to another program: its states would fit none.
        if self._folder is None or len(self._content.stoppings) != len(self._stoppings):
            return
        pairs = zip(self._stoppings, self._content.stoppings, strict=True)
        for number, (each, saved) in enumerate(pairs):
            each.best, each.wait, each.best_epoch = saved.best, saved.wait, saved.best_epoch
            each.stopped_epoch = saved.stopped_epoch
            if saved.num_weights:
                with np.load(_weights(self._folder, number)) as found:
                    each.best_weights = [found[f"arr_{i}"] for i in range(saved.num_weights)]

    def add(self, logs: Mapping[str, Any] | None, *, has_stopped: bool) -> None:
        """Add the values of an epoch, after the early stoppings have seen them."""
        self.has_stopped = has_stopped
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(float(value))

    def save(self, folder: Path) -> None:
        """Write the files of a checkpoint."""
        stoppings = []
        for number, each in enumerate(self._stoppings):
            weights = each.best_weights or []
            # numpy's files do not know bfloat16, which float32 holds exactly.
            arrays = [w.astype(np.float32) if w.dtype.kind == "V" else w for w in weights]
            if arrays:
                np.savez(_weights(folder, number), *arrays)
            best = None if each.best is None else float(each.best)
            numbers = (int(each.wait), int(each.best_epoch), int(each.stopped_epoch))
            stoppings.append(Stopping(best, *numbers, len(arrays)))
        history: dict[str, list[float | None]] = {
            n: [*values] for n, values in self.history.items()
        }
        content = _Content(history, tuple(stoppings), self.has_stopped)
        (folder / _FILE).write_bytes(msgspec.json.encode(content))


def _weights(folder: Path, number: int) -> Path:
    return folder / f"best-{number}.npz"
