"""A Keras model on a node: made, trained by `fit` for `KerasEstimator`, and returned.

Runs in: child. The model spec and the names of inputs in the driver and in Spark tasks as well.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from sparkdl.core.errors import ConfigError
from sparkdl.core.files import left_folder
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.datasets.keras_epochs import patch_fit_for_feeds
from sparkdl.feed.reader.batches import SAMPLE_WEIGHT
from sparkdl.frameworks.keras_checkpoint import callback_for
from sparkdl.ml.estimators.columns import (
    VALIDATION,
    Columns,
    Task,
    by_tensor,
    inputs_by_column,
    outputs_by_column,
    returned_model,
)
from sparkdl.ml.scoring.inputs import check_classes, check_weights, model_input
from sparkdl.ml.scoring.keras_objects import (
    Objects,
    from_config,
    layer_names,
    loaded,
    output_names,
    save_to,
    scope,
)
from sparkdl.ml.scoring.keras_weights import large_weights
from sparkdl.ml.scoring.source import ANY, ModelSource, Signature, Tensor
from sparkdl.ml.scoring.tensorflow import keras_predictor
from sparkdl.values.ndarrays import Array

if TYPE_CHECKING:
    from sparkdl.ml.model_file import ModelFile
    from sparkdl.node.context import NodeContext

_X, _Y, _WEIGHT = "x ", "y ", "weight"
_FILE = "memory.pickle"
_STATE = ("best", "wait", "best_epoch", "stopped_epoch", "best_weights")
"""What an early stopping of Keras knows."""
NO_LOSS = "the model has no loss: set loss=, or compile the model"


@dataclass(frozen=True)
class ModelSpec:
    """How to make the model.

    Attributes:
        made: a `.keras` file, on a node where it is, or a function that makes the model.
        optimizer, loss, metrics: names, functions, or what `as_config` made of Keras' objects.
        loss_weights: of the losses of several outputs, by output or in their order.
        objects: what Keras does not have, by name.
    """

    made: ModelFile | ModelSource | Callable[[], Any]
    optimizer: Any = None
    loss: Any = None
    metrics: Any = None
    loss_weights: Any = None
    objects: Objects = field(default_factory=dict)

    def model(self) -> Any:
        """Return the model, compiled with `loss` if that is not None."""
        with scope(self.objects):
            model = self._made()
            if self.loss is not None:
                self._compile(model)
        if not model.compiled:
            raise ConfigError(NO_LOSS)
        check_inputs(model)
        return model

    def save(self, model: Any, path: Path) -> None:
        """Write a trained model to a `.keras` file, without optimizer and loss, see `save_to`."""
        optimizer, is_compiled = getattr(model, "optimizer", None), model.compiled
        # Its state may be twice the weights'.
        model.optimizer, model.compiled = None, False
        try:
            save_to(path, model)
        finally:
            model.optimizer, model.compiled = optimizer, is_compiled

    def _made(self) -> Any:
        import keras

        if isinstance(self.made, ModelSource):
            return loaded(self.made.given, self.objects, compiles=self.loss is None)
        model = self.made()  # type: ignore[operator]
        if not isinstance(model, keras.Model):
            raise ConfigError(
                f"the function that makes the model returned a {type(model).__name__}: must be a "
                "Keras model"
            )
        return model

    def _compile(self, model: Any) -> None:
        import keras

        model.compile(
            keras.optimizers.get(from_config(self.optimizer)),
            from_config(self.loss),
            loss_weights=self.loss_weights,
            metrics=from_config(self.metrics),
        )


@dataclass(frozen=True, kw_only=True)
class KerasTask(Task):
    """The training task that each node receives from `KerasEstimator`."""

    model_spec: ModelSpec

    def with_made(self, source: ModelSource) -> KerasTask:
        return replace(self, model_spec=replace(self.model_spec, made=source))


def train(task: KerasTask, ctx: NodeContext) -> dict[str, Any]:
    """Fit the model, under a strategy if there are several nodes.

    Returns:
        `history`; and what `returned_model` does of the chief's model.

    Raises:
        ConfigError: if the model cannot be trained, or could not be returned; before any row.
    """
    with large_weights(is_file=False):
        return _train(task, ctx)


def _train(task: KerasTask, ctx: NodeContext) -> dict[str, Any]:
    import keras
    import tensorflow as tf

    if task.seed is not None:
        keras.utils.set_random_seed(task.seed)
    several = ctx.num_workers > 1
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = task.model_spec.model()
    file = left_folder() / f"{task.name}.keras"
    if not isinstance(task.model_spec.made, ModelSource):
        # Before the training, so that a model that cannot be returned fails before any epoch.
        save_to(file, model)
        if file.exists():  # on the chief
            loaded(file, task.model_spec.objects, reads=False)
    callbacks = task.made_callbacks()
    last = ctx.last_checkpoint if task.saves else None
    state = FitState(callbacks, last.folder if last else None)
    remember = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: state.restore(),
        on_epoch_end=lambda epoch, logs: state.add(logs, has_stopped=bool(model.stop_training)),
    )
    # Behind the early stoppings: they have reset themselves, or have seen the epoch.
    callbacks.append(remember)
    first = 0
    if task.saves:
        checkpoint = callback_for(ctx, every_epochs=1, also=state.save)
        # A training that had stopped early only takes its best weights, as `fit` ends.
        first = task.epochs if state.has_stopped else checkpoint.initial_epoch
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
    task.model_spec.save(model, file)  # on all nodes
    if not ctx.is_chief:
        return {"history": state.history}
    signature = with_softmax(keras_predictor(model).signature, model)
    return {"history": state.history, **returned_model(file, signature, task, ctx)}


def _data(task: KerasTask, ctx: NodeContext, model: Any, feed: str = DEFAULT_FEED) -> Any:
    """Return batches of `(x, y)` or `(x, y, weight)`, shaped as the model's inputs are."""
    import tensorflow as tf

    from sparkdl.datasets.tensorflow import tf_dataset

    patch_fit_for_feeds()
    rows = ctx.batches(
        task.batch_size,
        list(task.columns.names),
        feed,
        shuffle=task.shuffle and feed == DEFAULT_FEED,
        seed=task.seed or 0,
        sparse=task.sparse,
    )
    batches = tf_dataset(replace(rows, convert=Fitting.of(task, model)), None, None, ahead=2)

    def arrange(rows: dict[str, Any]) -> Any:
        weights = [
            tf.cast(rows[name], tf.float32) for name in (_WEIGHT, SAMPLE_WEIGHT) if name in rows
        ]
        return (*arranged(model, rows), *([math.prod(weights)] if weights else []))

    # Plain Python: AutoGraph would warn that it cannot transform what `arrange` calls.
    return batches.map(tf.autograph.experimental.do_not_convert(arrange))


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


class FitState:
    """The history and the state of early stoppings of a `fit`, saved with checkpoints.

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


def check_inputs(model: Any) -> None:
    if not getattr(model, "inputs", None):
        raise ConfigError(
            f"the {type(model).__name__} {model.name!r} has no known inputs: begin it with a "
            "keras.Input, or train it with TFEstimator and a train_fn"
        )


def inputs_of(model: Any) -> tuple[Tensor, ...]:
    return tuple(map(tensor_of, model.inputs, layer_names(model.inputs)))


def outputs_of(model: Any) -> tuple[Tensor, ...]:
    if not getattr(model, "outputs", None):
        raise ConfigError(
            f"the model {model.name!r} has no known outputs: begin it with a keras.Input, or call "
            "it on a batch before"
        )
    return tuple(map(tensor_of, model.outputs, output_names(model, len(model.outputs))))


def as_inputs(model: Any, values: Mapping[str, Any]) -> Any:
    """Return values, given by the names of a model's inputs, in the structure that it takes.

    By name Keras takes neither the layer's nor the tensor's of an input without a name.
    """
    return _arranged(model.input, model.inputs, layer_names(model.inputs), values)


def as_outputs(model: Any, values: Mapping[str, Any]) -> Any:
    return _arranged(model.output, model.outputs, output_names(model, len(model.outputs)), values)


def _arranged(
    structure: Any, tensors: Sequence[Any], names: Sequence[str], values: Mapping[str, Any]
) -> Any:
    import keras

    by_id = dict(zip(map(id, tensors), names, strict=True))
    found = keras.tree.map_structure(lambda tensor: values[by_id[id(tensor)]], structure)
    return keras.tree.lists_to_tuples(found)  # tf.data makes one tensor of a list


def tensor_of(tensor: Any, name: str) -> Tensor:
    import keras

    dtype = keras.backend.standardize_dtype(tensor.dtype)
    # numpy has no bfloat16.
    dtype = "float32" if dtype == "bfloat16" else dtype
    return Tensor(name, dtype, (None, *tensor.shape[1:]))


def class_labels(loss: Any, labels: Mapping[str, str], outputs: Sequence[str]) -> list[str]:
    """Return the label columns that hold numbers of classes, as far as Keras' losses say it.

    Args:
        loss: one, or one for each output: a list in their order, or a dict by name.
        labels: column to output, see `Columns`.
    """
    in_order = outputs if len(outputs) == len(labels) else [outputs[0]] * len(labels)
    by_output = dict.fromkeys(outputs, loss)
    if isinstance(loss, Mapping):
        by_output = dict(loss)
    elif isinstance(loss, (list, tuple)):
        by_output = dict(zip(outputs, loss, strict=False))
    return [
        column
        for (column, name), output in zip(labels.items(), in_order, strict=True)
        if _takes_classes(by_output.get(name or output))
    ]


def _takes_classes(loss: Any) -> bool:
    name = loss if isinstance(loss, str) else getattr(loss, "name", getattr(loss, "__name__", ""))
    return str(name).replace("_", "").lower() == "sparsecategoricalcrossentropy"


def with_softmax(signature: Signature, model: Any) -> Signature:
    """Return the signature of a trained model; its only output says whether it is a softmax."""
    if not len(signature.outputs) == len(getattr(model, "outputs", None) or ()) == 1:
        return signature
    is_softmax = _is_softmax(model.outputs[0])
    return replace(signature, outputs=(replace(signature.outputs[0], is_softmax=is_softmax),))


def _is_softmax(tensor: Any) -> bool:
    """Whether the layer that makes a tensor ends in a softmax over the last axis."""
    import keras

    layer, _, index = getattr(tensor, "_keras_history", (None, 0, 0))
    if outputs := getattr(layer, "outputs", None):  # a model within the model
        return _is_softmax(outputs[index])
    if isinstance(layer, keras.layers.Softmax):
        return bool(layer.axis in (-1, len(tensor.shape) - 1))
    return getattr(layer, "activation", None) is keras.activations.softmax
