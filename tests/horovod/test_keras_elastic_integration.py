"""Keras under `hvd.elastic`: a killed node costs what came after the last commit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.horovod.spark import run_elastic

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
pytestmark = [pytest.mark.tensorflow, pytest.mark.torch, pytest.mark.timeout(300)]

EPOCHS, STEPS = 3, 4


def train() -> dict[str, Any]:
    """Train by `fit` and commit twice an epoch; the second process kills itself once."""
    import keras
    import tensorflow as tf

    import sparkdl.horovod.keras as hvd
    import sparkdl.horovod.tensorflow as hvd_tf
    from sparkdl.node.context import current

    hvd.init()
    restarts = current().restarts  # type: ignore[union-attr]
    keras.utils.set_random_seed(1 + hvd.rank())
    x = np.linspace(-1, 1, 8 * STEPS, dtype=np.float32)[:, np.newaxis]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), "mse")
    resets: list[int] = []
    begun: list[Any] = []

    class Dies(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if hvd.rank() == 1 and not restarts and (state.epoch, batch) == (1, 3):
                os.kill(os.getpid(), signal.SIGKILL)

    @hvd.elastic.run
    def fit(state: Any) -> None:
        begun.extend([state.epoch, state.batch, int(model.optimizer.iterations.numpy())])
        callbacks = [
            hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            Dies(),
        ]
        left = EPOCHS - state.epoch
        model.fit(x, 2 * x, batch_size=8, epochs=left, callbacks=callbacks, verbose=0)

    state: Any = hvd.elastic.KerasState(model, epoch=0, batch=0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    fit(state)
    plain: Any = hvd_tf.elastic.TensorFlowState([tf.Variable([float(hvd.rank())])], word=hvd.rank())
    plain.sync()
    plain.variables[0].assign([5.0])
    plain.word = "other"
    plain.restore()
    return {
        "begun": begun,
        "resets": resets,
        "epoch": state.epoch,
        "weights": [weight.tolist() for weight in model.get_weights()],
        "steps": int(model.optimizer.iterations.numpy()),
        "plain": [plain.variables[0].numpy().tolist(), plain.word],
    }


def test_killed_node_costs_what_came_after_the_last_commit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"executor": "local", "framework": "plain", "show_progress": False}
    first, second = run_elastic(
        train, num_proc=2, verbose=0, checkpoint_dir=str(tmp_path), **options
    )
    assert first == second
    assert first["begun"] == [1, 1, STEPS + 2]  # the second epoch, after two of its batches
    assert first["resets"] == [2]
    assert first["epoch"] == EPOCHS
    assert first["steps"] == STEPS + 2 + 2 * STEPS  # the interrupted epoch began anew
    assert first["plain"] == [[0.0], 0]
