"""Find a Keras model's custom objects, so that they travel with it to the nodes.

Runs in: driver, child, feeder

A `.keras` file only names its custom layers, losses and functions; the process that loads it must
have them. Other processes cannot import those of a notebook or of the main program, so they travel
by cloudpickle. https://keras.io/guides/serialization_and_saving/#custom-objects
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sparkdl.core.errors import ConfigError

Objects = Mapping[str, Any]
"""Classes and functions by the names that configurations of Keras call them by."""
_OWN = ("keras.", "keras_hub.", "keras_cv.", "keras_nlp.")
_MARKS = ("__keras_tensor__", "__tensor__", "__numpy__", "__ellipsis__", "__tuple__", "__slice__")
_LAMBDA = "<lambda>"
_COMPILED = "compile_config"


def scope(objects: Objects) -> AbstractContextManager[Any]:
    """Return a context in which Keras finds these."""
    if not objects:
        return nullcontext()
    import keras

    return keras.saving.custom_object_scope(dict(objects))  # type: ignore[no-any-return]


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
    if _is_own(made_by.__module__):
        return {}
    if made_by.__name__ == _LAMBDA:
        raise ConfigError(f"{value!r} has no name to be found by: write it as a function, def …")
    import keras

    return {keras.saving.get_registered_name(made_by): made_by}


def _joined(values: Any) -> dict[str, Any]:
    return {name: each for value in values for name, each in objects_in(value).items()}


def objects_of(model: Any) -> dict[str, Any]:
    """Return the classes and functions that a model is made and compiled of.

    These are the registered objects, those of the program's main module, and the classes of its
    layers. Others are imported from their modules.
    """
    import keras

    classes = [type(layer) for layer in model._flatten_layers()]
    known = {keras.saving.get_registered_name(kind): kind for kind in classes}
    # No other process can import the main program or a notebook's cells.
    main = {name: each for name, each in vars(sys.modules["__main__"]).items() if callable(each)}
    # The surest last: the class of a layer that is in the model.
    known = {**main, **keras.saving.get_custom_objects(), **known}
    config = [json.loads(model.to_json()), model.get_compile_config() or {}]
    return {name: known[name] for name in foreign_names(config) if name in known}


def architecture(model: Any) -> dict[str, Any] | None:
    """Return a model's configuration, without its compilation, if Keras can rebuild the model.

    None if it has custom parts, or parts without a configuration.
    """
    try:
        config = json.loads(model.to_json())
    except (NotImplementedError, TypeError, ValueError):
        return None
    config = _not_compiled(config)
    return None if any(foreign_names(config)) else config


def _not_compiled(config: Any) -> Any:
    if isinstance(config, list):
        return [_not_compiled(each) for each in config]
    if not isinstance(config, dict):
        return config
    return {name: _not_compiled(each) for name, each in config.items() if name != _COMPILED}


def foreign_names(config: Any) -> Iterator[str]:
    """Yield the names of the custom objects in a configuration; some more than once."""
    if isinstance(config, Sequence) and not isinstance(config, str):
        for each in config:
            yield from foreign_names(each)
    if not isinstance(config, Mapping):
        return
    kind = config.get("class_name")
    if isinstance(kind, str) and kind not in _MARKS and not _is_own(config.get("module") or ""):
        name = config.get("config") if kind == "function" else config.get("registered_name")
        if not _is_function_of_keras(name):
            yield str(name or kind)
    for each in config.values():
        yield from foreign_names(each)


def _is_own(module: str) -> bool:
    return f"{module}.".startswith(_OWN)


def _is_function_of_keras(name: Any) -> bool:
    """Whether Keras finds a function by its name alone, as `relu` or `acc`."""
    import keras

    homes = (keras.activations, keras.losses, keras.metrics, keras.initializers)
    return isinstance(name, str) and any(hasattr(home, name) for home in homes)
