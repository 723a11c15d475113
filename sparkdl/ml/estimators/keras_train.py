"""Trains a Keras model on a node: what `KerasEstimator` runs in the place of a `train_fn`.

Runs in: child. The recipe and the callbacks in the driver and in Spark tasks as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.datasets.keras_epochs import let_epochs_differ
from sparkdl.frameworks.keras_checkpoint import callback_for
from sparkdl.ml.estimators.columns import (
    VALIDATION,
    Columns,
    Task,
    by_tensor,
    check_travels,
    delivered,
    inputs_by_column,
    outputs_by_column,
)
from sparkdl.ml.estimators.keras_model import (
    Recipe,
    as_inputs,
    as_outputs,
    class_labels,
    inputs_of,
    outputs_of,
    with_softmax,
)
from sparkdl.ml.scoring.inputs import check_classes, check_weights, model_input
from sparkdl.ml.scoring.keras_objects import checked_file, loaded
from sparkdl.ml.scoring.source import ANY, Tensor
from sparkdl.ml.scoring.tensorflow import keras_predictor
from sparkdl.values.ndarrays import Array

if TYPE_CHECKING:
    from sparkdl.node.context import NodeContext

_X, _Y, _WEIGHT = "x ", "y ", "weight"
_FILE = "memory.pickle"
_STATE = ("best", "wait", "best_epoch", "stopped_epoch", "best_weights")
"""What an early stopping of Keras knows."""


@dataclass(frozen=True, kw_only=True)
class KerasTask(Task):
    """The training task that each node receives from `KerasEstimator`."""

    recipe: Recipe


def train(task: KerasTask, ctx: NodeContext) -> dict[str, Any]:
    """Fit the model, under a strategy if there are several nodes.

    Returns:
        `history`; and of the chief `signature` as JSON, and `content`, what `Recipe.packed` gives,
        or `path` if it is in `model_dir`.

    Raises:
        ConfigError: if the model cannot be trained, or could not be returned; before any row.
    """
    import keras
    import tensorflow as tf

    if task.seed is not None:
        keras.utils.set_random_seed(task.seed)
    several = ctx.num_workers > 1
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = task.recipe.model()
    # Before the training, so that a model that cannot be returned fails before any epoch.
    checked_file(model, task.recipe.objects)
    check_travels(sum(each.nbytes for each in model.get_weights()), task.model_dir)
    callbacks = task.made_callbacks()
    last = ctx.last_checkpoint if task.saves else None
    memory = Memory(callbacks, last.folder if last else None)
    remember = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: memory.restore(),
        on_epoch_end=lambda epoch, logs: memory.add(logs, has_stopped=bool(model.stop_training)),
    )
    # Behind the early stoppings: they have reset themselves, or have seen the epoch.
    callbacks.append(remember)
    first = 0
    if task.saves:
        checkpoint = callback_for(ctx, every_epochs=1, also=memory.save)
        # A training that had stopped early only takes its best weights, as `fit` ends.
        first = task.epochs if memory.has_stopped else checkpoint.initial_epoch
        callbacks.append(checkpoint)
    model.fit(
        _data(task, ctx, model),
        validation_data=_data(task, ctx, model, VALIDATION) if task.validates else None,
        epochs=task.epochs,
        # The feed shuffles: Keras has no say in the order of a dataset.
        shuffle=False,
        callbacks=callbacks,
        initial_epoch=first,
        verbose=2 if ctx.is_chief else 0,
    )
    found = {"history": memory.history}
    content = task.recipe.packed(model)  # on all nodes
    return {**found, **_saved(content, task, ctx)} if ctx.is_chief else found


def _data(task: KerasTask, ctx: NodeContext, model: Any, feed: str = DEFAULT_FEED) -> Any:
    """Return batches of `(x, y)` or `(x, y, weight)`, shaped as the model's inputs are."""
    import tensorflow as tf

    from sparkdl.datasets.tensorflow import tf_dataset

    let_epochs_differ()
    rows = ctx.batches(
        task.batch_size,
        list(task.columns.names),
        feed,
        shuffle=task.shuffle and feed == DEFAULT_FEED,
        seed=task.seed or 0,
    )
    batches = tf_dataset(replace(rows, convert=Fitting.of(task, model)), None, None, ahead=2)

    def arrange(rows: dict[str, Any]) -> Any:
        weight = (tf.cast(rows[_WEIGHT], tf.float32),) if _WEIGHT in rows else ()
        return (*arranged(model, rows), *weight)

    return batches.map(arrange)


@dataclass(frozen=True)
class Fitting:
    """Makes arrays as the model takes them of the columns of a batch, for `arranged`.

    Attributes:
        inputs: column to the model's input.
        outputs: column of labels to the model's output; empty for a plain label.
        classes: the columns of labels that are numbers of classes.
    """

    columns: Columns
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    classes: Sequence[str]

    @classmethod
    def of(cls, task: KerasTask, model: Any) -> Fitting:
        columns = task.columns
        outputs = [tensor.name for tensor in outputs_of(model)] if model.outputs else [""]
        return cls(
            columns,
            inputs_by_column(columns.features, inputs_of(model)),
            {} if columns.has_plain_label else outputs_by_column(columns.labels, outputs_of(model)),
            class_labels(model.loss, columns.labels, outputs),
        )

    def __call__(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """Return the arrays of a batch, with values as they are or of the inputs' dtypes.

        Raises:
            FeedTypeError: for a value that does not fit, see `inputs.model_input`, a class that is
                no whole number, or a weight below 0.
        """
        found = {}
        for name, several in by_tensor(self.inputs).items():
            given = {each: columns[each] for each in several}
            found[f"{_X}{name}"] = model_input(given, self.inputs[several[0]])
        for column in self.classes:
            check_classes(columns[column], column)
        if self.columns.has_plain_label:
            found[_Y] = columns[next(iter(self.columns.labels))]
        for name, several in by_tensor(self.outputs).items():
            label = columns[several[0]]
            if len(several) > 1:
                wanted = replace(self.outputs[several[0]], dtype=ANY)
                label = model_input({each: columns[each] for each in several}, wanted)
            found[f"{_Y}{name}"] = label
        if weight := self.columns.weight:
            check_weights(columns[weight], weight)
            found[_WEIGHT] = columns[weight]
        return found


def arranged(model: Any, rows: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what a `Fitting` has made as `(x, y)`, in the structures of the model."""
    x = {name.removeprefix(_X): each for name, each in rows.items() if name.startswith(_X)}
    y = {name.removeprefix(_Y): each for name, each in rows.items() if name.startswith(_Y)}
    return (
        as_inputs(model, x) if len(x) > 1 else next(iter(x.values())),
        as_outputs(model, y) if len(y) > 1 else next(iter(y.values())),
    )


class Memory:
    """The history so far, and the early stoppings among the callbacks of a `fit`.

    Keras begins both anew with every `fit`. After a restart the history would lack the epochs
    before, and an early stopping would not know its best weights. Both are in each checkpoint.

    Attributes:
        history: metric to its values, one for each epoch, those before a restart included.
        has_stopped: whether the training of the checkpoint, in `folder`, had stopped early.
    """

    def __init__(self, callbacks: Iterable[Any], folder: Path | None) -> None:
        self._stoppings = [each for each in callbacks if hasattr(each, "best_weights")]
        self.history: dict[str, list[float]] = {}
        self.has_stopped = False
        self._states: list[dict[str, Any]] = []
        if folder is not None and (folder / _FILE).exists():
            content = cloudpickle.loads((folder / _FILE).read_bytes())
            self.history, self.has_stopped, self._states = content

    def restore(self) -> None:
        """Give the early stoppings their states, which `fit` has just reset."""
        # Another number of them belongs to another program: its states would fit none.
        if len(self._states) == len(self._stoppings):
            for each, state in zip(self._stoppings, self._states, strict=True):
                vars(each).update(state)

    def add(self, logs: Mapping[str, Any] | None, *, has_stopped: bool) -> None:
        """Add the values of an epoch, after the early stoppings have seen them."""
        self.has_stopped = has_stopped
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(float(value))

    def save(self, folder: Path) -> None:
        states = [{name: getattr(each, name) for name in _STATE} for each in self._stoppings]
        content = cloudpickle.dumps([self.history, self.has_stopped, states])
        (folder / _FILE).write_bytes(content)


def _saved(content: bytes, task: KerasTask, ctx: NodeContext) -> dict[str, Any]:
    model = loaded(content, task.recipe.objects)
    found = with_softmax(keras_predictor(model).signature, model)
    return delivered(content, "keras", found, task, ctx)
