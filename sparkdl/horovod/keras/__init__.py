"""Horovod's API for Keras 3 on TensorFlow: `import sparkdl.horovod.keras as hvd`.

See docs/horovod.md.

Runs in: child
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from sparkdl.collectives.transport import Op
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
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
)
from sparkdl.horovod.tensorflow.gradients import Groups
from sparkdl.horovod.tensorflow.mpi_ops import barrier, join

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


def DistributedOptimizer(  # noqa: N802, PLR0913 (Horovod's name and arguments)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op | str = Average,
    num_groups: int = 0,
    groups: Groups | None = None,
    **options: Any,
) -> Any:
    """Return an optimizer like this one that reduces gradients over all members.

    Args:
        optimizer: see `sparkdl.horovod.tensorflow.DistributedOptimizer`, as for all arguments.
        options: further ones of it: `backward_passes_per_step`, `average_aggregated_gradients`,
            `process_set`, `scale_local_gradients`.
    """
    return _tensorflow.DistributedOptimizer(
        optimizer,
        name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        num_groups=num_groups,
        groups=groups,
        **options,
    )


def PartialDistributedOptimizer(  # noqa: N802, PLR0913 (Horovod's name and arguments)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op | str = Average,
    groups: Groups | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Any:
    """Return a `DistributedOptimizer` that leaves the gradients of some layers alone.

    Args:
        local_layers: a layer of Keras, or several; built.
        options: as of `DistributedOptimizer`.
    """
    return _tensorflow.PartialDistributedOptimizer(
        optimizer,
        name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        local_layers=local_layers,
        scale_local_gradients=scale_local_gradients,
        **options,
    )


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
            model.jit_compile = False
    return model


load_model = functools.partial(load, "keras")
"""See `load`."""
