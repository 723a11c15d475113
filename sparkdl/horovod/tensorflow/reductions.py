"""Horovod's operations that reduce tensors of TensorFlow, and their gradients.

Runs in: child

See `ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkdl.collectives.base import Op
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common.basics import op_of
from sparkdl.horovod.common.process_sets import ProcessSet, global_process_set
from sparkdl.horovod.tensorflow.compression import Compression, Compressor
from sparkdl.horovod.tensorflow.exchange import Exchange, differentiable, exchange_for, with_rows


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
            gathered.
        average: Horovod's old argument: `True` for Average, `False` for Sum.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor, postscale_factor: the tensor is multiplied by them before and after.

    Raises:
        ConfigError: if the tensor cannot be reduced so.
        CollectiveError: if members are lost, late, or call something else.
    """
    return grouped_allreduce(
        [tensor],
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        name=name,
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

    how = op_of(op, average)
    exchange = exchange_for(process_set)
    factors = (prescale_factor, postscale_factor)
    results = [
        _reduce_slices(exchange, t, how, factors) if isinstance(t, tf.IndexedSlices) else None
        for t in tensors
    ]
    dense = [i for i, result in enumerate(results) if result is None]
    if dense:
        packed = [compression.compress(tf.convert_to_tensor(tensors[i])) for i in dense]
        reduced = _reduce(exchange, [tensor for tensor, _ in packed], how, factors, name)
        for i, tensor, (_, ctx) in zip(dense, reduced, packed, strict=True):
            results[i] = compression.decompress(tensor, ctx)
    return results


def reducescatter(  # noqa: PLR0913 (Horovod's arguments)
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: Op | str | None = None,
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

    Raises:
        ConfigError: if the tensor cannot be reduced so.
        CollectiveError: if members are lost, late, or call something else.
    """
    scales = (prescale_factor, postscale_factor)
    return grouped_reducescatter(
        [tensor], device_dense, compression, op, process_set, *scales, name=name
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: Op | str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """Return this member's shares of the rows of the reduced tensors; see `reducescatter`."""
    import tensorflow as tf

    if not tensors:
        return []
    exchange, how = exchange_for(process_set), op_of(op)

    def scatter(*inputs: Any) -> list[Any]:
        scaled = [_scaled(_checked(tensor, how), prescale_factor) for tensor in inputs]
        shares = exchange.reduce_scatter(scaled, how, name)
        return [_scaled(share, postscale_factor) for share in shares]

    def gradient(*upstream: Any) -> list[Any]:
        _must_be_linear(how, "reducescatter")
        factor = prescale_factor * postscale_factor
        factor *= exchange.group.size if how is Op.SUM else 1.0  # as Horovod's
        return exchange.all_gather([_scaled(tf.convert_to_tensor(g), factor) for g in upstream])

    packed = [compression.compress(with_rows(tf.convert_to_tensor(t))) for t in tensors]
    shares = differentiable(scatter, gradient, [tensor for tensor, _ in packed])
    pairs = zip(shares, packed, strict=True)
    return [compression.decompress(share, ctx) for share, (_, ctx) in pairs]


def _reduce(
    exchange: Exchange,
    tensors: Sequence[Any],
    how: Op,
    factors: tuple[float, float],
    name: str | None = None,
) -> list[Any]:
    import tensorflow as tf

    before, after = factors

    def reduce(*inputs: Any) -> list[Any]:
        scaled = [_scaled(_checked(tensor, how), before) for tensor in inputs]
        return [_scaled(tensor, after) for tensor in exchange.all_reduce(scaled, how, name)]

    def gradient(*upstream: Any) -> list[Any]:
        _must_be_linear(how, "allreduce")
        return reduce(*[tf.convert_to_tensor(g) for g in upstream])

    return differentiable(reduce, gradient, tensors)


def _reduce_slices(exchange: Exchange, slices: Any, how: Op, factors: tuple[float, float]) -> Any:
    import tensorflow as tf

    if how not in (Op.AVERAGE, Op.SUM) or factors != (1.0, 1.0):
        raise ConfigError(
            "tf.IndexedSlices can be summed and averaged, without prescale_factor and "
            "postscale_factor; tf.convert_to_tensor them for anything else (sparse_as_dense=True)"
        )
    values, indices = exchange.all_gather([slices.values, slices.indices])
    if how is Op.AVERAGE:
        values = _scaled(values, 1 / exchange.group.size)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _must_be_linear(how: Op, what: str) -> None:
    if how not in (Op.AVERAGE, Op.SUM):
        raise ConfigError(f"{what} with op={how.name.title()} has no gradient: use Sum or Average")


def _checked(tensor: Any, how: Op) -> Any:
    import tensorflow as tf

    if tensor.dtype.is_floating or (tensor.dtype.is_integer and not tensor.dtype.is_quantized):
        return tensor
    raise ConfigError(
        f"tensors of dtype {tensor.dtype.name} cannot be reduced by {how.name.title()}; cast them "
        f"to {tf.int32.name} or {tf.float32.name}"
    )


def _scaled(tensor: Any, factor: float) -> Any:
    """Return the tensor times `factor`; whole numbers are rounded towards zero."""
    import tensorflow as tf

    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating:
        return tensor * tf.cast(factor, tensor.dtype)
    return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)
