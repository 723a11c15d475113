"""Horovod's API for Keras 3 on TensorFlow: `import sparkdl.horovod.keras as hvd`.

See docs/horovod.md.

Runs in: child
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from inspect import Signature, signature
from typing import Any

from sparkdl.collectives.transport import Op
from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.common import basics
from sparkdl.horovod.common.basics import *  # noqa: F403 (what all faces have)
from sparkdl.horovod.common.basics import Average, ProcessSet, global_process_set
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
_ARGUMENTS = signature(_tensorflow.DistributedOptimizer).parameters


def in_order(function: Callable[..., Any], *first: str) -> Callable[..., Any]:
    """Return an optimizer of `sparkdl.horovod.tensorflow` whose arguments begin with these.

    Horovod's modules have the same arguments, each in an order of its own.
    """
    names = dict.fromkeys([*first, *_ARGUMENTS])
    own = Signature([_ARGUMENTS[name] for name in names])

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(**own.bind(*args, **kwargs).arguments)

    call.__signature__ = own  # type: ignore[attr-defined]
    return call


_FIRST = (
    *("optimizer", "name", "device_dense", "device_sparse", "compression", "sparse_as_dense"),
    *("gradient_predivide_factor", "op"),
)
DistributedOptimizer = in_order(_tensorflow.DistributedOptimizer, *_FIRST, "num_groups", "groups")


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Op | str | None = None,
    compression: type[Compressor] = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return a value reduced over all members, as a tensor.

    Args:
        value: a tensor, or what TensorFlow makes one of; of the same shape on all members.
    """
    factors = (prescale_factor, postscale_factor)
    return mpi_ops.allreduce(value, average, "", "", compression, op, *factors, name, process_set)


def allgather(
    value: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the rows of all members, by rank, as a tensor."""
    return mpi_ops.allgather(value, name, process_set=process_set)


def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the value of `root_rank`, as a tensor."""
    return mpi_ops.broadcast(value, root_rank, name, process_set=process_set)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: Op | str = Average,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return this member's share of the rows of the reduced value, as a tensor."""
    return mpi_ops.reducescatter(value, op=op, name=name, process_set=process_set)


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
