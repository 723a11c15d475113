"""Serialize, load and compile a Keras model, and list its inputs.

Runs in: driver, child, feeder
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.ml.scoring.keras_objects import (
    Objects,
    layer_names,
    loaded,
    output_names,
    saved,
    scope,
)
from sparkdl.ml.scoring.source import Signature, Tensor

Made = bytes | Callable[[], Any]
NO_LOSS = "the model has no loss: set loss=, or compile the model"


@dataclass(frozen=True)
class Part:
    """A loss, metric or optimizer of Keras as it travels: Keras' objects may have variables."""

    kind: Any
    config: Mapping[str, Any]


def as_config(value: Any) -> Any:
    """Return Keras' objects as `Part`s, in lists and dicts as well; anything else as it is."""
    if isinstance(value, Mapping):
        return {name: as_config(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_config(each) for each in value]
    is_made = hasattr(value, "get_config") and not isinstance(value, type)
    return Part(type(value), value.get_config()) if is_made else value


def from_config(value: Any) -> Any:
    """Return what `as_config` was given; objects are made anew."""
    if isinstance(value, Mapping):
        return {name: from_config(each) for name, each in value.items()}
    if isinstance(value, list):
        return [from_config(each) for each in value]
    return value.kind.from_config(dict(value.config)) if isinstance(value, Part) else value


@dataclass(frozen=True)
class Recipe:
    """How the model is made.

    Attributes:
        made: a `.keras` file, or a function that makes the model.
        optimizer, loss, metrics: names, functions, or what `as_config` made of Keras' objects.
        loss_weights: of the losses of several outputs, by output or in their order.
        objects: what Keras does not have, by name.
    """

    made: Made
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

    def packed(self, model: Any) -> bytes:
        """Return a trained model as a `.keras` file, without optimizer and loss.

        All nodes of a strategy must call it, see `saved`; empty if this is not the chief.
        """
        optimizer, is_compiled = getattr(model, "optimizer", None), model.compiled
        # Its state may be twice the weights'.
        model.optimizer, model.compiled = None, False
        try:
            return saved(model)
        finally:
            model.optimizer, model.compiled = optimizer, is_compiled

    def _made(self) -> Any:
        import keras

        if isinstance(self.made, bytes):
            return loaded(self.made, self.objects, compiles=self.loss is None)
        model = self.made()
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


_OF_CLASSES = "sparsecategoricalcrossentropy"


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
    return str(name).replace("_", "").lower() == _OF_CLASSES


def with_softmax(signature: Signature, model: Any) -> Signature:
    """Return the signature of a trained model; its only output says whether it is a softmax."""
    if not len(signature.outputs) == len(getattr(model, "outputs", None) or ()) == 1:
        return signature
    is_softmax = _is_softmax(model.outputs[0])
    return replace(signature, outputs=(replace(signature.outputs[0], is_softmax=is_softmax),))


def _is_softmax(tensor: Any) -> bool:
    """Whether the layer that makes a tensor ends in a softmax over the last axis."""
    import keras

    layer, _, place = getattr(tensor, "_keras_history", (None, 0, 0))
    if outputs := getattr(layer, "outputs", None):  # a model within the model
        return _is_softmax(outputs[place])
    if isinstance(layer, keras.layers.Softmax):
        return bool(layer.axis in (-1, len(tensor.shape) - 1))
    return getattr(layer, "activation", None) is keras.activations.softmax
