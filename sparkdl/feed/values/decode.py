"""An Arrow array and its codec become the Python values that they were.

Runs in: child. `encode.py` lists the codecs.
"""

from __future__ import annotations

import importlib
from collections import namedtuple
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.feed.values.encode import MISSING, Codec
from sparkdl.feed.values.linalg import factory, matrices
from sparkdl.feed.values.ndarrays import Array, lengths, load, load_ragged, split

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
    if pa.types.is_timestamp(kind) and kind.tz is None:
        instants: list[Any] = array.to_numpy(zero_copy_only=False).astype("M8[us]").tolist()
        return instants
    return list(array.to_pylist())


def _decode_scalars(array: pa.Array, codec: Codec) -> list[Any]:
    return list(load(array, codec.detail))


def _decode_arrays(array: pa.Array, codec: Codec) -> list[Any]:
    if pa.types.is_struct(array.type):
        return [value.copy() for value in load_ragged(array, codec.detail)]
    stacked = load(array, codec.detail)
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
    keys, items = (decode(array.field(i), part) for i, part in enumerate(codec.of))
    return [dict(zip(*pair, strict=True)) for pair in zip(keys, items, strict=True)]


def _decode_rows(array: pa.Array, codec: Codec) -> list[Any]:
    columns = [decode(array.field(i), part) for i, part in enumerate(codec.of)]
    return make_rows(codec.names, columns, len(array))


def _decode_dense(array: pa.Array, codec: Codec) -> list[Any]:
    make = factory(codec.detail, "DenseVector")
    return [make(value) for value in _decode_arrays(array, Codec("ndarray", detail="<f8"))]


def _decode_sparse(array: pa.Array, codec: Codec) -> list[Any]:
    make = factory(codec.detail, "SparseVector")
    parts = (array.field(name).to_pylist() for name in ("size", "indices", "values"))
    return [make(*part) for part in zip(*parts, strict=True)]


def _decode_matrices(array: pa.Array, codec: Codec) -> list[Any]:
    return matrices(array, codec.detail)


def _decode_optional(array: pa.Array, codec: Codec) -> list[Any]:
    values = decode(array.field("value"), codec.of[0])
    there = array.field("there").to_pylist()
    return [value if is_there else MISSING for value, is_there in zip(values, there, strict=True)]


def _decode_union(array: pa.Array, codec: Codec) -> list[Any]:
    members = [decode(array.field(i), part) for i, part in enumerate(codec.of)]
    places = zip(*(part.tolist() for part in union_places(array)), strict=True)
    return [members[member][offset] for member, offset in places]


def union_places(array: pa.Array) -> tuple[Array, Array]:
    """Return for each value of a dense union its member, and where it lies in the member."""
    if not len(array):
        return np.empty(0, np.int8), np.empty(0, np.int32)
    # From the buffers: pyarrow's `type_codes` and `offsets` forget where a slice starts.
    _, type_ids, offsets = array.buffers()[:3]
    window = slice(array.offset, array.offset + len(array))
    return np.frombuffer(type_ids, np.int8)[window], np.frombuffer(offsets, np.int32)[window]


def make_rows(names: tuple[str, ...], columns: list[list[Any]], count: int) -> list[Any]:
    """Return `count` rows with named fields: pyspark's, or named tuples where it is missing."""
    make: Callable[..., Any]
    try:
        make = importlib.import_module("pyspark.sql.types").Row(*names)
    except ImportError:
        named_tuple: Callable[..., Any] = namedtuple  # mypy wants names that are no data
        make = named_tuple("Row", names, rename=True)
    parts: Iterable[Any] = zip(*columns, strict=True) if columns else repeat((), count)
    return [make(*values) for values in parts]


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
    "matrix": _decode_matrices,
    "optional": _decode_optional,
    "union": _decode_union,
}
