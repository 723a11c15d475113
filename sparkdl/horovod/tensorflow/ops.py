"""Horovod's operations that move tensors of TensorFlow, and their gradients.

Runs in: child

They work eagerly and in `tf.function`, in the order of the program, which must be the same on all
members. Names, arguments and gradients are those of Horovod 0.28.1
(https://horovod.readthedocs.io/en/stable/api.html#module-horovod.tensorflow). `device_dense`,
`device_sparse` and `ignore_name_scope` are accepted and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sparkdl.collectives.base import Op, even_splits
from sparkdl.collectives.tensorflow_errors import tensorflows_too
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common.process_sets import ProcessSet, global_process_set
from sparkdl.horovod.tensorflow.exchange import Exchange, differentiable, exchange_for, with_rows


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows of all members, by rank.

    Args:
        tensor: `[rows, …]`; the rows may differ between members, what follows may not.

    Raises:
        ConfigError: for a scalar.
        CollectiveError: if members are lost, late, or call something else.
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
    exchange = exchange_for(process_set)
    inputs = [with_rows(tf.convert_to_tensor(tensor)) for tensor in tensors]

    def gather(*parts: Any) -> list[Any]:
        return exchange.all_gather(list(parts), name)

    def gradient(*upstream: Any) -> list[Any]:
        means = exchange.all_reduce([tf.convert_to_tensor(g) for g in upstream], Op.AVERAGE)
        rows = tf.stack([tf.shape(part, tf.int64)[0] for part in inputs])
        (counts,) = exchange.all_gather([rows[tf.newaxis]])
        starts = tf.reduce_sum(counts[: exchange.group.rank], 0)
        return [mean[starts[i] : starts[i] + rows[i]] for i, mean in enumerate(means)]

    return differentiable(gather, gradient, inputs)


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

    Raises:
        ConfigError: if no member has that rank.
        CollectiveError: if members are lost, late, or call something else.
    """
    import tensorflow as tf

    exchange = exchange_for(process_set)
    root = root_in(exchange, root_rank)

    def send(value: Any) -> list[Any]:
        return exchange.broadcast([value], root, name)

    def gradient(upstream: Any) -> list[Any]:
        means = exchange.all_reduce([tf.convert_to_tensor(upstream)], Op.AVERAGE)
        return means if exchange.group.rank == root else [tf.zeros_like(means[0])]

    return differentiable(send, gradient, [tf.convert_to_tensor(tensor)])[0]


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

    Raises:
        ConfigError: if the splits do not fit the rows.
        CollectiveError: if members are lost, late, or call something else.
    """
    import tensorflow as tf

    exchange = exchange_for(process_set)
    rows = with_rows(tf.convert_to_tensor(tensor))
    counts = tf.zeros([0], tf.int32) if splits is None else tf.cast(splits, tf.int32)
    if tf.executing_eagerly():
        with tensorflows_too():
            even_splits(int(rows.shape[0]), exchange.group.size, counts.numpy())

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def send(value: Any) -> tuple[Any, Callable[..., Any]]:
        received, got = exchange.all_to_all(value, counts, name)

        def gradient(upstream: Any, _: Any = None) -> Any:
            return exchange.all_to_all(tf.convert_to_tensor(upstream), got)[0]

        return (received, got), gradient

    received, got = send(rows)
    return received if splits is None else (received, got)


def root_in(exchange: Exchange, root_rank: int) -> int:
    """Return the rank within the process set of a rank of the world.

    Raises:
        ConfigError: if it is not in the process set.
    """
    ranks = exchange.group.ranks
    if root_rank not in ranks:
        raise ConfigError(f"root_rank={root_rank} is none of the members {list(ranks)}")
    return ranks.index(root_rank)
