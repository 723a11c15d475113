"""What a checkpoint holds of a training besides the model comes back from its files."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from sparkdl.ml.estimators.keras_train import Memory


def stopping(**state: Any) -> SimpleNamespace:
    """Return the attributes of an `EarlyStopping` that has just been reset, but for `state`."""
    reset = {"best": None, "wait": 0, "best_epoch": 0, "stopped_epoch": 0, "best_weights": None}
    return SimpleNamespace(**reset | state)


def test_each_early_stopping_gets_its_own_state(tmp_path: Path) -> None:
    assert Memory([], tmp_path).history == {}, "a checkpoint of another kind"
    narrow = np.array([0.5, 3.0], ml_dtypes.bfloat16)
    given = [
        stopping(best=0.25, wait=2, best_epoch=3),
        SimpleNamespace(other=1),
        stopping(best=np.float32(0.5), best_weights=[np.eye(2), narrow], stopped_epoch=5),
        stopping(),
    ]
    memory = Memory(given, None)
    memory.add({"loss": 0.5, "val_loss": np.float32("nan")}, has_stopped=False)
    memory.add({"loss": 0.25, "val_loss": 1}, has_stopped=True)
    memory.save(tmp_path)

    later = [stopping(), stopping(), stopping()]
    found = Memory(later, tmp_path)
    assert found.has_stopped
    assert found.history["loss"] == [0.5, 0.25]
    assert math.isnan(found.history["val_loss"][0])
    assert all(each == stopping() for each in later), "fit resets them as it begins"
    found.restore()
    first, second, third = later
    assert first == given[0]
    assert (second.best, second.stopped_epoch) == (0.5, 5)
    square, pair = second.best_weights
    assert np.array_equal(square, np.eye(2))
    assert np.array_equal(pair, narrow)
    assert third == stopping()

    others = [stopping()]
    Memory(others, tmp_path).restore()
    assert others == [stopping()], "another program's states fit none of these"
