"""Batch normalization over the rows of all members.

Runs in: child
"""

from __future__ import annotations

import functools
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common import Sum, global_process_set
from sparkdl.horovod.tensorflow.mpi_ops import allreduce


@functools.cache
def layer_class() -> type[Any]:
    """Return `SyncBatchNormalization`, a layer of `tf.keras`.

    Its moments are those of the rows of all members together, however many each of them has
    (Ioffe and Szegedy, 2015). Arguments are those of `BatchNormalization`.
    """
    import tensorflow as tf

    class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
        """`BatchNormalization` over the rows of all members, which all must call it."""

        def __init__(self, fused: bool = False, **options: Any) -> None:
            if fused is not False:
                raise ConfigError(f"SyncBatchNormalization(fused={fused!r}): must be False")
            super().__init__(**options)
            self.supports_jit = False  # XLA cannot exchange

        def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            mean, variance = super()._moments(inputs, *args, **kwargs)
            if global_process_set.size() == 1:
                return mean, variance
            own = tf.cast(mean, tf.float32)
            square = tf.cast(variance, tf.float32) + tf.square(own)
            # Weighted by rows, because members may have batches of different sizes.
            rows = tf.cast(tf.shape(inputs)[0], tf.float32)
            packed = tf.concat([_flat(own) * rows, _flat(square) * rows, [rows]], 0)
            total = allreduce(packed, op=Sum)
            means, squares = tf.split(total[:-1] / total[-1], 2)
            whole = tf.reshape(means, tf.shape(own))
            spread = tf.reshape(squares, tf.shape(own)) - tf.square(whole)
            # Rounding may make a variance of almost 0 negative.
            return tf.cast(whole, mean.dtype), tf.cast(tf.nn.relu(spread), variance.dtype)

    return SyncBatchNormalization


def _flat(tensor: Any) -> Any:
    import tensorflow as tf

    return tf.reshape(tensor, [-1])


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":
        return layer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
