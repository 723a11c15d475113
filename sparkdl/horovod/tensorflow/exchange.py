"""The border of TensorFlow: its tensors are lent to a group by DLPack, eagerly and in graphs.

In a graph each exchange is one `tf.py_function`. Members must exchange in the same order, but
TensorFlow runs independent operations in any order. Each exchange therefore reads a variable first
and writes it afterwards. TensorFlow's automatic control dependencies keep these accesses in program
order, across functions, branches and loops. Tensors of GPUs go through the host's memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from sparkdl.collectives.group import Group
from sparkdl.core.errors import (
    CollectiveError,
    ConfigError,
    FrameworkMissingError,
    MismatchError,
    RemovedError,
    SparkdlError,
)
from sparkdl.horovod.common import ProcessSet, group_of
from sparkdl.horovod.common.operations import Call, broadcast_into

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Function = Callable[..., Sequence["torch.Tensor"]]
_ALIGN_NBYTES = 64
"""Eigen's with AVX-512: TensorFlow takes over nothing else."""


def operate(call: Call, tensors: Sequence[Any], splits: Any = None) -> tuple[list[Any], Any]:
    """Return the results of a call of the table, and the counts, int64 `[tensors, members]`.

    Gradients flow back through the results, by the table's rule.

    Args:
        splits: of `ALL_TO_ALL`, a tensor, as they may be known in a graph's run alone.
    """
    import tensorflow as tf

    group = members(call.process_set)
    extra = [] if splits is None else [splits]

    def move(*given: torch.Tensor) -> list[torch.Tensor]:
        import torch

        own = call if splits is None else replace(call, splits=given[-1].tolist())
        results, counts = group.run(lambda: own.forward(group, given[: len(tensors)]))
        # The counts come along as a tensor: in a graph they are known in its run alone.
        return [*results, torch.tensor(counts, dtype=torch.int64)]

    def back(*given: torch.Tensor) -> list[torch.Tensor]:
        return list(call.backward(group, given[:-1], given[-1].tolist()))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def operation(*given: Any) -> tuple[list[Any], Callable[..., list[Any]]]:
        shapes = [t.shape if call.operation.keeps_shape else _any_rows(t) for t in given]
        like = [
            *((t.dtype, shape) for t, shape in zip(given, shapes, strict=True)),
            (tf.int64, None),
        ]
        results = in_turn(move, [*given, *extra], like)

        def gradient(*upstream: Any) -> list[Any]:
            grads = [tf.convert_to_tensor(grad) for grad in upstream[:-1]]
            return in_turn(back, [*grads, results[-1]], [(t.dtype, t.shape) for t in given])

        return results, gradient

    *results, counts = operation(*tensors)
    return results, counts


def broadcast_all(tensors: Sequence[Any], root_rank: int, process_set: ProcessSet) -> list[Any]:
    """Return the tensors of `root_rank`; small ones travel together."""
    group = members(process_set)

    def move(*given: torch.Tensor) -> list[torch.Tensor]:
        copies = [tensor.clone() for tensor in given]
        group.run(lambda: broadcast_into(group, copies, root_rank))
        return copies

    return in_turn(move, tensors, [(tensor.dtype, tensor.shape) for tensor in tensors])


def members(process_set: ProcessSet) -> Group:
    with tensorflow_errors():
        return group_of(process_set)


def in_turn(work: Function, tensors: Sequence[Any], like: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Call `work` with the tensors as PyTorch's, after every earlier exchange of this process.

    Its results, in memory of their own, have the dtypes and shapes of `like`.
    """
    import tensorflow as tf

    for tensor in tensors:
        dtype = tensor.dtype
        if not (dtype.is_numpy_compatible and dtype.size) or dtype.is_quantized:
            wrong = ConfigError(
                f"tensors of dtype {dtype.name} cannot travel; use broadcast_object or "
                "allgather_object"
            )
            raise as_tensorflow_error(wrong)
    if tf.executing_eagerly():
        with tensorflow_errors(), tf.device("CPU:0"):
            # On the CPU, where PyTorch can take the memory over.
            return _moved(work, *map(tf.identity, tensors))
    # The variable is read first and written last: TensorFlow keeps such accesses in program order.
    with tf.device("CPU:0"), tf.control_dependencies([turn().read_value()]):
        moved = functools.partial(_moved, work)
        results = tf.py_function(moved, list(tensors), [dtype for dtype, _ in like])
    with tf.control_dependencies(list(results)):
        turn().assign_add(1)
    for result, (_, shape) in zip(results, like, strict=True):
        # `py_function` loses shapes, which layers need.
        result.set_shape(shape)
    return list(results)


def _moved(work: Function, *tensors: Any) -> list[Any]:
    """Call `work` with PyTorch tensors over the same memory, and convert its results back."""
    import tensorflow as tf

    try:
        from torch import contiguous_format
        from torch.utils.dlpack import from_dlpack, to_dlpack
    except ImportError as error:
        raise FrameworkMissingError(
            "collectives on tensors of TensorFlow need PyTorch, which this node does not have: "
            "pip install torch"
        ) from error
    lent = [from_dlpack(tensor) for tensor in tensors]
    results = []
    for result in work(*lent):
        is_taken = result.is_contiguous() and not result.data_ptr() % _ALIGN_NBYTES
        whole = result if is_taken else result.clone(memory_format=contiguous_format)
        results.append(tf.experimental.dlpack.from_dlpack(to_dlpack(whole)))
    return results


def turn() -> Any:
    """Return the variable that counts the exchanges in graphs: one for the process."""
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
    import tensorflow as tf

    def make() -> Any:
        with tf.device("CPU:0"):
            return tf.Variable(0, trainable=False, dtype=tf.int32, name="sparkdl_exchanges")

    return outside_of_functions(make)


def with_rows(tensor: Any) -> Any:
    if tensor.shape.rank == 0:
        scalar = ConfigError(
            f"a tensor of shape {tensor.shape} has no rows to gather or share out; give it the "
            "shape [1]"
        )
        raise as_tensorflow_error(scalar)
    return tensor


def _any_rows(tensor: Any) -> Any:
    import tensorflow as tf

    if tensor.shape.rank is None:
        return tf.TensorShape(None)
    return tf.TensorShape([None]).concatenate(tensor.shape[1:])


def outside_of_functions(make: Callable[[], T]) -> T:
    """Return the result of `make`, which may create variables at any trace of a `tf.function`.

    `tf.init_scope` leaves the graph of a function but not its variable creator, and that refuses
    variables from the second trace on. Both belong to a thread, so another thread has neither.
    """
    import tensorflow as tf

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def made() -> T:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(make).result()

    result: T = made()
    return result


@contextmanager
def tensorflow_errors() -> Iterator[None]:
    """Turn `CollectiveError` and `ConfigError` inside into errors that are TensorFlow's as well.

    As in Horovod: `FailedPreconditionError` if members' calls differ, `InvalidArgumentError` for
    invalid arguments, `UnknownError` for lost members.
    """
    try:
        yield
    except (CollectiveError, ConfigError) as error:
        raise as_tensorflow_error(error) from error.__cause__


def as_tensorflow_error(error: SparkdlError) -> SparkdlError:
    """Return the error as one that is TensorFlow's as well; itself if it is already."""
    import tensorflow as tf

    is_both = isinstance(error, tf.errors.OpError)
    return error if is_both else _made(type(error), str(error))


def _made(kind: Any, message: str) -> SparkdlError:
    made: SparkdlError = _both(kind)(None, None, message)
    return made


@functools.cache
def _both(kind: Any) -> Any:
    import tensorflow as tf

    theirs: Any = tf.errors.UnknownError
    if issubclass(kind, ConfigError):
        theirs = tf.errors.InvalidArgumentError
    elif issubclass(kind, MismatchError):
        theirs = tf.errors.FailedPreconditionError

    # With these arguments AutoGraph can recreate an error with its place in the source.
    def __init__(self: Any, node_def: Any, op: Any, message: str, *args: Any) -> None:  # noqa: N807
        theirs.__init__(self, node_def, op, message, *args)

    def __reduce__(self: Any) -> Any:  # noqa: N807
        return _made, (kind, self.message)

    members = {"__init__": __init__, "__reduce__": __reduce__, "__module__": kind.__module__}
    return type(kind.__name__, (kind, theirs), members | {"__doc__": kind.__doc__})
