"""Trains, evaluates and predicts with Keras 3 and the shim, in the ways users do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tests.frameworks.programs.models import compiled, floats, rows, strategy_of_workers, weights


def main(rank: int, folder: Path) -> dict[str, Any]:
    """Return what each case gave on this worker."""
    strategy = strategy_of_workers()
    asked = context.context().coordination_service
    assert asked.heartbeat_timeout_in_ms == 100_000  # by default 10 s, which a busy host may take
    return {
        "arrays": _arrays(strategy, rank),
        "dicts": _dicts(strategy),
        "stream": _stream(strategy, rank),
        "executions": _several_steps_per_execution(strategy),
        "predict": _predict(strategy, rank),
    }


def _arrays(strategy: Any, rank: int) -> dict[str, Any]:
    """Train on arrays; the chief does the same without a strategy."""
    x, y = rows(64)
    with strategy.scope():
        model = compiled(metrics=("accuracy", "AUC"))
    history = model.fit(
        x, y, batch_size=16, epochs=2, shuffle=False, validation_data=rows(32, 1), verbose=0
    )
    found = {
        "weights": weights(model),
        "history": floats(history),
        "evaluate": [float(v) for v in model.evaluate(*rows(48, 2), batch_size=16, verbose=0)],
    }
    if rank:
        return found
    reference = compiled(metrics=("accuracy", "AUC"))
    expected = reference.fit(
        x, y, batch_size=16, epochs=2, shuffle=False, validation_data=rows(32, 1), verbose=0
    )
    evaluated = reference.evaluate(*rows(48, 2), batch_size=16, verbose=0)
    return found | {
        "expected_weights": weights(reference),
        "expected_history": floats(expected),
        "expected_evaluate": [float(v) for v in evaluated],
    }


class Subclassed(keras.Model):  # type: ignore[misc, unused-ignore]
    """Has no weights before it sees data, and takes a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(3, activation="relu")
        self.head = keras.layers.Dense(1, activation="sigmoid")

    def call(self, inputs: dict[str, Any]) -> Any:
        both = keras.ops.concatenate([inputs["left"], inputs["right"]], axis=-1)
        return self.head(self.hidden(both))


def _dicts(strategy: Any) -> dict[str, Any]:
    """Train on dicts and weights of rows; the same without a strategy, beside the cluster."""
    x, y = rows(32, 3)
    columns = {"left": x[:, :1], "right": x[:, 1:]}
    rows_of = tf.data.Dataset.from_tensor_slices
    dataset = rows_of((columns, y, np.linspace(0.1, 2, 32))).batch(16)

    def fitted(chosen: Any) -> tuple[Any, Any]:
        keras.utils.set_random_seed(7)
        with chosen.scope():
            model = Subclassed()
            model.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
        return model, model.fit(dataset, epochs=2, verbose=0)

    model, history = fitted(strategy)
    reference, _ = fitted(tf.distribute.get_strategy())
    few = {name: column[:5] for name, column in columns.items()}
    return {
        "weights": weights(model),
        "history": floats(history),
        "expected_weights": weights(reference),
        "predicted": len(reference.predict(few, verbose=0)),
    }


def _stream(strategy: Any, rank: int) -> dict[str, Any]:
    """Train on rows that can be read once; count how often they are asked for."""
    starts = []
    seen = []

    def stream() -> Any:
        starts.append(1)
        for x, y in zip(*rows(32, 6 + rank), strict=True):
            seen.append(1)
            yield x, y

    signature = (tf.TensorSpec((4,), tf.float32), tf.TensorSpec((1,), tf.float32))

    def pipeline(_: Any) -> Any:
        return tf.data.Dataset.from_generator(stream, output_signature=signature).batch(8)

    with strategy.scope():
        model = compiled()
    model.fit(strategy.distribute_datasets_from_function(pipeline), verbose=0)
    return {"starts": len(starts), "seen": len(seen), "weights": weights(model)}


def _several_steps_per_execution(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        model = compiled()
        model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=2)
    history = model.fit(*rows(64), batch_size=16, shuffle=False, verbose=0)
    predictions = model.predict(rows(21, 3)[0], batch_size=4, verbose=0)
    direct = np.asarray(model(rows(21, 3)[0]))
    return {
        "weights": weights(model),
        "history": floats(history),
        "error": float(np.abs(predictions - direct).max()),
    }


def _predict(strategy: Any, rank: int) -> dict[str, Any]:
    with strategy.scope():
        model = compiled()
        lazy = Subclassed()
    own = rows(10 + 7 * rank, 8 + rank)[0]
    expected = np.asarray(model(own))
    with strategy.scope():
        within = model.predict(own, batch_size=4, verbose=0)
    alone = None
    if rank == 0:  # no other worker takes part
        alone = model.predict(tf.data.Dataset.from_tensor_slices(own).batch(4), verbose=0)
    shared = rows(16)[0]
    distributed = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(shared).batch(8)
    )
    lazy.predict({"left": own[:, :1], "right": own[:, 1:]}, verbose=0)

    def error(found: Any, wanted: Any) -> float:
        return float(np.abs(found - wanted).max()) if found.shape == wanted.shape else np.inf

    return {
        "within": error(within, expected),
        "outside": error(model.predict(own, batch_size=4, verbose=0), expected),
        "on_batch": error(model.predict_on_batch(own), expected),
        "alone": 0.0 if alone is None else error(alone, expected),
        "distributed": error(model.predict(distributed, verbose=0), np.asarray(model(shared))),
        "strategy_kept": model.distribute_strategy is strategy,
        "lazy_weights": weights(lazy),
    }
