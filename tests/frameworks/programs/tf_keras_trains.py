"""Trains with tf_keras, which is `tf.keras` where TF_USE_LEGACY_KERAS=1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from tests.frameworks.programs.models import compiled, floats, rows, weights


def main(rank: int, folder: Path) -> dict[str, Any]:
    """Return weights and losses of a short training."""
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = compiled("tf_keras")
    history = model.fit(*rows(32), batch_size=16, shuffle=False, epochs=2, verbose=0)
    return {
        "module": tf.keras.Model.__module__,
        "weights": weights(model),
        "history": floats(history),
    }
