"""Small models: of known values, with what they give; and of any inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS = np.array([[1.0, -1.0], [0.5, 2.0], [-2.0, 0.0]], np.float32)
BIAS = np.array([0.25, -0.75], np.float32)
WIDTH = 5
"""Of the input of `network`."""


def linear(x: Any) -> Any:
    """Return what the model `dense` gives: float32 [rows, 2] for [rows, 3]."""
    return np.asarray(x, np.float32) @ WEIGHTS + BIAS


def dense() -> Any:
    """Return a Keras model of one layer: input `x` [rows, 3], output `y` [rows, 2]."""
    import keras

    model = keras.Sequential([keras.Input((3,), name="x"), keras.layers.Dense(2, name="y")])
    model.set_weights([WEIGHTS, BIAS])
    return model


def two_in_two_out() -> Any:
    """Return a Keras model: `left` [rows, 2], `right` [rows, 1]; `sum` and `twice` likewise."""
    import keras

    left = keras.Input((2,), name="left")
    right = keras.Input((1,), name="right")
    added = keras.layers.Add(name="sum")([left, right])
    twice = keras.layers.Rescaling(2.0, name="twice")(right)
    return keras.Model([left, right], [added, twice])


def save_functions(folder: Path) -> str:
    """Save a SavedModel of several signatures and return its path."""
    import tensorflow as tf

    class Functions(tf.Module):  # type: ignore[misc]
        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "text")])  # type: ignore[untyped-decorator]
        def upper(self, text: Any) -> Any:
            return {"upper": tf.strings.upper(text), "length": tf.strings.length(text)}

        @tf.function(input_signature=[tf.TensorSpec([None, 2, 2], tf.float32, "image")])  # type: ignore[untyped-decorator]
        def transpose(self, image: Any) -> Any:
            return {"turned": tf.transpose(image, [0, 2, 1]), "all": tf.reduce_sum(image)}

        @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32, "ids")])  # type: ignore[untyped-decorator]
        def vary(self, ids: Any) -> Any:
            return {"same": ids, "count": tf.reduce_sum(tf.ones_like(ids), axis=1)}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "raw")])  # type: ignore[untyped-decorator]
        def raw(self, raw: Any) -> Any:
            return {"bytes": tf.strings.join([raw, b"\xff"])}

    functions = Functions()
    names = ("upper", "transpose", "vary", "raw")
    tf.saved_model.save(functions, str(folder), {name: getattr(functions, name) for name in names})
    return str(folder)


def network(loss: str | None = "mse", **inputs: str) -> Any:
    """Make a model: of one input of numbers, or of inputs of these names and dtypes."""
    import keras

    if not inputs:
        model = keras.Sequential([keras.Input((WIDTH,), name="x"), keras.layers.Dense(1)])
    else:
        tensors = [keras.Input((1,), name=name, dtype=kind) for name, kind in inputs.items()]
        cast = [keras.ops.cast(t, "float32") for t in tensors if t.dtype != "string"]
        model = keras.Model(tensors, keras.layers.Dense(1)(sum(cast, keras.ops.zeros((1, 1)))))
    if loss:
        model.compile("sgd", loss)
    return model
