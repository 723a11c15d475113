"""Horovod's operations on tensors of TensorFlow, and their gradients.

They work eagerly and in `tf.function`, in the order of the program, which must be the same on all
members. Names, arguments and gradients are those of Horovod 0.28.1
(https://horovod.readthedocs.io/en/stable/api.html#module-horovod.tensorflow). `device_dense`,
`device_sparse` and `ignore_name_scope` are accepted and change nothing. All raise `ConfigError` for
tensors that cannot travel or be reduced so, and `CollectiveError` if members are lost, late, or
call something else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from sparkdl.collectives.transport import Op, Reduction
from sparkdl.core.errors import ConfigError, RemovedError
from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.common import basics, group_of
from sparkdl.horovod.common.basics import *  # noqa: F403 (as in Horovod's)
from sparkdl.horovod.common.basics import Average, ProcessSet, global_process_set
from sparkdl.horovod.common.compression import Compression, Compressor, narrowed
from sparkdl.horovod.common.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    Call,
    reduction,
)
from sparkdl.horovod.common.process_sets import (
    allgather_object,
    broadcast_object,
    join_all,
    root_in,
)
from sparkdl.horovod.tensorflow.exchange import (
    broadcast_all,
    members,
    operate,
    tensorflow_errors,
    with_rows,
)

__all__ = [
    *basics.__all__,
    "allgather_object",
    "broadcast_object",
    *("Compression", "allgather", "allreduce", "alltoall", "barrier"),
    *("broadcast", "broadcast_variables"),
    *("grouped_allgather", "grouped_allreduce", "grouped_reducescatter", "join"),
    "reducescatter",
]


__getattr__ = functools.partial(missing_name, __name__)


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows of all members, by rank.

    Args:
        tensor: `[rows, …]`; the rows may differ between members, what follows may not.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return, for each tensor, the rows of all members; see `allgather`."""
    import tensorflow as tf

    if not tensors:
        return []
    inputs = [with_rows(tf.convert_to_tensor(tensor)) for tensor in tensors]
    return operate(Call(ALL_GATHER, process_set, name), inputs)[0]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor of `root_rank`.

    Args:
        tensor: of the same shape and dtype on all members.
        root_rank: in the world, also with a process set.
    """
    import tensorflow as tf

    call = Call(BROADCAST, process_set, name, root=root_rank)
    with tensorflow_errors():
        # Here, because in a graph the errors of `operate` come only when it runs.
        root_in(group_of(process_set), root_rank)
    return operate(call, [tf.convert_to_tensor(tensor)])[0][0]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of the rows to each member.

    Args:
        tensor: `[rows, …]`.
        splits: how many rows each member gets, by rank; by default the same number.

    Returns:
        The rows received, by rank of the sender; with `splits` also how many came from each.
    """
    import tensorflow as tf

    rows, call = with_rows(tf.convert_to_tensor(tensor)), Call(ALL_TO_ALL, process_set, name)
    counts = None if splits is None else tf.cast(splits, tf.int32)
    (received,), got = operate(call, [rows], counts)
    return received if splits is None else (received, tf.cast(got[0], tf.int32))


def allreduce(  # noqa: PLR0913 (Horovod's arguments)
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: Op | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return the tensor reduced over all members, element by element.

    Args:
        tensor: of the same shape and dtype on all members; or `tf.IndexedSlices`, which are
            gathered. Averages of whole numbers in them are floats, as in Horovod.
        average: Horovod's old argument: `True` for Average, `False` for Sum.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor, postscale_factor: the tensor is multiplied by them before and after.
    """
    factors = (prescale_factor, postscale_factor)
    return grouped_allreduce(
        [tensor], average, "", "", compression, op, *factors, process_set, name=name
    )[0]


def grouped_allreduce(  # noqa: PLR0913 (Horovod's arguments)
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: Op | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return the tensors reduced in one exchange; see `allreduce`."""
    import tensorflow as tf

    factors = (prescale_factor, postscale_factor)
    call = reduction(ALL_REDUCE, op, average, name, factors, process_set)
    results = [
        _reduce_slices(call, t) if isinstance(t, tf.IndexedSlices) else None for t in tensors
    ]
    dense = [i for i, result in enumerate(results) if result is None]
    if dense:
        inputs = [_checked(tf.convert_to_tensor(tensors[i]), call.how.op) for i in dense]
        narrow, widened = narrowed(inputs, compression)
        reduced = widened(operate(call, narrow)[0])
        for i, tensor in zip(dense, reduced, strict=True):
            results[i] = tensor
    return results


def reducescatter(  # noqa: PLR0913 (Horovod's arguments)
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: Op | str = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this member's share of the rows of the reduced tensor, by rank.

    Args:
        tensor: `[rows, …]`; if the rows cannot be shared out evenly, the first members get one
            more.
        op: Average (the default), Sum, Min, Max or Product.
    """
    scales = (prescale_factor, postscale_factor)
    return grouped_reducescatter(
        [tensor], device_dense, compression, op, process_set, *scales, name=name
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: Op | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """Return this member's shares of the rows of the reduced tensors; see `reducescatter`."""
    import tensorflow as tf

    if not tensors:
        return []
    factors = (prescale_factor, postscale_factor)
    call = reduction(REDUCE_SCATTER, op, None, name, factors, process_set)
    inputs = [_checked(with_rows(tf.convert_to_tensor(t)), call.how.op) for t in tensors]
    narrow, widened = narrowed(inputs, compression)
    return widened(operate(call, narrow)[0])


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all members have called this; not inside `tf.function`."""
    _not_in_graph("barrier")
    group_of(process_set).barrier()


def join() -> int:
    """Take part with zeros in what the others reduce, until all have called this.

    It cannot be called inside `tf.function`.

    Returns:
        The rank that called it last.
    """
    _not_in_graph("join")
    return join_all()


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Give variables the values that they have on `root_rank`; all travel as one.

    Args:
        variables: of TensorFlow or Keras; the same on all members, in the same order.
        inplace: accepted for Horovod's sake.

    Raises:
        ConfigError: if no member has that rank.
        CollectiveError: if members are lost, late, or have other variables.
    """
    import tensorflow as tf

    targets = list(variables)
    group = members(process_set)
    root_in(group, root_rank)
    if not targets or group.size == 1:
        return
    values = [tf.convert_to_tensor(variable) for variable in targets]
    results = broadcast_all(values, root_rank, process_set)
    for variable, value in zip(targets, results, strict=True):
        variable.assign(value)


def _not_in_graph(what: str) -> None:
    import tensorflow as tf

    if not tf.executing_eagerly():
        raise ConfigError(
            f"hvd.{what}() cannot run inside tf.function, which only traces it: call it outside"
        )


def _reduce_slices(call: Call, slices: Any) -> Any:
    import tensorflow as tf

    if call.how not in (Reduction(Op.AVERAGE), Reduction(Op.SUM)):
        raise RemovedError(
            "tf.IndexedSlices can be summed and averaged, without prescale_factor and "
            "postscale_factor; tf.convert_to_tensor them for anything else (sparse_as_dense=True)"
        )
    gather = Call(ALL_GATHER, call.process_set)
    values, indices = operate(gather, [slices.values, slices.indices])[0]
    if call.how.op is Op.AVERAGE:
        dtype = values.dtype
        if dtype.is_integer:
            # Readers add up rows of the same index, so no row may be rounded before.
            dtype = tf.float32 if dtype.size < tf.int32.size else tf.float64
        # The number of members must not be rounded to a narrow float.
        wide = tf.float32 if dtype.size < tf.float32.size else dtype
        values = tf.cast(tf.cast(values, wide) / call.group.size, dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _checked(tensor: Any, how: Op) -> Any:
    import tensorflow as tf

    if tensor.dtype.is_floating or (tensor.dtype.is_integer and not tensor.dtype.is_quantized):
        return tensor
    raise ConfigError(
        f"tensors of dtype {tensor.dtype.name} cannot be reduced by {how.name.title()}; cast them "
        f"to {tf.int32.name} or {tf.float32.name}"
    )
