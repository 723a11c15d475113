"""Trains on one node before and after the shim: the results, with and without a strategy.

Usage: keras_alone.py <result file>
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from sparkdl.frameworks.keras import apply_shim
from tests.frameworks.programs.models import compiled, floats, rows, weights


def _trained(strategy: Any, file: Path) -> dict[str, Any]:
    with strategy.scope():
        model = compiled()
    history = model.fit(*rows(32), batch_size=16, shuffle=False, verbose=0)
    predictions = model.predict(rows(9)[0], batch_size=4, verbose=0)
    model.save(file)
    found = {"weights": weights(model), "history": floats(history), "saved": file.exists()}
    return {**found, "error": float(np.abs(predictions - model(rows(9)[0])).max())}


def main(result: Path) -> None:
    """Write what was trained by name of the strategy, in the order stock, shimmed."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategies = {
        "none": tf.distribute.get_strategy(),
        "mirrored": tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    }
    found = {}
    for name, strategy in strategies.items():
        found[name] = [_trained(strategy, result.parent / f"{name}-stock.keras")]
    apply_shim()
    for name, strategy in strategies.items():
        found[name].append(_trained(strategy, result.parent / f"{name}-shimmed.keras"))
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
