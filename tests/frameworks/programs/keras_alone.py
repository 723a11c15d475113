"""Trains on one node of two devices, with Keras as it is and with the shim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from sparkdl.frameworks.keras import apply_shim
from tests.frameworks.programs.models import compiled, floats, rows, stock_keras, weights


def _trained(file: Path) -> dict[str, Any]:
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = compiled()
    history = model.fit(*rows(32), batch_size=16, shuffle=False, verbose=0)
    predictions = model.predict(rows(9)[0], batch_size=4, verbose=0)
    model.save(file)
    found = {"weights": weights(model), "history": floats(history), "saved": file.exists()}
    return {**found, "error": float(np.abs(predictions - model(rows(9)[0])).max())}


def main(rank: int, folder: Path) -> list[dict[str, Any]]:
    """Return what was trained with stock Keras, and with the shim."""
    with stock_keras():
        stock = _trained(folder / "stock.keras")
        apply_shim()
        return [stock, _trained(folder / "shimmed.keras")]
