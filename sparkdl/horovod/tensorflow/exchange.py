"""How tensors of TensorFlow travel between the members of a process set, eagerly and in graphs.

Runs in: child

Where the members are connected by something else than TensorFlow, tensors travel as arrays of
numpy: in a graph by one `tf.numpy_function` for each exchange. Members must exchange in the same
order, and TensorFlow runs independent operations in any order. So each exchange reads a variable
before it and writes it after it: TensorFlow's automatic control dependencies keep these in the
order of the program, across functions, branches and loops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparkdl.collectives.group import Group, Op
from sparkdl.collectives.tensorflow import (
    Collectives,
    TensorFlowGroup,
    as_tensorflow_error,
    counter,
    tensorflow_errors,
)
from sparkdl.core.codes import Code
from sparkdl.core.errors import CollectiveError, ConfigError, RemovedError
from sparkdl.horovod.common import ProcessSet, group_of

Function = Callable[..., Sequence[np.ndarray]]


class ArrayExchange:
    """What the members of a process set do with tensors, as numpy arrays of their group.

    `collectives.tensorflow.Collectives` does the same by TensorFlow's own operations.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def all_reduce(self, tensors: Sequence[Any], op: Op, name: str | None = None) -> list[Any]:
        """Return the tensors reduced over all members."""

        def work(*arrays: np.ndarray) -> list[np.ndarray]:
            return self.group.all_reduce([np.asarray(array) for array in arrays], op, name)

        return in_turn(work, tensors, [(t.dtype, t.shape) for t in tensors])

    def all_gather(self, tensors: Sequence[Any], name: str | None = None) -> list[Any]:
        """Return, for each tensor, the rows of all members."""

        def work(*arrays: np.ndarray) -> list[np.ndarray]:
            return [self.group.all_gather(np.asarray(array), name) for array in arrays]

        return in_turn(work, tensors, [(t.dtype, any_rows(t)) for t in tensors])

    def broadcast(self, tensors: Sequence[Any], root: int, name: str | None = None) -> list[Any]:
        """Return the tensors of member `root`, a rank within the group; they travel as one."""

        def work(*arrays: np.ndarray) -> list[np.ndarray]:
            parts = [np.asarray(array) for array in arrays]
            flat = np.concatenate([as_bytes(part) for part in parts])
            all_kinds = ", ".join(f"{part.dtype.name} {part.shape}" for part in parts)
            flat = self.group.broadcast(flat, root, f"{name or ''} of {all_kinds}")
            ends = np.cumsum([part.nbytes for part in parts])[:-1]
            return [
                cut.view(part.dtype).reshape(part.shape)
                for cut, part in zip(np.split(flat, ends), parts, strict=True)
            ]

        return in_turn(work, tensors, [(t.dtype, t.shape) for t in tensors])

    def all_to_all(self, tensor: Any, splits: Any, name: str | None = None) -> tuple[Any, Any]:
        """Return the rows received, and how many came from each member."""
        import tensorflow as tf

        def work(array: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
            wanted = np.asarray(counts) if np.size(counts) else None
            rows, got = self.group.all_to_all(np.asarray(array), wanted, name)
            return [rows, got.astype(np.int32)]

        like = [(tensor.dtype, any_rows(tensor)), (tf.int32, tf.TensorShape([self.group.size]))]
        rows, got = in_turn(work, [tensor, splits], like)
        return rows, got

    def reduce_scatter(self, tensors: Sequence[Any], op: Op, name: str | None = None) -> list[Any]:
        """Return, for each tensor, this member's share of its reduced rows."""

        def work(*arrays: np.ndarray) -> list[np.ndarray]:
            return [self.group.reduce_scatter(np.asarray(array), op, name) for array in arrays]

        return in_turn(work, tensors, [(t.dtype, any_rows(t)) for t in tensors])


Exchange = ArrayExchange | Collectives


def exchange_for(process_set: ProcessSet) -> Exchange:
    """Return how tensors travel in a process set: by TensorFlow's own operations, or as arrays.

    Raises:
        NotInitializedError, ConfigError: see `group_of`; an `InvalidArgumentError` as well.
    """
    with tensorflow_errors():
        group = group_of(process_set)
    return group.exchange if isinstance(group, TensorFlowGroup) else ArrayExchange(group)


def in_turn(work: Function, tensors: Sequence[Any], like: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Call `work` with the tensors as arrays, after every earlier exchange of this process.

    Args:
        work: returns one array for each of `like`.
        like: dtype and shape of each result.

    Raises:
        CollectiveError: eagerly; one of TensorFlow's as well, see `tensorflow_errors`.
    """
    import tensorflow as tf

    if tf.executing_eagerly():
        with tensorflow_errors():
            results = work(*[np.asarray(tensor) for tensor in tensors])  # views: `.numpy()` copies
        return [tf.convert_to_tensor(result) for result in results]
    with tf.device("CPU:0"), tf.control_dependencies([turn().read_value()]):
        results = tf.numpy_function(_coded(work), list(tensors), [dtype for dtype, _ in like])
    with tf.control_dependencies(list(results)):
        turn().assign_add(1)
    for result, (_, shape) in zip(results, like, strict=True):
        result.set_shape(shape)
    return list(results)


def _coded(work: Function) -> Function:
    """Have errors say their code: TensorFlow makes text of what is raised inside a graph."""

    def coded(*arrays: np.ndarray) -> Sequence[np.ndarray]:
        try:
            return work(*arrays)
        except CollectiveError as error:
            raise type(error)(f"{Code.COLLECTIVE_FAILED} {error}") from error.__cause__

    return coded


def turn() -> Any:
    """Return the variable that counts the exchanges in graphs: one for the process.

    Raises:
        RemovedError: in graphs of TensorFlow 1.
    """
    import tensorflow as tf

    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise RemovedError(
            "sparkdl.horovod works in TensorFlow 2 only: graphs and sessions of TensorFlow 1 keep "
            "no order of exchanges. Remove tf.compat.v1.disable_eager_execution() and use "
            "tf.function"
        )
    return _turn()


@functools.cache
def _turn() -> Any:
    return counter("CPU:0")


def with_rows(tensor: Any) -> Any:
    """Return the tensor, if it has rows.

    Raises:
        ConfigError: if it is a scalar; an `InvalidArgumentError` as well.
    """
    if tensor.shape.rank == 0:
        scalar = ConfigError("a scalar has no rows to gather or share out; give it the shape [1]")
        raise as_tensorflow_error(scalar)
    return tensor


def any_rows(tensor: Any) -> Any:
    """Return the static shape of `tensor` but for the number of its rows."""
    import tensorflow as tf

    if tensor.shape.rank is None:
        return tf.TensorShape(None)
    return tf.TensorShape([None]).concatenate(tensor.shape[1:])


def as_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array, `[nbytes]`.

    Raises:
        ConfigError: if it is one of strings or objects.
    """
    if array.dtype.hasobject:
        raise ConfigError(f"tensors of dtype {array.dtype} cannot be sent; use broadcast_object")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def differentiable(
    forward: Callable[..., list[Any]], gradient: Callable[..., list[Any]], inputs: Sequence[Any]
) -> list[Any]:
    """Return `forward(*inputs)`; its gradient is what `gradient` makes of the one from above."""
    import tensorflow as tf

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def operation(*tensors: Any) -> tuple[list[Any], Callable[..., list[Any]]]:
        return forward(*tensors), gradient

    return list(operation(*inputs))
