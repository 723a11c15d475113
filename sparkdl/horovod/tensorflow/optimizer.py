"""`DistributedGradientTape`, and optimizers of Keras that reduce their gradients over all members.

The optimizer becomes one of a subclass that is made for it: `apply` reduces the gradients first.
Its `__class__` is the stock one, so a saved model names that, and loads where there is no sparkdl.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.collectives.transport import Op
from sparkdl.core.errors import ConfigError, RemovedError
from sparkdl.core.patch import Function, Patch
from sparkdl.horovod.common import Average, ProcessSet, global_process_set, op_of
from sparkdl.horovod.common.compression import Compression, Compressor
from sparkdl.horovod.common.operations import Slot, plan
from sparkdl.horovod.common.process_sets import has_peers
from sparkdl.horovod.tensorflow.exchange import outside_of_functions
from sparkdl.horovod.tensorflow.mpi_ops import grouped_allreduce

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced: the arguments of Horovod's optimizers and tapes."""

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
            for indices in plan([Slot(nbytes_of(results[i])) for i in shared]):
                bucket = [shared[index] for index in indices]
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
        compression: `Compression.fp16` for half the bytes.
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


def DistributedOptimizer(  # noqa: N802, PLR0913 (Horovod's name and arguments)
    optimizer: Any,
    name: str | None = None,
    *,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Op | str = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer like this one that reduces gradients over all members.

    Works in `fit`, in `tf.function` and eagerly. A built optimizer keeps its state and shares it
    with the new one.

    Args:
        optimizer: of Keras 3.
        backward_passes_per_step: this many calls add up gradients, and the last one applies them.
            The optimizer's iterations count updates only.
        average_aggregated_gradients: divide the sum by `backward_passes_per_step`.
        compression, sparse_as_dense, op, gradient_predivide_factor, process_set: see
            `DistributedGradientTape`.
        name, use_locking, num_groups, groups, scale_local_gradients: accepted for compatibility
            with Horovod.

    Raises:
        RemovedError: for an optimizer of TensorFlow 1 or of tf_keras.
    """
    how = Reduction(compression, sparse_as_dense, op, gradient_predivide_factor, process_set)
    passes = Passes(backward_passes_per_step, average_aggregated_gradients)
    _check(optimizer)
    if is_distributed(optimizer):
        raise ConfigError(f"{optimizer!r} is a DistributedOptimizer already; wrap it once")
    base = optimizer.__class__

    def apply(self: Any, grads: Iterable[Any], trainable_variables: Any = None) -> None:
        _apply(self, base.apply, grads, trainable_variables)

    members = {
        "apply": apply,
        "__class__": property(lambda self: base),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    kind: Any = type(base.__name__, (base,), members)
    # A built optimizer has variables, which a new one made of its configuration would lack.
    if optimizer.built:
        result: Any = object.__new__(kind)
        vars(result).update(vars(optimizer))
    else:
        result = kind.from_config(optimizer.get_config())
    # Past Keras' `__setattr__`, which tracks what it is given and would save it.
    vars(result)["_sparkdl"] = (how, passes)
    # On GPUs `compile(jit_compile="auto")` would hand the step to XLA, which cannot exchange.
    if objection := _JIT.objection():
        _log.warning("give compile() jit_compile=False on GPUs: %s", objection)
    else:
        _JIT.apply()
    return result


def is_distributed(optimizer: Any) -> bool:
    """Whether an optimizer, or the one within it, came from `DistributedOptimizer`."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return hasattr(optimizer, "_sparkdl") or (inner is not None and is_distributed(inner))


def build(optimizer: Any, variables: list[Any]) -> None:
    """Make an optimizer's variables now, if there are none yet."""
    import keras
    import tensorflow as tf

    # Out of a graph that is being traced, in which variables can be made only once. In the scope
    # that Keras uses, or the variables would have other paths.
    with tf.init_scope(), keras.name_scope(optimizer.name):
        if not optimizer.built:
            optimizer.build(variables)


def _apply(
    self: Any, stock: Function, grads: Iterable[Any], trainable_variables: Any = None
) -> None:
    gradients = list(grads)
    if not gradients or (trainable_variables is None and not self.built):
        stock(self, gradients, trainable_variables)  # nothing to do, or an error
        return
    if trainable_variables is None:
        trainable_variables = self._trainable_variables
    variables, (how, passes) = list(trainable_variables), self._sparkdl
    if passes.count > 1:
        # Before `tf.cond`, in whose branches no variable can be made.
        build(self, variables)
    passes.add(gradients, lambda totals: stock(self, how.reduce(totals), variables))


def _check(optimizer: Any) -> None:
    import keras

    if not isinstance(optimizer, keras.optimizers.Optimizer):
        home = type(optimizer).__module__.partition(".")[0]
        if home in ("tensorflow", "tf_keras"):
            raise RemovedError(
                f"{type(optimizer).__name__} is an optimizer of TensorFlow 1 or of Keras 2: use "
                "one of Keras 3 (without TF_USE_LEGACY_KERAS), or hvd.DistributedGradientTape"
            )
        raise ConfigError(f"{optimizer!r} must be an optimizer of Keras 3")
    if keras.backend.backend() != "tensorflow":
        raise ConfigError(
            f"Keras runs on {keras.backend.backend()}: set KERAS_BACKEND=tensorflow for the "
            "executors (spark.executorEnv.KERAS_BACKEND), or use sparkdl.horovod.torch in a "
            "loop that you write"
        )


def _supports_jit(stock: Function, model: Any) -> bool:
    return not is_distributed(getattr(model, "optimizer", None)) and bool(stock(model))


_JIT = Patch("keras.src.trainers.trainer:model_supports_jit", ("model",), _supports_jit)


class Passes:
    """Adds up gradients, and has them applied once in so many passes.

    Its variables are not saved with the optimizer.
    """

    def __init__(self, count: int, is_mean: bool) -> None:
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"backward_passes_per_step={count!r}: must be a whole number from 1")
        self.count = count
        self._is_mean = is_mean
        self._done: Any = None
        self._sums: list[Any] = []

    def add(self, gradients: Sequence[Any], step: Callable[[list[Any]], Any]) -> None:
        """Add gradients, sparse ones as dense; call `step` with the sums at the last of a step."""
        import tensorflow as tf

        if self.count == 1:
            step(list(gradients))
            return
        there = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
        if self._done is None:
            self._make_variables(there)
        for total, gradient in zip(self._sums, there, strict=True):
            if gradient is not None:
                total.assign_add(gradient)
        self._done.assign_add(1)

        def last() -> Any:
            step([self._total(total) for total in self._sums])
            for total in self._sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            return self._done.assign(0)

        # In the graph, because it is traced once for all passes.
        tf.cond(tf.equal(self._done, self.count), last, self._done.read_value)

    def _make_variables(self, gradients: Sequence[Any]) -> None:
        import tensorflow as tf

        shapes = [None if g is None else (g.shape, g.dtype) for g in gradients]

        def make() -> list[Any]:
            done = tf.Variable(0, trainable=False, dtype=tf.int64)
            zeros = [None if shape is None else tf.zeros(*shape) for shape in shapes]
            sums = [
                None if z is None else tf.Variable(z, trainable=False, name="sparkdl_sum")
                for z in zeros
            ]
            return [done, *sums]

        self._done, *self._sums = outside_of_functions(make)

    def _total(self, total: Any) -> Any:
        import tensorflow as tf

        if total is None or not self._is_mean:
            return None if total is None else tf.convert_to_tensor(total)
        return total / tf.cast(self.count, total.dtype)
