"""`DistributedGradientTape`, and how gradients are reduced over all members, in buckets.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.collectives.transport import Op
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common import Average, ProcessSet, global_process_set, op_of
from sparkdl.horovod.common.buckets import Slot, plan
from sparkdl.horovod.common.process_sets import has_peers
from sparkdl.horovod.tensorflow.compression import Compression, Compressor
from sparkdl.horovod.tensorflow.mpi_ops import grouped_allreduce

Groups = int | Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced: the arguments of Horovod's optimizers and tapes.

    Attributes:
        sparse_as_dense: reduce `tf.IndexedSlices` as the tensors they stand for.
        predivide_factor: with Average: gradients are divided by it before they are summed, and
            multiplied by it afterwards; against overflow.
        groups: how many buckets of as many gradients each, or the variables of each bucket.
        scale_local: divide the gradients of local variables by the number of members.
    """

    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    op: Op | str = Average
    predivide_factor: float = 1.0
    groups: Groups | None = None
    process_set: ProcessSet = global_process_set
    scale_local: bool = True

    def __post_init__(self) -> None:
        how = op_of(self.op)
        if self.predivide_factor != 1.0 and how is not op_of(Average):
            raise ConfigError("gradient_predivide_factor divides averages: use op=hvd.Average")
        if self.groups is not None and isinstance(self.groups, int) and self.groups <= 0:
            raise ConfigError(
                f"groups={self.groups}: give the number of buckets, or a list of lists of variables"
            )

    @property
    def moves(self) -> bool:
        """Whether there is anybody to exchange gradients with."""
        return has_peers(self.process_set)

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[Any] = ()
    ) -> list[Any]:
        """Return the gradients reduced over the members; `None` stays `None`.

        Args:
            gradients: one for each of `variables`; on all members for the same ones.
            local: keys (`key_of`) of variables whose gradients are this member's own.
        """
        import tensorflow as tf

        results = list(gradients)
        if not self.moves:
            return results
        if self.sparse_as_dense:
            results = [tf.convert_to_tensor(g) if is_sparse(g) else g for g in results]
        shared = []
        for i, variable in enumerate(variables):
            if results[i] is None:
                continue
            if key_of(variable) not in local:
                shared.append(i)
            elif self.scale_local:
                results[i] = _divided(results[i], len(self.process_set.ranks))
        with tf.name_scope("horovod"):
            for bucket in self._buckets(shared, results, variables):
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

    def _buckets(
        self, shared: list[int], gradients: Sequence[Any], variables: Sequence[Any]
    ) -> Iterator[list[int]]:
        """Yield the groups of gradients that travel together, in order."""
        groups = self.groups or 0
        if not isinstance(groups, int):
            left = {key_of(variables[i]): n for n, i in enumerate(shared)}
            # A variable in two groups counts in the first; those in none follow by size.
            groups = [
                [left.pop(key) for key in map(key_of, group) if key in left] for group in groups
            ]
        slots = [Slot(nbytes_of(gradients[i])) for i in shared]
        for bucket in plan(slots, groups=groups).buckets:
            yield [shared[n] for n in bucket]


def key_of(variable: Any) -> Any:
    """Return a key by which a variable of TensorFlow or Keras is known."""
    import tensorflow as tf

    own = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)
    # TensorFlow's variables cannot be hashed; their references can.
    return own.ref() if hasattr(own, "ref") else id(own)


def is_sparse(gradient: Any) -> bool:
    """Whether it is `tf.IndexedSlices`."""
    import tensorflow as tf

    return isinstance(gradient, tf.IndexedSlices)


def nbytes_of(gradient: Any) -> int:
    """Return how many bytes a gradient has, as far as its shape is known; 0 if it is not."""
    tensor = gradient.values if is_sparse(gradient) else gradient
    return int(tensor.shape.num_elements() or 0) * int(tensor.dtype.size)


def _divided(gradient: Any, by: int) -> Any:
    import tensorflow as tf

    if not is_sparse(gradient):
        return gradient / tf.cast(by, gradient.dtype)
    values = gradient.values / tf.cast(by, gradient.values.dtype)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


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

    Its `gradient` reduces the gradients over all members, which all must call it.

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
    """
    import tensorflow as tf

    if not isinstance(gradtape, tf.GradientTape):
        raise ConfigError(f"{gradtape!r} must be a tf.GradientTape")
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
    members = {
        "gradient": _gradient,
        "get_local_and_global_gradients": _get_local_and_global_gradients,
        "register_local_source": _register_local_source,
    }
    tape: Any = object.__new__(type(kind.__name__, (kind,), members))
    vars(tape).update(vars(gradtape))
    tape._sparkdl_stock, tape._sparkdl_reduction, tape._sparkdl_local = kind.gradient, how, set()
    return tape


def PartialDistributedGradientTape(  # noqa: N802, PLR0913 (Horovod's name and arguments)
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
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedGradientTape` that leaves the gradients of some layers alone.

    Its `get_local_and_global_gradients`, which takes what `gradient` takes, returns two lists of
    pairs of a source and its gradient: those of these layers, and the others.

    Args:
        local_layers: a layer of Keras, or several; the other arguments are those of
            `DistributedGradientTape`.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
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
    # `IndexedSlices` stay whole: they are reduced as one gradient.
    flat = tf.nest.flatten(found, expand_composites=False)
    reduced = tape._sparkdl_reduction.reduce(flat, tf.nest.flatten(sources), tape._sparkdl_local)
    return tf.nest.pack_sequence_as(found, reduced)


def _get_local_and_global_gradients(
    tape: Any, target: Any, sources: Any, *args: Any, **options: Any
) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """Return the pairs of sources and gradients: of local sources, and of the others."""
    pairs = list(zip(sources, tape.gradient(target, sources, *args, **options), strict=True))
    is_local = [key_of(source) in tape._sparkdl_local for source, _ in pairs]
    local = [pair for pair, its_own in zip(pairs, is_local, strict=True) if its_own]
    return local, [pair for pair, its_own in zip(pairs, is_local, strict=True) if not its_own]


def _register_local_source(tape: Any, source: Any) -> None:
    """Leave the gradients of `source` as they are on this member."""
    tape._sparkdl_local.add(key_of(source))
