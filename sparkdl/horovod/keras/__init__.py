"""Horovod's API for Keras 3 on TensorFlow: `import sparkdl.horovod.keras as hvd`.

See docs/horovod.md.

Runs in: child
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from inspect import Signature, signature
from typing import Any

from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.common import basics
from sparkdl.horovod.common.basics import *  # noqa: F403 (what all faces have)
from sparkdl.horovod.common.compression import Compression, Compressor
from sparkdl.horovod.keras import callbacks, elastic
from sparkdl.horovod.keras.callbacks import library_named
from sparkdl.horovod.tensorflow import mpi_ops
from sparkdl.horovod.tensorflow import optimizer as _tensorflow
from sparkdl.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_object,
    broadcast_variables,
)
from sparkdl.horovod.tensorflow.mpi_ops import barrier, join

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
    "reducescatter",
]

__getattr__ = functools.partial(missing_name, __name__)


def in_order(function: Callable[..., Any], *first: str, **renamed: str) -> Callable[..., Any]:
    """Return a function of `sparkdl.horovod.tensorflow` whose arguments begin with these.

    Horovod's modules have the same arguments, each in an order of its own.

    Args:
        renamed: the function's names for some of them.
    """
    known = signature(function).parameters
    rest = [name for name in known if name not in (*first, *renamed.values())]
    own = Signature([known[renamed.get(n, n)].replace(name=n) for n in (*first, *rest)])

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = own.bind(*args, **kwargs).arguments
        return function(**{renamed.get(name, name): value for name, value in given.items()})

    call.__signature__ = own  # type: ignore[attr-defined]
    return call


_FIRST = (
    *("optimizer", "name", "device_dense", "device_sparse", "compression", "sparse_as_dense"),
    *("gradient_predivide_factor", "op"),
)
DistributedOptimizer = in_order(_tensorflow.DistributedOptimizer, *_FIRST, "num_groups", "groups")
allreduce = in_order(
    mpi_ops.allreduce,
    *("value", "name", "average", "prescale_factor", "postscale_factor", "op", "compression"),
    value="tensor",
)
allgather = in_order(mpi_ops.allgather, "value", "name", value="tensor")
broadcast = in_order(mpi_ops.broadcast, "value", "root_rank", "name", value="tensor")
reducescatter = in_order(mpi_ops.reducescatter, "value", "name", "op", value="tensor")


def load(
    library: str,
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a saved model; its optimizer is a `DistributedOptimizer` and continues where it was.

    Args:
        library: `keras` or `tf.keras`.
        filepath: of the model.
        custom_optimizers: classes that Keras does not know.
        custom_objects: other things that Keras does not know, by name.
        compression: of the gradients.
        legacy_opts: accepted; optimizers of `keras.optimizers.legacy` are found anyway.

    Raises:
        ValueError: of Keras, if there is no such model.
    """
    keras = library_named(library)
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
        if getattr(model, "jit_compile", False):
            # The step exchanges gradients by Python, which XLA cannot compile.
            model.jit_compile = False
    return model


load_model = functools.partial(load, "keras")
"""See `load`."""
