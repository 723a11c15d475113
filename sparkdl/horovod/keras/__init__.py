"""Horovod's API for Keras 3 on TensorFlow: `import sparkdl.horovod.keras as hvd`.

See docs/horovod.md.

Runs in: child
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from sparkdl.horovod.common import basics
from sparkdl.horovod.common.basics import *  # noqa: F403 (what all faces have)
from sparkdl.horovod.common.compression import Compression, Compressor
from sparkdl.horovod.keras import callbacks, elastic
from sparkdl.horovod.keras.callbacks import library_named
from sparkdl.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
)
from sparkdl.horovod.tensorflow.mpi_ops import (
    allgather,
    allreduce,
    barrier,
    broadcast,
    join,
    reducescatter,
)
from sparkdl.horovod.tensorflow.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
)

__all__ = [
    *basics.__all__,
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "join",
    "load_model",
    "reducescatter",
]


def load(
    library: str,
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Return a saved model; its optimizer is a `DistributedOptimizer` and continues where it was.

    Args:
        library: `keras` or `tf.keras`.
        filepath: of the model.
        custom_optimizers: classes that Keras does not know.
        custom_objects: other things that Keras does not know, by name.
        compression: of the gradients.

    Raises:
        ValueError: of Keras, if there is no such model.
    """
    keras = library_named(library)
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
        if getattr(model, "jit_compile", False):
            model.jit_compile = False
    return model


load_model = functools.partial(load, "keras")
"""See `load`."""
