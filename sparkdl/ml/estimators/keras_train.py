"""Trains a Keras model on a node: what `KerasEstimator` runs in the place of a `train_fn`.

Runs in: child. The recipe and the callbacks in the driver and in Spark tasks as well.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.frameworks.keras_checkpoint import callback_for
from sparkdl.ml.estimators.columns import VALIDATION, Task, check_size, check_travels
from sparkdl.ml.estimators.keras_model import (
    Made,
    as_content,
    as_inputs,
    check_callbacks,
    compiled,
    inputs_of,
    keras_inputs_by_column,
    layer_names,
    with_softmax,
)
from sparkdl.ml.estimators.source import Tensor, local_path
from sparkdl.ml.scoring.tensorflow import keras_predictor

if TYPE_CHECKING:
    from sparkdl.node.context import NodeContext


@dataclass(frozen=True)
class Recipe:
    """How the model is made.

    Attributes:
        made: a `.keras` file, or a function that makes the model.
        optimizer, loss, metrics: names, or what `as_config` made of Keras' objects.
    """

    made: Made
    optimizer: Any = None
    loss: Any = None
    metrics: Any = None
    learning_rate: float | None = None

    def model(self) -> Any:
        """Return the model, compiled. Raises what `compiled` does."""
        model = compiled(self.made, self.optimizer, self.loss, self.metrics)
        if self.learning_rate is not None:
            model.optimizer.learning_rate = self.learning_rate
        return model


@dataclass(frozen=True, kw_only=True)
class KerasTask(Task):
    """What every node is given."""

    recipe: Recipe


def train(task: KerasTask, ctx: NodeContext) -> dict[str, Any]:
    """Fit the model, under a strategy if there are several nodes.

    Returns:
        `history`; and of the chief `signature` as JSON, and `content`, the `.keras` file, or `path`
        if it is in `model_dir`.

    Raises:
        ConfigError: if the model cannot be trained, or could not be returned; before any row.
        FrameworkMissingError: if TensorBoard is to log and is not installed.
    """
    import keras
    import tensorflow as tf

    if task.tensorboard_dir and find_spec("tensorboard") is None:
        raise FrameworkMissingError(
            "tensorboard_dir needs TensorBoard on the executors: pip install tensorboard"
        )
    if task.seed is not None:
        keras.utils.set_random_seed(task.seed)
    several = ctx.num_workers > 1
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = task.recipe.model()
    # Made before the training, so that a model that cannot be copied costs no epochs: a copy
    # without optimizer, which is twice the size of the weights, and without strategy.
    copy = keras.models.model_from_json(model.to_json())
    check_travels(sum(int(each.nbytes) for each in model.get_weights()), task.model_dir)
    checkpoint = callback_for(ctx, None, 1, DEFAULT_FEED) if task.saves else None
    history = model.fit(
        _data(task, ctx, model),
        validation_data=_data(task, ctx, model, VALIDATION) if task.validates else None,
        epochs=task.epochs,
        shuffle=False,
        callbacks=[
            *callbacks_of(task, ctx.is_chief),
            *own_callbacks(task),
            *([checkpoint] if checkpoint else []),
        ],
        initial_epoch=checkpoint.initial_epoch if checkpoint else 0,
        verbose=2 if ctx.is_chief else 0,
    ).history
    found = {"history": {name: [float(v) for v in values] for name, values in history.items()}}
    copy.set_weights(model.get_weights())  # on all nodes: reading some of them is a collective
    return {**found, **_saved(copy, task, ctx)} if ctx.is_chief else found


def _data(task: KerasTask, ctx: NodeContext, model: Any, feed: str = "input") -> Any:
    """Return batches of `(x, y)` or `(x, y, weight)`, shaped as the model's inputs are."""
    import tensorflow as tf

    is_training = feed != VALIDATION
    columns = task.columns
    batches = ctx.dataset(
        task.batch_size,
        x=list(columns.inputs),
        y=columns.label,
        feed=feed,
        shuffle=task.shuffle and is_training,
        seed=task.seed or 0,
    )
    by_column = keras_inputs_by_column(columns.features, inputs_of(model))
    for column, tensor in by_column.items():
        _check_spec(column, batches.element_spec[0][column], tensor)
    tensors = dict(zip(layer_names(model.inputs), model.inputs, strict=True))

    def arrange(features: dict[str, Any], label: Any) -> Any:
        x = {t.name: _fitted(features[c], tensors[t.name]) for c, t in by_column.items()}
        x = as_inputs(model, x) if len(x) > 1 else next(iter(x.values()))
        if columns.weight is None:
            return x, label
        return x, label, tf.cast(features[columns.weight], tf.float32)

    return batches.map(arrange)


def _check_spec(column: str, spec: Any, tensor: Tensor) -> None:
    """Check what the feed brings, where the driver could not: see `keras_estimator`."""
    is_text = spec.dtype.name == "string"
    if is_text != (tensor.dtype == "string"):
        raise ConfigError(
            f"column {column!r} holds {'text' if is_text else 'numbers'}, and the model's input is "
            f"{tensor}"
        )
    if spec.shape.rank is not None and None not in spec.shape[1:]:
        check_size(column, prod(spec.shape[1:]), tensor)


def _fitted(values: Any, tensor: Any) -> Any:
    """Return a column as the model's input takes it."""
    import tensorflow as tf

    if values.dtype != tensor.dtype:
        values = tf.cast(values, tensor.dtype)
    dims = tuple(tensor.shape[1:])
    return values if None in dims else tf.reshape(values, (-1, *dims))


def own_callbacks(task: KerasTask) -> list[Any]:
    """Return the user's callbacks.

    Raises:
        ConfigError: if they are none.
    """
    found = task.callbacks() if callable(task.callbacks) else task.callbacks
    check_callbacks(found)
    return list(found)


def callbacks_of(task: KerasTask, is_chief: bool) -> list[Any]:
    """Return the callbacks that the task's parameters ask for."""
    import keras

    found: list[Any] = []
    if (stopping := task.stopping).patience is not None:
        found.append(
            keras.callbacks.EarlyStopping(
                monitor=stopping.monitor or ("val_loss" if task.validates else "loss"),
                patience=stopping.patience,
                min_delta=stopping.min_delta,
                restore_best_weights=True,
            )
        )
    if task.tensorboard_dir and is_chief:
        found.append(keras.callbacks.TensorBoard(task.tensorboard_dir, write_graph=False))
    return found


def _saved(model: Any, task: KerasTask, ctx: NodeContext) -> dict[str, Any]:
    found = with_softmax(keras_predictor(model).signature, model)
    signature = msgspec.json.encode(found).decode()
    if task.model_dir is None:
        return {"signature": signature, "content": as_content(model)}
    path = f"{local_path(ctx.absolute_path(task.model_dir))}/{task.name}.keras"
    if "://" not in path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    model.save(path)
    return {"signature": signature, "path": path}
