"""What nodes and Spark's tasks run in tests of estimators, searches and jobs.

Here, and not beside the tests, for whoever runs a function imports its module.
"""

from __future__ import annotations

import os
import signal
import threading
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl.node.context import NodeContext

FEATURES = 10
"""Of `classifier`."""


def read(args: Any, ctx: NodeContext) -> dict[str, Any]:
    """Read the rows as TensorFlowOnSpark's programs do, then those to validate with, by epoch.

    A program of one node, in plain Python, which tells what came and its arguments.
    """
    feed = ctx.get_data_feed(input_mapping=args.input_mapping)
    sums: dict[str, float] = {}
    rows = 0
    while not feed.should_stop():
        batch = feed.next_batch(args.batch_size)
        for name, values in batch.items():
            sums[name] = sums.get(name, 0.0) + sum(values)
        rows += len(next(iter(batch.values())))
    validation = ctx.batches(args.batch_size, feed="validation")
    held = [float(sum(batch["x"].sum() for batch in validation)) for _ in range(args.epochs)]
    names = ("batch_size", "epochs", "mine", "steps", "framework")
    return {
        "history": {"rows": [rows], "loss": (0.5, 0.25), "val_x": held},
        "sums": sums,
        "tensors": feed.input_tensors,
        "args": {name: getattr(args, name) for name in names},
        "role": ctx.job_name,
    }


def ignore_validation(args: Any, ctx: NodeContext) -> object:
    """Read the rows and leave the validation's alone; return what cannot travel."""
    for _ in ctx.batches(10):
        pass
    return object()


def read_all(args: Any, ctx: NodeContext) -> None:
    """Read the rows, as an estimator's own training does."""
    for _ in ctx.batches(100):
        pass


def classifier() -> Any:
    """Make a model of one probability."""
    import keras

    return keras.Sequential(
        [
            keras.Input((FEATURES,), name="features"),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


def halving(notes: Path) -> list[Any]:
    """Return callbacks that halve the learning rate in each epoch, note it, and stop at the 4th."""
    import keras

    class Halving(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.3 * 0.5**epoch

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with notes.open("a") as file:
                rate = self.model.optimizer.learning_rate.numpy()
                file.write(f"{epoch} {rate:.4f} {sorted(logs)}\n")

    return [Halving(), keras.callbacks.EarlyStopping(min_delta=1e9, patience=3)]


def curve(params: dict[str, Any], ctx: Any) -> Any:
    """Return a loss; rank 1 fails for the first choice of all, number 2 of a queue never ends."""
    if params["kind"] == "fails" and ctx.rank == 1:
        raise ValueError("no such kind")
    if params["kind"] == "endless":
        for step in range(10**6):
            ctx.report(step, loss=100.0 + step)
            threading.Event().wait(0.05)
    ctx.report(0, loss=params["x"] ** 2)
    return {"loss": params["x"] ** 2 + params["n"], "rank": ctx.rank}


def network(loss: Any = "mse", **options: Any) -> Any:
    """Make a compiled regression of four features."""
    import keras

    hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
    optimizer = keras.optimizers.AdamW(0.02, weight_decay=0.01, clipnorm=0.5)
    model.compile(optimizer, loss, metrics=["mae"], **options)
    return model


def network_that_kills(folder: str) -> Any:
    """Return what makes `network`, by whose loss a Python worker dies once, an executor once."""

    def loss(label: Any, found: Any) -> Any:
        import keras
        import psutil

        for number in count():
            try:
                os.close(os.open(f"{folder}/{number}", os.O_CREAT | os.O_EXCL))
                break
            except FileExistsError:
                continue
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 8:
            next(p for p in psutil.Process().parents() if p.name() == "java").kill()
        return keras.losses.mean_squared_error(label, found)

    return lambda: network(loss, run_eagerly=True)
