"""Variables and objects on their way to all members.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sparkdl.core.errors import RemovedError
from sparkdl.horovod.common import ProcessSet, global_process_set, group_of, rank
from sparkdl.horovod.tensorflow.exchange import exchange_of
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
    exchange = exchange_of(group_of(process_set))
    root = root_in(exchange, root_rank)
    if not targets or exchange.group.size == 1:
        return
    values = [tf.convert_to_tensor(variable) for variable in targets]
    name = "broadcast_variables of " + ", ".join(f"{v.dtype.name}{v.shape}" for v in values)
    results = exchange.broadcast(values, root, name[:1000])
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
    exchange = exchange_of(group_of(process_set))
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

    from sparkdl.horovod.common import process_set_of

    return tf.constant(group_of(process_set_of(process_set_id)).size, tf.int32)


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
