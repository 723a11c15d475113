"""Read a SavedModel's inputs and outputs from its file: TensorFlow would take seconds to load.

Runs in: driver

https://www.tensorflow.org/guide/saved_model#the_savedmodel_format_on_disk
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from sparkdl.core.errors import ConfigError
from sparkdl.data.protos import message_class
from sparkdl.ml.estimators.source import ModelSource, Signature, Tensor

_DEFAULT_KEY = "serving_default"
# The file also has TensorFlow's own signatures, such as the initializer's.
_INTERNAL = "__saved_model_"
_DTYPES = {  # by their numbers in types.proto; bfloat16 (14) is returned as float32
    **{1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 7: "string"},
    **{8: "complex64", 9: "int64", 10: "bool", 14: "float32", 17: "uint16", 18: "complex128"},
    **{19: "float16", 22: "uint32", 23: "uint64"},
}


def signature_in_file(source: ModelSource) -> Signature | None:
    """Return what a SavedModel takes and gives; None if one has to load it to know.

    Raises:
        ConfigError: if it has no such signature.
    """
    folder = Path(source.path)
    if not (folder / "variables" / "variables.index").is_file():
        return None  # it is elsewhere, of TensorFlow 1, or not whole
    try:
        content = (folder / "saved_model.pb").read_bytes()
        graphs = message_class("SavedModel").FromString(content).meta_graphs
    except (OSError, DecodeError):
        return None
    tags = set(source.tag_set)
    # A file may hold several graphs, for training and for serving.
    graphs = [graph for graph in graphs if not tags or tags == set(graph.meta_info_def.tags)]
    if len(graphs) != 1:
        return None
    signatures = graphs[0].signature_def
    keys = [key for key in signatures if not key.startswith(_INTERNAL)]
    signature = signatures[signature_key(source, keys)]
    inputs, outputs = _tensors(signature.inputs), _tensors(signature.outputs)
    return None if inputs is None or outputs is None else Signature(inputs, outputs)


def signature_key(source: ModelSource, keys: Sequence[str]) -> str:
    """Return which signature of a SavedModel is meant.

    Raises:
        ConfigError: if it is none of `keys`.
    """
    only = keys[0] if len(keys) == 1 else _DEFAULT_KEY
    key = source.signature_def_key or only
    if key not in keys:
        raise ConfigError(
            f"the SavedModel {source.path} has no signature {key!r}; it has "
            f"{', '.join(map(repr, sorted(keys))) or 'none'}: call setSignatureDefKey(…) with one "
            "of them"
        )
    return key


def _tensors(infos: Mapping[str, Any]) -> tuple[Tensor, ...] | None:
    found = []
    # Sorted, because a map of protobuf has no order.
    for name, info in sorted(infos.items()):
        if info.WhichOneof("kind") != "name" or info.dtype not in _DTYPES:
            return None  # sparse, ragged, or of a type that is not numpy's
        shape = info.tensor_shape
        sizes = tuple(None if dim.size < 0 else dim.size for dim in shape.dim)
        found.append(Tensor(name, _DTYPES[info.dtype], None if shape.unknown_rank else sizes))
    return tuple(found)
