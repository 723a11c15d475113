"""Variables and objects: the same on all members."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sparkdl.horovod.common import ProcessSet, global_process_set
from sparkdl.horovod.common.process_sets import allgather_object, broadcast_object, root_in
from sparkdl.horovod.tensorflow.exchange import broadcast_all, members

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_variables",
]


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
