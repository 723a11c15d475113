"""The model, the data and the state of Keras that the programs share."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np


@cache
def strategy_of_workers() -> Any:
    """Return the strategy of this process; a second one would cut the first one's connections."""
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def rows(count: int, seed: int = 0) -> tuple[Any, Any]:
    """Return float32 [count, 4] and float32 [count, 1]."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 4)).astype("float32")
    y = (x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32") > 0).astype("float32")
    return x, y


def compiled(metrics: tuple[str, ...] = ("accuracy",)) -> Any:
    """Return a small binary classifier with the same initial weights every time.

    Args:
        metrics: to compile it with; "AUC" is one that is not the mean over the workers.
    """
    import keras

    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(1, activation="sigmoid", kernel_initializer="glorot_uniform"),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "binary_crossentropy", metrics=list(metrics))
    return model


def weights(model: Any) -> list[float]:
    return [float(value) for array in model.get_weights() for value in array.ravel()]


def floats(history: Any) -> dict[str, list[float]]:
    """Return the history of a `fit` as JSON can hold it."""
    return {name: [float(value) for value in values] for name, values in history.history.items()}
