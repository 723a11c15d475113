"""A training with Keras that was interrupted ends with the weights of one that was not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.options import Feeding
from sparkdl.frameworks.keras_checkpoint import _Copy
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import launch

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

_SOON_S = 120.0
_NOISE = 1e-5
EPOCHS, BATCH, BATCHES = 3, 4, 5


def rows_of(nodes: int) -> list[dict[str, Any]]:
    """Rows that several nodes may share out in any way: then all are the same."""
    return [
        {"x": [0.1 * (i % 7), 1.0] if nodes == 1 else [0.3, 1.0], "y": float(i % 3 == 0)}
        for i in range(nodes * BATCH * BATCHES)
    ]


def fed(kills: bool, ctx: NodeContext) -> dict[str, Any]:
    """Train on the feed, failing once: after the second checkpoint or, killed, within its write.

    And train on another feed, never failing.
    """
    import keras
    import tensorflow as tf

    import sparkdl

    class Fails(keras.callbacks.Callback):  # type: ignore[misc]
        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == BATCHES + 3 and not ctx.generation and not kills:
                ctx._checkpoints.await_in_flight()
                ctx.barrier()  # the first node knows that all have written
                raise RuntimeError("interrupted")

    def write_half(path: Path, content: Any) -> None:
        path.open("wb", buffering=0).write(content[: len(content) // 2])
        if "step-0000000006" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        path.open("ab").write(content[len(content) // 2 :])

    if kills and not ctx.generation:
        _Copy.write_out = lambda copy: write_half(copy._path, copy.getbuffer())  # type: ignore[method-assign, assignment]
    last = ctx.last_checkpoint
    left = last and sorted(name[:15] for name in os.listdir(last.folder.parent))
    several = tf.distribute.MultiWorkerMirroredStrategy if ctx.num_workers > 1 else None
    strategy = several() if several else tf.distribute.get_strategy()

    def fit(feed: str, **options: Any) -> tuple[Any, Any]:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
        data = ctx.dataset(BATCH, x="x", y="y", feed=feed)
        history = model.fit(data, epochs=EPOCHS, verbose=0, **options)
        return history.epoch, [value.tolist() for value in model.get_weights()]

    checkpoint = sparkdl.keras.Checkpoint(ctx, every_steps=3)
    options = {"initial_epoch": checkpoint.initial_epoch, "callbacks": [Fails(), checkpoint]}
    beside = ctx.dataset(BATCH, x="x", y="y", feed="validation")
    epochs, weights = fit("input", validation_data=beside, **options)
    batches = ctx.batches_given()["input"]
    return {
        "weights": weights,
        "expected": fit("again")[1],
        "epochs": epochs,
        "resumed": last and last.step,
        "batches": batches,
        "left": left,
    }


@pytest.mark.parametrize(
    ("nodes", "resumed"),
    [
        pytest.param(1, 6, marks=pytest.mark.smoke),
        pytest.param(1, 3, marks=pytest.mark.deep, id="killed"),
        pytest.param(2, 6, marks=pytest.mark.deep),
    ],
)
def test_interrupted_training_on_a_feed_equals_undisturbed_one(
    nodes: int, resumed: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "max_restarts": 1}
    with launch(fed, resumed == 3, nodes, framework="tensorflow", **options) as cluster:
        validating = cluster.feed_async(rows_of(nodes), epochs=EPOCHS, feed="validation")
        report = cluster.feed(rows_of(nodes), epochs=EPOCHS, timeout_s=_SOON_S)
        cluster.feed(rows_of(nodes), epochs=EPOCHS, feed="again", timeout_s=_SOON_S)
        results = cluster.results(_SOON_S)
    assert report.rows_unused == validating.result(_SOON_S).rows_unused == 0
    for found in results:
        assert found["resumed"] == resumed, "the failure was at the eighth step, or in the write"
        assert resumed == 6 or found["left"] == [".step-000000000", "step-0000000003"]
        assert found["epochs"] == list(range(resumed // BATCHES, EPOCHS))
        assert found["batches"] == EPOCHS * BATCHES - resumed
        assert _flat(found["weights"]) == pytest.approx(_flat(found["expected"]), abs=_NOISE)
    assert not list(tmp_path.glob(".step-*"))


def alone(args: None, ctx: NodeContext) -> dict[str, Any]:
    """Train on arrays, failing once after the second epoch; and without failing."""
    import os

    os.environ["KERAS_BACKEND"] = ("torch", "jax")[ctx.rank]
    import keras
    import numpy as np

    import sparkdl

    x = np.linspace(ctx.rank, 1, 40, dtype=np.float32).reshape(20, 2)

    def fit(epochs: int, **options: Any) -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse")
        model.fit(x, x[:, :1], batch_size=4, epochs=epochs, shuffle=False, verbose=0, **options)
        return [value.tolist() for value in model.get_weights()]

    checkpoint = sparkdl.keras.Checkpoint(ctx)
    options = {"initial_epoch": checkpoint.initial_epoch, "callbacks": [checkpoint]}
    weights = fit(4 if ctx.generation else 2, **options)
    if not ctx.generation:
        ctx.barrier()  # the slower node has saved its second epoch as well
        raise RuntimeError("interrupted")
    expected, resumed = fit(4), checkpoint.initial_epoch
    return {"weights": weights, "expected": expected, "resumed": resumed}


@pytest.mark.deep
@pytest.mark.torch
@pytest.mark.jax
def test_interrupted_training_equals_an_undisturbed_one_with_each_backend(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "max_restarts": 1}
    with launch(alone, nodes=2, feeding=Feeding(fed=False), **options) as cluster:
        results = cluster.results(_SOON_S)
    assert results[0]["weights"] != results[1]["weights"], "each node has its own model"
    for found in results:
        assert found["resumed"] == 2
        assert _flat(found["weights"]) == pytest.approx(_flat(found["expected"]), abs=_NOISE)


def _flat(values: Any) -> list[float]:
    return [v for part in values for v in _flat(part)] if isinstance(values, list) else [values]
