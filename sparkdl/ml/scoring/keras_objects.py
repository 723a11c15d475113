"""A Keras model as its file, and the custom objects that travel beside it.

A `.keras` file only names layers, losses and functions that Keras does not have. These travel by
cloudpickle, under the names that the file has for them: those of `custom_objects`, and those that
the program has registered. https://keras.io/guides/serialization_and_saving/#custom-objects
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdl.core.errors import ConfigError, FrameworkMissingError, in_words
from sparkdl.core.files import scratch_folder
from sparkdl.ml.scoring.keras_weights import large_weights

Objects = Mapping[str, Any]
"""Classes and functions by the names that configurations of Keras call them by."""
_OWN = ("keras", "keras_hub", "keras_cv", "keras_nlp", "tf_keras", "tensorflow")
_CURE = (
    "Give its own layers a get_config that returns the arguments of their __init__. Name classes "
    "and functions of yours in custom_objects={name: object}, or register them in the driver's "
    "program by keras.saving.register_keras_serializable; or save the model with "
    "model.export(folder), and give the folder to TFModel: a SavedModel needs no classes"
)


def registered() -> dict[str, Any]:
    """Return what this program has registered with Keras, by all names that files have for it."""
    if "keras" not in sys.modules:
        return {}
    import keras

    return {
        # A node has the class, but not its registration: it saves it by its plain name.
        name: each
        for known, each in keras.saving.get_custom_objects().items()
        if (each.__module__ or "").partition(".")[0] not in _OWN
        for name in (known, each.__name__)
    }


def scope(objects: Objects) -> Any:
    import keras

    return keras.saving.custom_object_scope(dict(objects))


def save_to(path: Path, model: Any) -> None:
    """Write a Keras model to a `.keras` file.

    Under a strategy of several nodes all of them must call it, and the chief alone gets the file.
    """
    try:
        with large_weights():
            model.save(path)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the model {model.name!r} cannot be saved to a file, as it must travel: "
            f"{_short(error)}. {_CURE}"
        ) from error


def saved(model: Any) -> bytes:
    """Return a Keras model as a `.keras` file."""
    with scratch_folder() as folder:
        path = folder / "model.keras"
        save_to(path, model)
        return path.read_bytes()


def save_checked(path: Path, model: Any, objects: Objects) -> None:
    """Do what `save_to` does, of a model that can be made again from its file."""
    save_to(path, model)
    loaded(path, objects, reads=False)


def loaded(
    source: bytes | Path | str, objects: Objects, compiles: bool = False, reads: bool = True
) -> Any:
    """Return the Keras model of a `.keras` file, given as its content or its path.

    Without `reads` its large variables are zeros, see `large_weights`.
    """
    try:
        import keras
    except ImportError as error:
        raise FrameworkMissingError(
            f"Keras cannot be imported here: {error}. Install it with its backend: "
            "pip install keras tensorflow (or tensorflow-cpu)"
        ) from error
    with scratch_folder() as folder:
        # Keras unpacks it beside its path.
        path = folder / ("a.keras" if isinstance(source, bytes) else Path(source).name)
        if isinstance(source, bytes):
            path.write_bytes(source)
        else:
            path.symlink_to(Path(source).absolute())
        try:
            with scope(objects), large_weights(reads=reads):
                return keras.saving.load_model(path, compile=compiles)
        except (TypeError, ValueError, KeyError, AttributeError, NameError) as error:
            name = "the model" if isinstance(source, bytes) else f"the model {source}"
            raise ConfigError(
                f"{name} cannot be loaded from its file: {_short(error)}. {_CURE}"
            ) from error


def _short(error: Exception) -> str:
    """Return Keras' reason, without configurations, which may have thousands of lines."""
    # The innermost of several objects comes last.
    text = in_words(error).rpartition("Exception encountered: ")[2]
    text = re.split(r"Make sure custom classes|Full object config: |config=\{", text)[0]
    text = " ".join(text.split()).rstrip(". ")
    return text if len(text) <= 600 else f"{text[:300]} … {text[-300:]}"


def layer_names(tensors: Sequence[Any]) -> list[str]:
    """Return the names of the layers that make inputs or outputs of a Keras model.

    A file keeps these. An input without a name is a tensor of another name than its layer, until
    the model is loaded from a file.
    """
    return [tensor._keras_history.operation.name for tensor in tensors]


def output_names(model: Any, count: int) -> list[str]:
    """Return the names of a Keras model's outputs; numbers if unclear.

    They are the keys of a dict, or those of the layers that the outputs come from.
    """
    if isinstance(output := getattr(model, "output", None), dict):  # a Sequential may have none
        keys = {id(tensor): str(key) for key, tensor in output.items()}
        return [keys[id(tensor)] for tensor in model.outputs]
    names = layer_names(model.outputs)
    if len(names) != count or len(set(names)) != count:
        return [f"output_{index}" for index in range(count)]
    return names


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
