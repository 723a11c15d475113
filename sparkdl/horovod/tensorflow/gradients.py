"""`DistributedGradientTape`, and how gradients are reduced over all members, in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.collectives.transport import Op
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common import Average, ProcessSet, global_process_set, op_of
from sparkdl.horovod.common.compression import Compression, Compressor
from sparkdl.horovod.common.operations import Slot, plan
from sparkdl.horovod.common.process_sets import has_peers
from sparkdl.horovod.tensorflow.mpi_ops import grouped_allreduce


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced: the arguments of Horovod's optimizers and tapes.

    Attributes:
        sparse_as_dense: reduce `tf.IndexedSlices` as the tensors they stand for.
        predivide_factor: with Average: gradients are divided by it before they are summed, and
            multiplied by it afterwards; against overflow.
    """

    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    op: Op | str = Average
    predivide_factor: float = 1.0
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        how = op_of(self.op)
        if self.predivide_factor != 1.0 and how is not op_of(Average):
            raise ConfigError("gradient_predivide_factor divides averages: use op=hvd.Average")

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients reduced over the members; `None` stays `None`."""
        import tensorflow as tf

        results = list(gradients)
        if not has_peers(self.process_set):
            return results
        if self.sparse_as_dense:
            results = [tf.convert_to_tensor(g) if is_sparse(g) else g for g in results]
        shared = [i for i, gradient in enumerate(results) if gradient is not None]
        with tf.name_scope("horovod"):
            for places in plan([Slot(nbytes_of(results[i])) for i in shared]):
                bucket = [shared[place] for place in places]
                reduced = grouped_allreduce(
                    [results[i] for i in bucket],
                    compression=self.compression,
                    op=self.op,
                    prescale_factor=1.0 / self.predivide_factor,
                    postscale_factor=self.predivide_factor,
                    process_set=self.process_set,
                )
                for i, gradient in zip(bucket, reduced, strict=True):
                    results[i] = gradient
        return results


def is_sparse(gradient: Any) -> bool:
    import tensorflow as tf

    return isinstance(gradient, tf.IndexedSlices)


def nbytes_of(gradient: Any) -> int:
    """Return how many bytes a gradient has, as far as its shape is known; 0 if it is not."""
    tensor = gradient.values if is_sparse(gradient) else gradient
    return int(tensor.shape.num_elements() or 0) * int(tensor.dtype.size)


def DistributedGradientTape(  # noqa: N802, PLR0913 (Horovod's name and arguments)
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: Op | str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `tf.GradientTape` with what `gradtape` has recorded or will record.

    Its `gradient` reduces the gradients over all members, which all must call it.

    Args:
        gradtape: a `tf.GradientTape`.
        compression: `Compression.fp16` or `bf16` for half the bytes.
        sparse_as_dense: reduce `tf.IndexedSlices` as the tensors they stand for.
        op: Average or Sum; Min, Max and Product as well.
        gradient_predivide_factor: with Average, gradients are divided by it before they are
            summed, and multiplied by it afterwards.
        num_groups, groups: accepted; gradients travel in buckets of 25 MB.
        scale_local_gradients: accepted; there are no local sources.
    """
    import tensorflow as tf

    if not isinstance(gradtape, tf.GradientTape):
        raise ConfigError(f"{gradtape!r} must be a tf.GradientTape")
    how = Reduction(compression, sparse_as_dense, op, gradient_predivide_factor, process_set)
    kind = type(gradtape)
    tape: Any = object.__new__(type(kind.__name__, (kind,), {"gradient": _gradient}))
    vars(tape).update(vars(gradtape))
    tape._sparkdl_stock, tape._sparkdl_reduction = kind.gradient, how
    return tape


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
    # `IndexedSlices` stay whole: they are reduced as one gradient.
    flat = tf.nest.flatten(found, expand_composites=False)
    reduced = tape._sparkdl_reduction.reduce(flat)
    return tf.nest.pack_sequence_as(found, reduced)
