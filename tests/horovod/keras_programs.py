"""What two nodes do with Keras and Horovod's faces for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from sparkdl.core.errors import ConfigError
from sparkdl.node.context import NodeContext

ROWS, STEPS = 64, 4
EPOCHS = 3  # of what is elastic
SETTINGS: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}
ALL: dict[str, dict[str, Any]] = {  # of DistributedOptimizer and compile
    "adam": {
        **{"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        **{"gradient_predivide_factor": 2.0, "groups": 2, "steps_per_execution": 2},
    },
    "half": {"compression": "fp16"},
    "eagerly": {"run_eagerly": True},
}


def everything(folder: Path, ctx: NodeContext) -> dict[str, Any]:
    import torch

    import sparkdl.horovod.keras as hvd

    torch.set_num_threads(1)
    hvd.init()
    found: dict[str, Any] = {
        "fits": {name: equals_one_process(hvd, "adam", options) for name, options in ALL.items()},
        "advanced": trains_as_the_advanced_example(hvd, folder),
        "refused": refuses(hvd),
        "jit": keeps_out_of_xla(hvd),
    }
    found["fits"]["scaled"] = equals_one_process(hvd, "scaled", {})
    return found


def rows() -> tuple[Any, Any]:
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(ROWS, 8)).astype(np.float32)
    return x, np.tanh(x[:, :1] - x[:, 1:2]).astype(np.float32)


def network(seed: int = 1) -> Any:
    import tensorflow as tf

    tf.keras.utils.set_random_seed(seed)
    layers = [tf.keras.layers.Dense(16, activation="tanh"), tf.keras.layers.Dense(1)]
    return tf.keras.Sequential([tf.keras.Input((8,)), *layers])


def flat(model: Any) -> Any:
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def optimizer(name: str) -> Any:
    import tensorflow as tf

    library = tf.keras.optimizers
    return library.LossScaleOptimizer(optimizer("adam")) if name == "scaled" else library.Adam(0.01)


@cache
def alone(name: str) -> Any:
    """Train by `fit` on whole batches, in one process; return the weights."""
    x, y = rows()
    model = network(seed=1)
    model.compile(optimizer(name), "mse")
    model.fit(x, y, batch_size=ROWS // STEPS, **SETTINGS)
    return flat(model)


def equals_one_process(hvd: Any, name: str, options: dict[str, Any]) -> Any:
    """Train by `fit` on half of each batch; return the weights, and on rank 0 those of `alone`."""
    options = dict(options)
    names = {"steps_per_execution", "run_eagerly"} & options.keys()
    compiled = {each: options.pop(each) for each in names}
    if "compression" in options:
        options["compression"] = getattr(hvd.Compression, options["compression"])
    passes = options.get("backward_passes_per_step", 1)
    x, y = rows()
    mine = [part.reshape(STEPS, 2, -1, part.shape[-1])[:, hvd.rank()] for part in (x, y)]
    own = [part.reshape(-1, part.shape[-1]) for part in mine]

    model = network(seed=1 + hvd.rank())
    model.compile(hvd.DistributedOptimizer(optimizer(name), **options), "mse", **compiled)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    batch = ROWS // STEPS // 2 // passes
    model.fit(*own, batch_size=batch, callbacks=[broadcast], **SETTINGS)
    return {
        "weights": flat(model),
        "alone": alone(name) if hvd.rank() == 0 else None,
        "steps": int(np.asarray(model.optimizer.iterations)),
    }


def trains_as_the_advanced_example(hvd: Any, folder: Path) -> dict[str, Any]:
    """Horovod's advanced pattern: warm-up, schedule, averaged metrics; then load and go on."""
    import tensorflow as tf

    rank, size, epochs = hvd.rank(), hvd.size(), 4
    x, y = (part[rank::size] for part in rows())
    scaled = 0.05 * size
    model = network(seed=rank)
    sgd = tf.keras.optimizers.SGD(scaled, momentum=0.5)
    model.compile(hvd.DistributedOptimizer(sgd), "mse", metrics=["mae"])
    path = folder / f"{type(model).__module__.partition('.')[0]}-best.keras"
    seen = Seen()
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled, warmup_epochs=2, verbose=1),
        hvd.callbacks.LearningRateScheduleCallback(scaled, 0.1, start_epoch=2),
        hvd.LogCallback(per_batch_log=True),
        seen.callback(),
    ]
    if rank == 0:
        best = tf.keras.callbacks.ModelCheckpoint(str(path), "loss", save_best_only=True)
        callbacks.append(best)
    fitted = model.fit(x, y, batch_size=8, epochs=epochs, callbacks=callbacks, verbose=0)

    hvd.barrier()
    loaded = hvd.load_model(path)
    steps = int(np.asarray(loaded.optimizer.iterations))
    loaded.fit(x, y, batch_size=8, epochs=1, verbose=0)
    stock = tf.keras.models.load_model(path)  # as anybody would, without sparkdl
    return {
        "history": {name: list(map(float, v)) for name, v in fitted.history.items()},
        "rates": seen.rates,
        "weights": flat(model),
        "loaded": flat(loaded),
        "steps": steps,
        "loaded_as": type(loaded.optimizer).__name__,
        "stock": [type(stock.optimizer).__module__.partition(".")[0], hasattr(stock, "_sparkdl")],
        "own_loss": float(np.mean((model.predict(x, verbose=0) - y) ** 2)),
    }


class Seen:
    def __init__(self) -> None:
        self.rates: list[float] = []

    def callback(self) -> Any:
        import tensorflow as tf

        def note(batch: int, logs: Any = None) -> None:
            self.rates.append(float(np.asarray(made.model.optimizer.learning_rate)))

        made = tf.keras.callbacks.LambdaCallback(on_train_batch_end=note)
        return made


def refuses(hvd: Any) -> dict[str, str]:
    import tensorflow as tf

    x, y = rows()
    model = network()
    model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), "mse")
    endless = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    endless = endless.filter(lambda x, y: True)  # of a length that nobody knows
    warm_up = hvd.callbacks.LearningRateWarmupCallback(0.1)
    asked: dict[str, Callable[[], Any]] = {
        "twice": lambda: hvd.DistributedOptimizer(model.optimizer),
        "passes": lambda: hvd.DistributedOptimizer(
            tf.keras.optimizers.SGD(0.1), backward_passes_per_step=0
        ),
        "initial_lr": lambda: hvd.callbacks.LearningRateScheduleCallback(None, 1.0),
        "steps": lambda: model.fit(endless, callbacks=[warm_up], verbose=0),
    }
    found = {}
    for name, call in asked.items():
        try:
            call()
            found[name] = "nothing"
        except ConfigError as error:
            found[name] = str(error)
    return found


def keeps_out_of_xla(hvd: Any) -> list[bool]:
    """Return whether XLA is asked for a stock model, and for one with our optimizer."""
    import keras

    found = []
    for wrap in (lambda optimizer: optimizer, hvd.DistributedOptimizer):
        model = network()
        model.compile(wrap(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
        found.append(bool(model.jit_compile))
    return found


class Interrupted(Exception):  # noqa: N818
    """What ends a training before its time."""


def goes_on_at_the_last_commit(args: None, ctx: NodeContext) -> dict[str, Any]:
    """Interrupt a training, and begin it anew with a model that knows what was committed last."""
    import sparkdl.horovod.keras as hvd

    hvd.init()

    def interrupt() -> None:
        raise Interrupted

    committed = commits(hvd, interrupt)["committed"]
    return commits(hvd, lambda: None, committed)


def commits(hvd: Any, dies: Callable[[], None], committed: bytes | None = None) -> dict[str, Any]:
    """Train by `fit` and commit twice an epoch.

    Args:
        dies: is called before the last batch of the second epoch.
        committed: by a training before.
    """
    import keras
    import tensorflow as tf

    import sparkdl.horovod.tensorflow as hvd_tf

    keras.utils.set_random_seed(1 + hvd.rank())
    x = np.linspace(-1, 1, 8 * STEPS, dtype=np.float32)[:, np.newaxis]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), "mse")
    resets: list[int] = []
    begun: list[Any] = []

    class Dies(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if (state.epoch, batch) == (1, 3):
                dies()

    class Counts(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            state.batch = batch

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            state.epoch, state.batch = state.epoch + 1, 0

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def fit(state: Any) -> None:
        begun.extend([state.epoch, state.batch, int(model.optimizer.iterations.numpy())])
        callbacks = [hvd.elastic.CommitStateCallback(state, batches_per_commit=2), Counts(), Dies()]
        left = EPOCHS - state.epoch
        model.fit(x, 2 * x, batch_size=8, epochs=left, callbacks=callbacks, verbose=0)

    state: Any = hvd.elastic.KerasState(model, epoch=0, batch=0)
    if committed is not None:
        state._kept = cloudpickle.loads(committed)
        state.restore()
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    try:
        fit(state)
    except Interrupted:
        return {"committed": cloudpickle.dumps(state._kept)}
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
