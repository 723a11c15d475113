"""Saves, checkpoints, backs up and resumes with Keras 3 and the shim on several workers."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl.core.errors import ConfigError
from tests.frameworks.programs.models import compiled, rows, strategy_of_workers, weights


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
            "resumes": _resumes(strategy, folder / "backup", own / "backup", rank),
            "apart": _resumes_apart(strategy, own / "backup"),
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


class _Interrupt(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise InterruptedError("as if the node had failed")


def _fit(model: Any, *callbacks: Any) -> Any:
    x, y = rows(32)
    return model.fit(
        x, y, batch_size=16, epochs=4, shuffle=False, callbacks=list(callbacks), verbose=0
    )


def _interrupted(strategy: Any, backup: Path) -> Any:
    """Train two epochs of four with a backup, then return a new model to resume with."""
    with strategy.scope():
        model = compiled()
    try:
        _fit(model, keras.callbacks.BackupAndRestore(backup), _Interrupt())
    except InterruptedError:
        with strategy.scope():
            return compiled()


def _resumes(strategy: Any, backup: Path, of_chief: Path, rank: int) -> dict[str, Any]:
    model = _interrupted(strategy, backup)
    if rank == 0:
        shutil.copytree(backup, of_chief)
    epochs = _fit(model, keras.callbacks.BackupAndRestore(backup)).epoch
    left = backup.exists()
    reference = compiled()
    _fit(reference)
    return {
        "epochs": epochs,
        "left": left,
        "weights": weights(model),
        "expected_weights": weights(reference),
    }


def _resumes_apart(strategy: Any, backup: Path) -> dict[str, Any]:
    """Resume from what the chief alone has."""
    with strategy.scope():
        model = compiled()
    try:
        _fit(model, keras.callbacks.BackupAndRestore(backup))
    except ConfigError as error:
        return {"error": str(error)}
    return {"error": ""}
