"""Gradients of several backward passes, added up before they are exchanged.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sparkdl.core.errors import ConfigError


class Passes:
    """Adds up gradients, and has them applied once in so many passes.

    Its variables are nobody's: they are not saved with the optimizer.

    Args:
        count: passes per step.
        is_mean: whether the sum is divided by `count`.

    Raises:
        ConfigError: if `count` is no whole number of 1 or more.
    """

    def __init__(self, count: int, is_mean: bool) -> None:
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"backward_passes_per_step={count!r}: give a whole number from 1")
        self.count = count
        self._is_mean = is_mean
        self._done: Any = None
        self._sums: list[Any] = []

    def add(self, gradients: Sequence[Any], step: Callable[[list[Any]], Any]) -> None:
        """Add gradients; call `step` with the sums if these were the last of a step.

        Args:
            gradients: for the same variables at each call; `None` where there is none. Sparse ones
                are added up as the tensors they stand for.
        """
        import tensorflow as tf

        there = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
        if self._done is None:
            self._begin(there)
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

        tf.cond(tf.equal(self._done, self.count), last, self._done.read_value)

    def _begin(self, gradients: Sequence[Any]) -> None:
        import tensorflow as tf

        shapes = [None if g is None else (g.shape, g.dtype) for g in gradients]
        with tf.init_scope():
            self._done = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._sums = [
                None
                if shape is None
                else tf.Variable(tf.zeros(*shape), trainable=False, name="sparkdl_sum")
                for shape in shapes
            ]

    def _total(self, total: Any) -> Any:
        import tensorflow as tf

        if total is None or not self._is_mean:
            return None if total is None else tf.convert_to_tensor(total)
        return total / tf.cast(self.count, total.dtype)
