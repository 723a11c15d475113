"""Trains on one node before and after the shim: the results, with and without a strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from sparkdl.frameworks.keras import apply_shim
from tests.frameworks.programs.models import compiled, floats, rows, stock_keras, weights


def _trained(strategy: Any, file: Path) -> dict[str, Any]:
    with strategy.scope():
        model = compiled()
    history = model.fit(*rows(32), batch_size=16, shuffle=False, verbose=0)
    predictions = model.predict(rows(9)[0], batch_size=4, verbose=0)
    model.save(file)
    found = {"weights": weights(model), "history": floats(history), "saved": file.exists()}
    return {**found, "error": float(np.abs(predictions - model(rows(9)[0])).max())}


def main(rank: int, folder: Path) -> dict[str, Any]:
    """Return what was trained by name of the strategy, in the order stock, shimmed."""
    strategies = {
        "none": tf.distribute.get_strategy(),
        "mirrored": tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    }
    found = {}
    with stock_keras():
        for name, strategy in strategies.items():
            found[name] = [_trained(strategy, folder / f"{name}-stock.keras")]
        apply_shim()
        for name, strategy in strategies.items():
            found[name].append(_trained(strategy, folder / f"{name}-shimmed.keras"))
    return found
