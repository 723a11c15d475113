"""Reads a Keras model's inputs and outputs from its file: importing Keras would take seconds.

Runs in: driver

This covers models of Keras' own layers with shapes at the output layers, as most models have.
https://keras.io/guides/serialization_and_saving
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

from sparkdl.ml.estimators.source import ModelSource, Signature, Tensor

_MODELS = ("Functional", "Sequential")
_INPUT, _DENSE, _LAMBDA = "InputLayer", "Dense", "Lambda"
_SAME = ("Activation", "Dropout", "ReLU", "Softmax")
"""Layers whose output has the shape and type of their input."""
_PARTS = ("config.json", "model.weights.h5")
_FLOAT = "float32"

Shape = tuple[int | None, ...]
Entry = Mapping[str, Any]
"""The saved configuration of a layer, or of a tensor between layers."""


class _UnclearError(Exception):
    """The file does not say it."""


def signature_in_keras_file(source: ModelSource) -> Signature | None:
    """Return the signature in a `.keras` file or a model's JSON; None if Keras must load it.

    Files of Keras 3 contain it, files of Keras 2 do not.
    """
    try:
        return _signature(json.loads(source.config or _config_in(source.path)))
    except (_UnclearError, OSError, zipfile.BadZipFile, LookupError, TypeError, ValueError):
        return None  # another version, custom, or broken: loading it will show which


def _config_in(path: str) -> bytes:
    with zipfile.ZipFile(path) as file:
        if not set(_PARTS) <= set(file.namelist()):
            raise _UnclearError
        return file.read(_PARTS[0])


def _signature(model: Entry) -> Signature:
    if model["class_name"] not in _MODELS or not model["module"].startswith("keras"):
        raise _UnclearError
    layers: list[Entry] = model["config"]["layers"]
    if not all(map(_is_keras_own, layers)):
        raise _UnclearError
    if model["class_name"] == "Sequential":
        return Signature((_input(layers[0]),), (_last_of(layers),))
    by_name = {layer["name"]: layer for layer in layers}
    config = model["config"]
    inputs = [_input(by_name[name]) for name, _, _ in _flat(config["input_layers"])]
    outputs = [
        _output(by_name[name], *_inbound(by_name[name], node))
        for name, node, _ in _flat(config["output_layers"])
    ]
    if len({tensor.name for tensor in outputs}) < len(outputs):
        raise _UnclearError
    return Signature(tuple(inputs), tuple(outputs))


def _is_keras_own(layer: Entry) -> bool:
    """Whether it is neither custom nor arbitrary code, nor a model with layers of its own."""
    is_layer = layer["module"] == "keras.layers" and layer["registered_name"] is None
    return is_layer and layer["class_name"] != _LAMBDA


def _flat(tensors: Sequence[Any]) -> list[tuple[str, int, int]]:
    """Return the places of the model's inputs or outputs, which are one, or a list."""
    found = [tensors] if isinstance(tensors[0], str) else list(tensors)
    if not all(isinstance(name, str) for name, _, _ in found):
        raise _UnclearError
    return [(name, node, number) for name, node, number in found]


def _input(layer: Entry) -> Tensor:
    config = layer["config"]
    if layer["class_name"] != _INPUT or any(map(config.get, ("sparse", "ragged", "optional"))):
        raise _UnclearError
    if config["dtype"] == "bfloat16":  # which is not numpy's
        raise _UnclearError
    return Tensor(config["name"], config["dtype"], (None, *config["batch_shape"][1:]))


def _last_of(layers: Sequence[Entry]) -> Tensor:
    """Return the output of a chain of layers."""
    *before, layer = layers
    if layer["class_name"] in _SAME:
        given = _last_of(before)
        return _output(layer, given.shape or (), given.dtype)
    # If it is dense, it is float whatever it is given.
    return _output(layer, layer["build_config"]["input_shape"], "")


def _inbound(layer: Entry, node: int) -> tuple[Shape, str]:
    """Return shape and dtype of what a layer is called with."""
    (given,) = layer["inbound_nodes"][node]["args"]
    if given["class_name"] != "__keras_tensor__":
        raise _UnclearError
    return tuple(given["config"]["shape"]), given["config"]["dtype"]


def _output(layer: Entry, shape: Sequence[int | None], dtype: str) -> Tensor:
    """Return what a layer makes of one tensor.

    Args:
        shape, dtype: of the tensor.
    """
    config = layer["config"]
    policy = config["dtype"]
    policy = policy if isinstance(policy, str) else policy["config"]["name"]
    if policy != _FLOAT or not isinstance(config.get("activation", ""), str):
        raise _UnclearError  # a mixed policy, or a function that may do anything
    if layer["class_name"] == _DENSE:
        return Tensor(config["name"], _FLOAT, (None, *shape[1:-1], config["units"]))
    if layer["class_name"] in _SAME and dtype == _FLOAT:
        return Tensor(config["name"], _FLOAT, (None, *shape[1:]))
    raise _UnclearError
