"""Trains with Keras 3 as it is installed, without the shim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.frameworks.programs.models import compiled, rows, stock_keras, strategy_of_workers


def main(rank: int, folder: Path) -> dict[str, Any]:
    """Return the error that `fit` ends with."""
    with stock_keras(), strategy_of_workers().scope():
        model = compiled()
        try:
            model.fit(*rows(32), batch_size=16, verbose=0)
        except Exception as error:  # noqa: BLE001 - whatever it is, is what the test is about
            return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}
