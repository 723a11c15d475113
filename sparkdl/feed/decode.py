"""An Arrow array and its codec become the Python values that they were.

Runs in: child. `encode.py` lists the codecs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import ProtocolError
from sparkdl.feed.encode import VECTOR_MODULES, Codec, is_native

_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)


def decode(array: pa.Array, codec: Codec) -> list[Any]:
    """Return the values that `encode` was given; numpy arrays among them are writable copies."""
    return _DECODERS[codec.name](array, codec)


def plain_values(array: pa.Array) -> list[Any]:
    """Return the values of a primitive array as Python objects, None where null."""
    kind = array.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if is_number and not array.null_count:
        values: list[Any] = array.to_numpy(zero_copy_only=False).tolist()  # quicker than to_pylist
        return values
    return list(array.to_pylist())


def lengths(array: pa.Array) -> np.ndarray[Any, Any]:
    """Return how many elements each list of `array` has, 0 for a null; int64 [rows]."""
    if pa.types.is_fixed_size_list(array.type):
        return np.full(len(array), array.type.list_size, np.int64)
    counts = array.value_lengths()
    return np.asarray(counts.fill_null(0) if counts.null_count else counts).astype(np.int64)


def split(flat: Any, counts: np.ndarray[Any, Any]) -> list[Any]:
    """Cut a sequence into consecutive pieces of `counts` elements each."""
    ends = [0, *np.cumsum(counts).tolist()]
    return [flat[start:stop] for start, stop in pairwise(ends)]


def load_tensor(array: pa.Array, dtype: str = "") -> np.ndarray[Any, Any]:
    """Return fixed-size lists, nested to any depth, as one array [rows, *shape] without a copy.

    Args:
        array: no nulls; primitive values innermost.
        dtype: the codec's name for what the array was; "" for what Arrow has. Booleans are bits in
            Arrow: they alone are copied.
    """
    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
    return _typed(array.to_numpy(zero_copy_only=False).reshape(shape), dtype)


def load_ragged(array: pa.Array, dtype: str) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of a struct<shape, data>, without a copy."""
    data = array.field("data")
    flat = split(load_tensor(data.flatten()), lengths(data))
    shapes = array.field("shape").to_pylist()
    return [
        _typed(values.reshape(shape), dtype) for values, shape in zip(flat, shapes, strict=True)
    ]


def _typed(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Give arrays that travelled as bytes, uint8 [*shape, itemsize], their dtype back."""
    if not dtype or is_native(np.dtype(dtype)):
        return array
    itemsize = array.shape[-1]
    if dtype[1] in "SU":
        dtype += str(itemsize // (4 if dtype[1] == "U" else 1))
    if 0 in array.shape:
        return np.empty(array.shape[:-1], dtype)
    return np.ascontiguousarray(array).view(dtype)[..., 0]


def _decode_scalars(array: pa.Array, codec: Codec) -> list[Any]:
    return list(load_tensor(array, codec.detail))


def _decode_arrays(array: pa.Array, codec: Codec) -> list[Any]:
    if pa.types.is_struct(array.type):
        return [value.copy() for value in load_ragged(array, codec.detail)]
    stacked = load_tensor(array, codec.detail)
    return [np.array(value, stacked.dtype) for value in stacked]


def _decode_datetimes(array: pa.Array, codec: Codec) -> list[Any]:
    if not codec.detail:
        return plain_values(array)
    offset = timedelta(microseconds=int(codec.detail))
    zone = timezone(offset)
    return [
        None if us is None else (_EPOCH + (us * _MICROSECOND + offset)).replace(tzinfo=zone)
        for us in plain_values(array.cast(pa.int64()))
    ]


def _decode_text(kind: Callable[[Any], Any], array: pa.Array, _codec: Codec) -> list[Any]:
    return list(map(kind, plain_values(array)))


def _decode_bytearrays(array: pa.Array, _codec: Codec) -> list[Any]:
    return [None if value is None else bytearray(value) for value in plain_values(array)]


def _decode_lists(array: pa.Array, codec: Codec) -> list[Any]:
    values = split(decode(array.flatten(), codec.of[0]), lengths(array))
    return values if codec.name == "list" else list(map(tuple, values))


def _decode_dicts(array: pa.Array, codec: Codec) -> list[Any]:
    keys, items = (
        _decode_lists(array.field(i), Codec("list", (part,))) for i, part in enumerate(codec.of)
    )
    return [dict(zip(*pair, strict=True)) for pair in zip(keys, items, strict=True)]


def _decode_rows(array: pa.Array, codec: Codec) -> list[Any]:
    columns = [decode(array.field(i), part) for i, part in enumerate(codec.of)]
    return make_rows(codec.names, columns)


def _decode_dense(array: pa.Array, codec: Codec) -> list[Any]:
    make = vectors(codec.detail).dense
    return [make(value) for value in decode(array, codec.of[0])]


def _decode_sparse(array: pa.Array, codec: Codec) -> list[Any]:
    make = vectors(codec.detail).sparse
    parts = (array.field(name).to_pylist() for name in ("size", "indices", "values"))
    return [make(*part) for part in zip(*parts, strict=True)]


def _decode_union(array: pa.Array, codec: Codec) -> list[Any]:
    members = [decode(array.field(i), part) for i, part in enumerate(codec.of)]
    places = zip(array.type_codes.to_pylist(), array.offsets.to_pylist(), strict=True)
    return [members[member][offset] for member, offset in places]


def make_rows(names: tuple[str, ...], columns: list[list[Any]]) -> list[Any]:
    """Return rows with named fields: pyspark's Row, or a named tuple where pyspark is missing."""
    try:
        row = importlib.import_module("pyspark.sql.types").Row(*names)
    except ImportError:
        from collections import namedtuple

        row = namedtuple("Row", names, rename=True)  # noqa: PYI024  # the names are data
    return [row(*values) for values in zip(*columns, strict=True)]


def vectors(module: str) -> Any:
    """Return the `Vectors` factory of one of pyspark's two linalg modules."""
    if module not in VECTOR_MODULES:
        raise ProtocolError(f"a feed's batch names {module!r} as the home of its vectors")
    return importlib.import_module(module).Vectors


_DECODERS: dict[str, Callable[[pa.Array, Codec], list[Any]]] = {
    "null": lambda array, _codec: [None] * len(array),
    **{
        name: lambda array, _codec: plain_values(array)
        for name in ("bool", "int", "float", "str", "bytes", "date", "timedelta")
    },
    "bytearray": _decode_bytearrays,
    "decimal": partial(_decode_text, Decimal),
    "npstr": partial(_decode_text, np.str_),
    "npbytes": partial(_decode_text, np.bytes_),
    "datetime": _decode_datetimes,
    "scalar": _decode_scalars,
    "ndarray": _decode_arrays,
    "list": _decode_lists,
    "tuple": _decode_lists,
    "dict": _decode_dicts,
    "row": _decode_rows,
    "dense": _decode_dense,
    "sparse": _decode_sparse,
    "union": _decode_union,
}
