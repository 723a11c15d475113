"""Trains with tf_keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.frameworks.programs.models import compiled, floats, rows, strategy_of_workers, weights


def main(rank: int, folder: Path) -> dict[str, Any]:
    """Return weights and losses of a short training."""
    with strategy_of_workers().scope():
        model = compiled("tf_keras")
    history = model.fit(*rows(32), batch_size=16, shuffle=False, epochs=2, verbose=0)
    return {
        "weights": weights(model),
        "history": floats(history),
    }
