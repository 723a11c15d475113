"""A Keras model as its file, and the classes and functions that travel beside it.

Runs in: driver, child, feeder

A `.keras` file holds weights, vocabularies, and whatever else a layer saves. It only names layers,
losses and functions that Keras does not have, and holds a lambda as bytecode without its globals.
These therefore travel by cloudpickle, under the names that the file has for them. This is for Keras
3 and tf_keras. https://keras.io/guides/serialization_and_saving/#custom-objects
"""

from __future__ import annotations

import inspect
import io
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from sparkdl.core.errors import ConfigError, FrameworkMissingError, in_words
from sparkdl.core.scratch import scratch_folder

Objects = Mapping[str, Any]
"""Classes and functions by the names that configurations of Keras call them by."""
LIBRARIES = ("keras", "tf_keras")
HDF5 = b"\x89HDF"
_OWN = (*LIBRARIES, "keras_hub", "keras_cv", "keras_nlp", "tensorflow", "numpy", "builtins")
_LAMBDA = "<lambda>"
_DUMP = "_serialize_function_to_config"
_OPEN_SIZE = 8
"""The size of a made-up input along an axis that the model leaves open."""
_STATE = (
    "Give its own layers a get_config that returns the arguments of their __init__, and let them "
    "keep all other state in weights, save_own_variables or save_assets"
)
_LACKS = (
    "Save the model with model.export(folder) and give the folder to TFModel: a SavedModel needs "
    "no classes. Or register them in the driver's program, by keras.saving."
    "register_keras_serializable, so that they travel; those of a model that KerasEstimator.fit "
    "has returned do anyway"
)


def library_of(model: Any) -> str | None:
    """Return the name of the library that a model belongs to; None if it is no Keras model."""
    origins = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    found = next((name for name in LIBRARIES if name in origins), None)
    return found if hasattr(model, "compile") else None


def scope(objects: Objects, library: str = "keras") -> Any:
    """Return a context in which Keras finds these."""
    if not objects:
        return nullcontext()
    return import_module(library).saving.custom_object_scope(dict(objects))


def objects_in(value: Any) -> dict[str, Any]:
    """Return the classes and functions in a loss, a metric, an optimizer, or lists of them.

    Raises:
        ConfigError: if one is a lambda, which has no name.
    """
    if isinstance(value, Mapping):
        return {} if "class_name" in value else _joined(value.values())
    if isinstance(value, (list, tuple)):
        return _joined(value)
    if value is None or isinstance(value, str):
        return {}
    made_by = value if inspect.isfunction(value) or isinstance(value, type) else type(value)
    if _is_own(made_by):
        return {}
    if made_by.__name__ == _LAMBDA:
        raise ConfigError(f"{value!r} has no name to be found by: write it as a function, def …")
    import keras

    return {keras.saving.get_registered_name(made_by): made_by}


def _joined(values: Any) -> dict[str, Any]:
    return {name: each for value in values for name, each in objects_in(value).items()}


@contextmanager
def named_objects(model: Any, known: Objects | None = None) -> Iterator[dict[str, Any]]:
    """Give a model's own classes and functions by name; files saved meanwhile use these names.

    A lambda, two functions of one name, and a function named as one of Keras have other names
    meanwhile. tf_keras, which writes any function of a `Lambda` layer as bytecode, writes its name.

    Args:
        known: those that the model was loaded with, which have the same names again.
    """
    keras = import_module(library_of(model) or "keras")
    homes = (keras.activations, keras.losses, keras.metrics, keras.initializers)
    names = {id(each): name for name, each in (known or {}).items()}
    found: dict[str, Any] = dict(known or {})
    layers = list(model._flatten_layers())
    with ExitStack() as stack:
        for each in _own_parts(layers):
            own = name = keras.saving.get_registered_name(each)
            if own == each.__name__ and id(each) in names:
                name = names[id(each)]
            elif own == each.__name__ and (
                own == _LAMBDA
                or any(hasattr(home, own) for home in homes)
                or found.get(own, each) is not each
            ):
                name = f"{own.strip('<>')}_{len(found)}"
            names[id(each)] = name
            found[name] = each
            if name != own:
                stack.callback(setattr, each, "__name__", own)
                each.__name__ = name
        if keras.__name__ == "tf_keras":
            for layer in layers:
                if isinstance(layer, keras.layers.Lambda):
                    # Not as an attribute, which tf_keras would track.
                    vars(layer)[_DUMP] = _by_name
                    stack.callback(vars(layer).pop, _DUMP)
        yield found


def _by_name(function: Any, allow_raw: bool = False) -> tuple[Any, str, None]:
    is_named = callable(function)
    return (function.__name__, "function", None) if is_named else (function, "raw", None)


def _own_parts(layers: Sequence[Any]) -> Iterator[Any]:
    """Yield the classes and functions that layers consist of and Keras does not have."""
    for layer in layers:
        for part in (layer, *getattr(layer, "_operations", ())):
            # Methods that Keras has wrapped are attributes of the instance, too.
            held = [x for name, x in vars(part).items() if not hasattr(type(part), name)]
            yield from _own([part, held])
    for layer in layers:
        yield from _own(getattr(getattr(layer, "_compile_config", None), "config", None))


def _own(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _own(each)
        return
    if inspect.isfunction(value):
        made_by: Any = value
    elif hasattr(value, "get_config") and not isinstance(value, type):
        made_by = type(value)
    else:
        return
    if not _is_own(made_by):
        yield made_by


def _is_own(made_by: Any) -> bool:
    return (made_by.__module__ or "").partition(".")[0] in _OWN


def named_in(source: bytes | str, objects: Objects) -> dict[str, Any]:
    """Return those of `objects` that a `.keras` file names, all for other files and URLs."""
    try:
        with zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
            config = file.read("config.json").decode()
    except (zipfile.BadZipFile, KeyError, OSError):
        return dict(objects)
    return {name: each for name, each in objects.items() if json.dumps(name) in config}


def registered(source: bytes | str) -> bytes:
    """Return what this program has registered with Keras and a `.keras` file names, pickled."""
    if "keras" not in sys.modules:
        return b""
    import keras

    own = {n: each for n, each in keras.saving.get_custom_objects().items() if not _is_own(each)}
    found = named_in(source, own)
    return bytes(cloudpickle.dumps(found)) if found else b""


def as_content(model: Any) -> bytes:
    """Return a Keras model as a `.keras` file.

    Under a strategy of several nodes all of them must call it, and the chief alone gets the file.
    """
    with scratch_folder() as folder:
        path = folder / "model.keras"
        model.save(path)
        return path.read_bytes() if path.exists() else b""


def saved(model: Any, given: Objects | None = None) -> tuple[bytes, dict[str, Any]]:
    """Return a Keras model as a `.keras` file, and the classes and functions that it names.

    Args:
        given: more of them, which the model does not show.

    Raises:
        ConfigError: if Keras cannot save the model.
    """
    try:
        with named_objects(model, given) as objects:
            content = as_content(model)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the model {model.name!r} cannot be saved to a file, as it must travel: "
            f"{_short(error)}. {_STATE}"
        ) from error
    return content, named_in(content, objects)


def checked_file(model: Any, given: Objects | None = None) -> tuple[bytes, dict[str, Any]]:
    """Return what `saved` does, of a model that can be made again from it.

    The copy must give the same outputs for one made-up row. A model that cannot be run on it, or
    that gives other outputs each time, is not compared.

    Raises:
        ConfigError: if it cannot be made again, or gives other outputs.
    """
    content, objects = saved(model, given)
    runs: list[list[Any]] = []
    with suppress(Exception):  # whatever the user's layers raise for a made-up row
        # On all nodes of a strategy and as often, because reading some variables is a collective.
        runs = [_outputs(model, model) for _ in range(2)]
    if content:
        copy = loaded(content, objects, library_of(model) or "keras")
        if runs and _are_alike(*runs):
            _check_copy(model, copy, runs[0])
    return content, objects


def loaded(
    source: bytes | Path | str, objects: Objects, library: str = "keras", compiles: bool = False
) -> Any:
    """Return the Keras model of a `.keras` file, given as its content or its path.

    Args:
        library: `keras` or `tf_keras`.
        compiles: with its optimizer, loss and metrics.

    Raises:
        FrameworkMissingError: if there is no Keras.
        ConfigError: if Keras cannot make the model again; it says what to change.
    """
    try:
        keras = import_module(library)
    except ImportError as error:
        raise FrameworkMissingError(
            f"Keras cannot be imported here: {error}. Install it with its backend: "
            "pip install keras tensorflow (or tensorflow-cpu)"
        ) from error
    with scratch_folder() as folder:
        path = source
        if isinstance(source, bytes):
            path = folder / ("model.h5" if source.startswith(HDF5) else "model.keras")
            path.write_bytes(source)
        try:
            with scope(objects, library):
                return keras.saving.load_model(path, compile=compiles)
        except (TypeError, ValueError, KeyError, AttributeError, NameError) as error:
            name = "the model" if isinstance(source, bytes) else f"the model {source}"
            text = _short(error)
            is_lacking = "Could not locate" in text or "safe_mode" in text
            raise ConfigError(
                f"{name} cannot be loaded from its file: {text}. {_LACKS if is_lacking else _STATE}"
            ) from error


def _short(error: Exception) -> str:
    """Return Keras' reason, without configurations, which may have thousands of lines."""
    # The innermost of several objects comes last.
    text = in_words(error).rpartition("Exception encountered: ")[2]
    text = re.split(r"Make sure custom classes|Full object config: |config=\{", text)[0]
    text = " ".join(text.split()).rstrip(". ")
    return text if len(text) <= 600 else f"{text[:300]} … {text[-300:]}"


def _check_copy(model: Any, copy: Any, expected: Sequence[Any]) -> None:
    try:
        is_same = _are_alike(expected, _outputs(copy, model))
    except Exception as error:
        raise _not_alike(model, f"fails: {_short(error)}") from error
    if not is_same:
        raise _not_alike(model, "gives other outputs for the same row")


def _not_alike(model: Any, what: str) -> ConfigError:
    return ConfigError(
        f"the model {model.name!r} cannot be trained: its copy, made from its file as the trained "
        f"model will be, {what}. {_STATE}"
    )


def _outputs(model: Any, like: Any) -> list[Any]:
    """Return what a model gives for a row, which depends on `like` alone."""
    keras = import_module(library_of(like) or "keras")
    word = next(_words(like), "a")
    numbers = np.random.default_rng(0)

    def made_up(tensor: Any) -> Any:
        shape = (1, *(_OPEN_SIZE if size is None else size for size in tensor.shape[1:]))
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if dtype == "string":
            import tensorflow as tf

            return tf.fill(shape, word)
        if "int" in dtype or dtype == "bool":
            return keras.ops.cast(numbers.integers(0, 2, shape), dtype)
        return keras.ops.cast(numbers.normal(size=shape), dtype)

    flat = model.inputs
    given = {id(tensor): made_up(tensor) for tensor in flat}
    structure = flat[0] if len(flat) == 1 else model.input
    found = model(keras.tree.map_structure(lambda t: given[id(t)], structure), training=False)
    return [np.asarray(keras.ops.convert_to_numpy(each)) for each in keras.tree.flatten(found)]


def _words(model: Any) -> Iterator[str]:
    """Yield a word of each vocabulary in a model: others may be alike with and without it."""
    for layer in model._flatten_layers():
        if hasattr(layer, "get_vocabulary"):
            yield from (word for word in layer.get_vocabulary()[-1:] if isinstance(word, str))


def _are_alike(expected: Sequence[Any], found: Sequence[Any]) -> bool:
    return len(expected) == len(found) and all(map(_is_alike, expected, found))


def _is_alike(a: Any, b: Any) -> bool:
    if a.shape != b.shape or a.dtype.kind in "OSUbiu":
        return bool(np.array_equal(a, b))
    a, b = a.astype(np.float64), b.astype(np.float64)
    scale = float(np.abs(a).max(initial=0.0, where=np.isfinite(a)))
    return bool(np.allclose(a, b, rtol=0.0, atol=1e-3 * scale + 1e-12, equal_nan=True))
