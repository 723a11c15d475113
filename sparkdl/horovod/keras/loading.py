"""Saved models of Keras, with optimizers that reduce over all members.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sparkdl.horovod.keras.making import library_named
from sparkdl.horovod.tensorflow.compression import Compression, Compressor
from sparkdl.horovod.tensorflow.optimizer import DistributedOptimizer


def load(
    library: str,
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Return a saved model; its optimizer is a `DistributedOptimizer` and goes on where it was.

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
