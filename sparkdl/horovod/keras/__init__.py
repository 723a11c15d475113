"""Horovod's API for Keras 3 on TensorFlow: `import sparkdl.horovod.keras as hvd`.

`sparkdl.horovod.tensorflow.keras` is the same module. See docs/horovod.md.

Runs in: child
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.common import basics, elastic
from sparkdl.horovod.common.basics import *  # noqa: F403 (what all faces have)
from sparkdl.horovod.common.compression import Compression, Compressor
from sparkdl.horovod.keras import callbacks
from sparkdl.horovod.tensorflow import mpi_ops
from sparkdl.horovod.tensorflow.mpi_ops import (
    allgather,
    allgather_object,
    barrier,
    broadcast,
    broadcast_object,
    broadcast_variables,
    join,
)
from sparkdl.horovod.tensorflow.optimizer import DistributedOptimizer

__all__ = [
    *basics.__all__,
    "Compression",
    "DistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "join",
    "load_model",
]

# Where Horovod's programs import it from.
sys.modules[f"{__name__}.elastic"] = elastic


def __getattr__(name: str) -> Any:
    if name == "LogCallback":  # of Databricks' sparkdl
        return callbacks.LogCallback
    return missing_name(__name__, name)


def allreduce(value: Any, name: str | None = None, **options: Any) -> Any:
    """Return a tensor, or a value that converts to one, reduced over all members.

    Args:
        options: of `sparkdl.horovod.tensorflow.allreduce`.
    """
    return mpi_ops.allreduce(value, name=name, **options)


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a saved model; its optimizer is a `DistributedOptimizer` and continues where it was.

    Args:
        filepath: of the model.
        custom_optimizers: classes that Keras does not know.
        custom_objects: other things that Keras does not know, by name.
        compression: of the gradients.
        legacy_opts: accepted, without effect.

    Raises:
        ValueError: of Keras, if there is no such model.
    """
    import keras

    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
        if getattr(model, "jit_compile", False):
            # The step exchanges gradients by Python, which XLA cannot compile.
            model.jit_compile = False
    return model
