"""Variables and objects on their way to all members.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sparkdl.core.errors import ConfigError, RemovedError
from sparkdl.horovod.common.basics import local_rank, local_size, rank
from sparkdl.horovod.common.process_sets import (
    ProcessSet,
    global_process_set,
    group_of,
    process_set_by_id,
)
from sparkdl.horovod.tensorflow.exchange import exchange_for
from sparkdl.horovod.tensorflow.ops import root_in


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
    exchange = exchange_for(process_set)
    root = root_in(exchange, root_rank)
    if not targets or exchange.group.size == 1:
        return
    values = [tf.convert_to_tensor(variable) for variable in targets]
    results = exchange.broadcast(values, root, "variables")
    for variable, value in zip(targets, results, strict=True):
        variable.assign(value)


def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Give variables the values of `root_rank`, see `broadcast_variables`; return the values."""
    import tensorflow as tf

    targets = list(variables)
    broadcast_variables(targets, root_rank, process_set)
    return [tf.convert_to_tensor(variable) for variable in targets]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of `root_rank`; anything that can be pickled.

    Raises:
        ConfigError: if no member has that rank.
        CollectiveError: if members are lost or late.
    """
    _no_session(session)
    exchange = exchange_for(process_set)
    return exchange.group.broadcast_object(obj, root_in(exchange, root_rank), name)


def broadcast_object_fn(
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return `broadcast_object` without its other arguments."""
    _no_session(session)
    return lambda obj: broadcast_object(obj, root_rank, None, name, process_set)


def allgather_object(
    obj: Any,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all members by rank; anything that can be pickled.

    Raises:
        CollectiveError: if members are lost or late.
    """
    _no_session(session)
    return group_of(process_set).all_gather_object(obj, name)


def rank_op(name: str | None = None) -> Any:
    """Return `rank()` as a tensor, int32."""
    import tensorflow as tf

    return tf.constant(rank(), tf.int32)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of members of a process set as a tensor, int32."""
    import tensorflow as tf

    return tf.constant(process_set_by_id(process_set_id).size(), tf.int32)


def local_rank_op(name: str | None = None) -> Any:
    """Return `local_rank()` as a tensor, int32."""
    import tensorflow as tf

    return tf.constant(local_rank(), tf.int32)


def local_size_op(name: str | None = None) -> Any:
    """Return `local_size()` as a tensor, int32."""
    import tensorflow as tf

    return tf.constant(local_size(), tf.int32)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return whether this process is in a process set as a tensor, int32, 1 or 0."""
    import tensorflow as tf

    return tf.constant(int(process_set_by_id(process_set_id).included()), tf.int32)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all members have called this. Not for graphs.

    Raises:
        ConfigError: inside `tf.function`.
        CollectiveError: if members are lost or late.
    """
    _not_in_graph("barrier")
    group_of(process_set).barrier()


def join() -> int:
    """Take part with zeros in what the others reduce, until all have called this.

    Returns:
        The rank that called it last.

    Raises:
        ConfigError: inside `tf.function`.
        CollectiveError: if members are lost or late.
    """
    _not_in_graph("join")
    return group_of(global_process_set).join()


def _not_in_graph(what: str) -> None:
    import tensorflow as tf

    if not tf.executing_eagerly():
        raise ConfigError(
            f"hvd.{what}() waits when it is called, and tf.function only traces it: call it outside"
        )


def _no_session(session: Any) -> None:
    if session is not None:
        raise RemovedError(
            "sessions are TensorFlow 1's, and sparkdl.horovod works in TensorFlow 2 only: leave "
            "session out"
        )


def broadcast_global_variables(root_rank: int) -> None:
    """Raise: there are no global variables in TensorFlow 2.

    Raises:
        RemovedError: always.
    """
    raise RemovedError(
        "hvd.broadcast_global_variables is for TensorFlow 1: call hvd.broadcast_variables("
        "model.variables, root_rank=0) instead"
    )
