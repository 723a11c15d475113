"""Saves and checkpoints with Keras 3 and the shim on several workers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.core.errors import ConfigError
from tests.frameworks.programs.models import compiled, rows, strategy_of_workers


def main(rank: int, folder: Path) -> dict[str, Any]:
    """Return what each case gave on this worker; `own-<rank>` is a folder for this worker only."""
    strategy = strategy_of_workers()
    own = folder / f"own-{rank}"
    own.mkdir()
    temporary = folder / f"tmp-{rank}"
    temporary.mkdir()
    with pytest.MonkeyPatch.context() as meanwhile:
        meanwhile.setattr(tempfile, "tempdir", str(temporary))
        return {
            **_saves(strategy, own, folder / "shared"),
            "backup": _backs_up(strategy, own / "backup"),
            "left": [path.name for path in temporary.glob("sparkdl-*")],
        }


def _listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _saves(strategy: Any, own: Path, shared: Path) -> dict[str, Any]:
    """Train with checkpoints, and save in all ways."""
    with strategy.scope():
        model = compiled()
        model.seen = keras.metrics.Mean()  # reading it is a collective
    checkpoint = keras.callbacks.ModelCheckpoint
    callbacks = [
        checkpoint(own / "deep" / "{epoch}.keras"),
        checkpoint(shared / "new" / "best.weights.h5", "loss", save_weights_only=True),
    ]
    model.fit(*rows(32), batch_size=16, epochs=2, callbacks=callbacks, verbose=0)
    checkpoints = {
        "own": _listing(own / "deep") if (own / "deep").exists() else [],
        "shared": _listing(shared / "new"),
        "path_kept": callbacks[0].filepath == str(own / "deep" / "{epoch}.keras"),
    }
    files = own / "files"
    files.mkdir()
    model.save(files / "method.keras")
    keras.saving.save_model(model, str(files / "function.keras"))
    model.save(files / "legacy.h5")
    model.save_weights(files / "only.weights.h5")
    model.export(str(files / "exported"), verbose=False)
    loaded = None
    if _listing(files):
        copy = keras.saving.load_model(files / "method.keras")
        loaded = float(np.abs(copy(rows(8)[0]) - model(rows(8)[0])).max())
    return {"saves": {"files": _listing(files), "loaded": loaded}, "checkpoints": checkpoints}


def _backs_up(strategy: Any, backup: Path) -> str:
    """Return the error of a `fit` with Keras' own way to resume."""
    with strategy.scope():
        model = compiled()
    try:
        model.fit(*rows(8), callbacks=[keras.callbacks.BackupAndRestore(backup)], verbose=0)
    except ConfigError as error:
        return str(error)
    return ""
