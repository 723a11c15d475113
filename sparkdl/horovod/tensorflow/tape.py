"""A gradient tape whose gradients are those of all members.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sparkdl.collectives.base import Op
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common.basics import Average
from sparkdl.horovod.common.process_sets import ProcessSet, global_process_set
from sparkdl.horovod.tensorflow.compression import Compression, Compressor
from sparkdl.horovod.tensorflow.gradients import Groups, Reduction, key_of


def DistributedGradientTape(  # noqa: N802, PLR0913 (Horovod's name and arguments)
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: Op | str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `tf.GradientTape` with what `gradtape` has recorded or will record.

    Its `gradient` reduces the gradients over all members. Call it alike on all of them.

    Args:
        gradtape: a `tf.GradientTape`.
        compression: `Compression.fp16` or `bf16` for half the bytes.
        sparse_as_dense: reduce `tf.IndexedSlices` as the tensors they stand for.
        op: Average or Sum; Min, Max and Product as well.
        gradient_predivide_factor: with Average, gradients are divided by it before they are
            summed, and multiplied by it afterwards.
        groups: how many buckets, or lists of the variables whose gradients travel together; by
            default buckets of 25 MB. `num_groups` is its old name.
        scale_local_gradients: divide the gradients of local sources by the number of members.

    Raises:
        ConfigError: if an argument cannot be.
    """
    import tensorflow as tf

    if not isinstance(gradtape, tf.GradientTape):
        raise ConfigError(f"{gradtape!r} is no tf.GradientTape")
    how = Reduction(
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups if groups is not None else num_groups or None,
        process_set,
        scale_local_gradients,
    )
    kind = type(gradtape)
    members = {"gradient": _gradient, "register_local_source": _register_local_source}
    tape: Any = object.__new__(type(kind.__name__, (kind,), members))
    vars(tape).update(vars(gradtape))
    tape._sparkdl_stock, tape._sparkdl_reduction, tape._sparkdl_local = kind.gradient, how, set()
    return tape


def PartialDistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Return a `DistributedGradientTape` that leaves the gradients of some layers alone.

    Args:
        local_layers: a layer of Keras, or several.
        args, options: of `DistributedGradientTape`.

    Raises:
        ConfigError: if an argument cannot be.
    """
    tape = DistributedGradientTape(gradtape, *args, **options)
    for variable in layer_variables(local_layers):
        tape.register_local_source(variable)
    return tape


def layer_variables(layers: Any) -> list[Any]:
    """Return the trainable variables of a layer or several.

    Raises:
        ConfigError: if something else is among them.
    """
    several = list(layers) if isinstance(layers, Iterable) else [layers] if layers else []
    if not all(hasattr(layer, "trainable_weights") for layer in several):
        raise ConfigError(f"local_layers={layers!r}: give layers of Keras")
    return [variable for layer in several for variable in layer.trainable_weights]


def _gradient(
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    use_generic_names: bool = False,
    **options: Any,
) -> Any:
    import tensorflow as tf

    found = tape._sparkdl_stock(tape, target, sources, output_gradients, **options)
    flat = tf.nest.flatten(found, expand_composites=False)
    reduced = tape._sparkdl_reduction.reduce(flat, tf.nest.flatten(sources), tape._sparkdl_local)
    return tf.nest.pack_sequence_as(found, reduced)


def _register_local_source(tape: Any, source: Any) -> None:
    """Leave the gradients of `source` as they are on this member."""
    tape._sparkdl_local.add(key_of(source))
