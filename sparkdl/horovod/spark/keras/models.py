"""Models and optimizers of Keras between driver and processes, and models that score rows.

Runs in: driver, child, feeder
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import cloudpickle
import numpy as np

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.tensorflow.optimizer import build, variables_of
from sparkdl.ml.estimators import keras_objects
from sparkdl.ml.estimators.keras_objects import loaded, saved
from sparkdl.ml.scoring.inputs import fitting


def library_of(model: Any) -> str:
    """Return whose model it is: `keras` (3) or `tf_keras`.

    Raises:
        ConfigError: if it is neither's, or has no input shapes yet.
    """
    library = keras_objects.library_of(model)
    if library is None:
        raise ConfigError(f"model must be a Keras model, not {type(model).__name__}")
    if not getattr(model, "inputs", None):
        raise ConfigError(
            "the model has no input shapes: make it of Input(shape=…) and layers, so that columns "
            "can be given their shapes"
        )
    return library


def shapes_of(tensors: Sequence[Any]) -> list[list[int]]:
    """Return the shapes of a model's inputs or outputs, -1 where any size is possible."""
    return [[-1 if size is None else int(size) for size in tensor.shape] for tensor in tensors]


def known_objects(*given: Any) -> dict[str, Any]:
    """Return classes and functions by name, for a file that names them; lambdas get a name.

    Args:
        given: mappings, functions, or objects of classes.
    """
    known: dict[str, Any] = {}
    for each in given:
        if isinstance(each, Mapping):
            known.update(each)
        elif isinstance(each, list | tuple):
            known.update(known_objects(*each))
        elif hasattr(each, "__name__"):
            if each.__name__ == "<lambda>":
                each.__name__ = "lambda_of_the_estimator"
            known[each.__name__] = each
        elif each is not None and not isinstance(each, str):
            known[type(each).__name__] = type(each)
    return known


def unpickled(content: bytes) -> Any:
    """Return what this program pickled on the driver; it runs what the pickle says."""
    return cloudpickle.loads(content)


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer as it travels.

    Attributes:
        values: of its variables, none if it has not trained.
    """

    config: Any
    values: list[Any]

    @classmethod
    def of(cls, optimizer: Any, library: str) -> OptimizerState:
        """Take an optimizer, or one by its name."""
        optimizers = import_module(library).optimizers
        optimizer = optimizers.get(optimizer)
        # `built` in Keras 3, `_built` in tf_keras.
        has_trained = getattr(optimizer, "built", False) or getattr(optimizer, "_built", False)
        has_trained = has_trained or not hasattr(optimizer, "build")  # of tf_keras' legacy
        values = [np.asarray(v) for v in variables_of(optimizer)] if has_trained else []
        return cls(optimizers.serialize(optimizer), values)

    def optimizer(self, library: str, known: Mapping[str, Any]) -> Any:
        """Return the optimizer, without its values."""
        keras = import_module(library)
        with keras.utils.custom_object_scope(dict(known)):
            return keras.optimizers.deserialize(self.config)

    def restore(self, optimizer: Any, variables: list[Any]) -> None:
        """Give an optimizer its values, if there are any."""
        if self.values:
            # Keras makes an optimizer's variables only with those that it trains.
            build(optimizer, variables)
            for variable, value in zip(variables_of(optimizer), self.values, strict=True):
                variable.assign(value)


def rate_of(optimizer: Any) -> float | None:
    """Return the learning rate, None if it is a schedule."""
    from sparkdl.horovod.keras.callbacks import number

    config = optimizer.get_config()["learning_rate"]
    return None if isinstance(config, dict) else number(optimizer.learning_rate)


@dataclass(frozen=True)
class KerasScoring:
    """Loads a model, and returns a function that scores with it.

    Attributes:
        content: the model's file, and its custom objects, by cloudpickle.
        shapes: of its inputs.
    """

    content: bytes
    library: str
    shapes: list[list[int]]

    @classmethod
    def of(cls, model: Any, custom_objects: Mapping[str, Any]) -> KerasScoring:
        """Take a model as it is now."""
        library = library_of(model)
        content = cloudpickle.dumps(saved(model, custom_objects))
        return cls(content, library, shapes_of(model.inputs))

    def __call__(self) -> Callable[..., list[Any]]:
        """Load it."""
        content, objects = unpickled(self.content)
        model = loaded(content, objects, self.library)

        takes = [*zip(model.inputs, self.shapes, strict=True)]

        def score(*columns: Any) -> list[Any]:
            inputs = [input_of(c, x, shape) for c, (x, shape) in zip(columns, takes, strict=True)]
            outputs = model.predict_on_batch(inputs if len(inputs) > 1 else inputs[0])
            return list(outputs) if isinstance(outputs, list | tuple) else [outputs]

        return score


def input_of(values: Any, tensor: Any, shape: Sequence[int], column: str = "") -> Any:
    """Return rows [rows, …] in the shape and dtype of a model's input.

    Args:
        column: where they come from, if that is known.

    Raises:
        FeedTypeError: if a value does not fit in that dtype.
    """
    dtype = getattr(tensor.dtype, "name", tensor.dtype)  # tf_keras has TensorFlow's types
    array = batch_of(values, shape)
    if array.dtype.kind not in "biuf" or dtype in ("string", "bfloat16"):
        return array
    where = f"column {column!r}" if column else "a column"
    return fitting(array, np.dtype(dtype), where, f"the model's input {tensor.name}")


def batch_of(values: Any, shape: Sequence[int]) -> Any:
    """Return rows [rows, …] in the shape of an input, float64 as float32 as Keras has them."""
    array = np.asarray(values)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    # With two open sizes numpy could not tell the shape.
    is_open = sum(size < 0 for size in shape) > 1
    return array if is_open else array.reshape([len(array), *shape[1:]])
