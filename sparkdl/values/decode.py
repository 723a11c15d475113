"""Arrow arrays become Python values: those of an RDD by their codecs, a DataFrame's as `df.rdd`'s.

Runs in: child. `encode.py` lists the codecs.
"""

from __future__ import annotations

import importlib
from collections import namedtuple
from collections.abc import Callable, Iterable
from datetime import datetime
from decimal import Decimal
from functools import partial
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import FeedTypeError
from sparkdl.values.encode import Codec
from sparkdl.values.ndarrays import (
    NO_MATRICES,
    Array,
    is_matrix,
    is_vector,
    lengths,
    load,
    load_ragged,
    split,
    to_array,
    vectors,
)

_TAGGED = {  # what Spark puts in the metadata of a struct's field: pyspark's class, its arguments
    b"variant": ("VariantVal", ("value", "metadata")),
    b"geometry": ("Geometry", ("wkb", "srid")),
    b"geography": ("Geography", ("wkb", "srid")),
}


def decode(array: pa.Array, codec: Codec) -> list[Any]:
    """Return the values that `encode` was given; numpy arrays among them are writable copies."""
    return _DECODERS[codec.name](array, codec)


def plain_values(array: pa.Array) -> list[Any]:
    """Return the values of a primitive array as Python objects, None where null."""
    kind = array.type
    if _is_number(kind) and not array.null_count:
        values: list[Any] = array.to_numpy(zero_copy_only=False).tolist()  # quicker than to_pylist
        return values
    if pa.types.is_timestamp(kind) and kind.tz is None:
        instants: list[Any] = array.to_numpy(zero_copy_only=False).astype("M8[us]").tolist()
        return instants
    return list(array.to_pylist())


def _decode_arrays(array: pa.Array, codec: Codec) -> list[Any]:
    if pa.types.is_struct(array.type):
        return [value.copy() for value in load_ragged(array, codec.detail)]
    stacked = load(array, codec.detail)
    # Copies, because views would keep the whole batch in memory and are read-only.
    return [np.array(value, stacked.dtype) for value in stacked]


def _decode_by(kind: Callable[[Any], Any], array: pa.Array, _codec: Codec) -> list[Any]:
    return [None if value is None else kind(value) for value in plain_values(array)]


def _decode_lists(array: pa.Array, codec: Codec) -> list[Any]:
    values = split(decode(array.flatten(), codec.of[0]), lengths(array))
    return values if codec.name == "list" else list(map(tuple, values))


def _decode_dicts(array: pa.Array, codec: Codec) -> list[Any]:
    keys, items = (decode(array.field(i), part) for i, part in enumerate(codec.of))
    return [dict(zip(*pair, strict=True)) for pair in zip(keys, items, strict=True)]


def _decode_rows(array: pa.Array, codec: Codec) -> list[Any]:
    columns = [decode(array.field(i), part) for i, part in enumerate(codec.of)]
    return make_rows(codec.names, columns, len(array))


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
        for name in ("bool", "int", "float", "str", "bytes", "date", "datetime")
    },
    "bytearray": partial(_decode_by, bytearray),
    "decimal": partial(_decode_by, Decimal),
    "scalar": lambda array, codec: list(load(array, codec.detail)),
    "ndarray": _decode_arrays,
    "list": _decode_lists,
    "tuple": _decode_lists,
    "dict": _decode_dicts,
    "row": _decode_rows,
    "vector": lambda array, codec: vectors(array, codec.detail),
    "union": _decode_union,
}


def frame_rows(batch: pa.RecordBatch) -> list[Any]:
    """Return the rows of `batch` as pyspark Rows.

    With any version of Spark, binary comes as bytes, a struct as Row, a map as dict, and a Spark ML
    vector as itself. A variant or geometry comes as pyspark's class, a timestamp as naive
    datetime in the process's time zone. A value of a user-defined type other than Spark ML's comes
    as it is stored, because Arrow carries no more.
    """
    names = tuple(batch.schema.names)
    return make_rows(names, [_values(column) for column in batch.columns], batch.num_rows)


def _is_number(kind: pa.DataType) -> bool:
    """Return whether `kind` is of integers, floats or booleans."""
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def is_list(kind: pa.DataType) -> bool:
    """Return whether `kind` is one of Arrow's list types."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def tagged(kind: pa.DataType) -> tuple[str, tuple[str, str]] | None:
    """Return the pyspark class that a struct represents, with its fields; `None` if it is none."""
    if not pa.types.is_struct(kind):
        return None
    found = [_TAGGED[tag] for field in kind for tag in field.metadata or {} if tag in _TAGGED]
    return found[0] if found and {field.name for field in kind} == set(found[0][1]) else None


def _values(column: pa.Array) -> list[Any]:
    kind = column.type
    if column.null_count and pa.types.is_nested(kind):
        # The buffers below a nested null hold anything, so only the others are decoded.
        present = iter(_values(column.drop_null()))
        return [next(present) if is_valid else None for is_valid in column.is_valid().to_pylist()]
    if is_vector(kind):
        return vectors(column)
    if is_matrix(kind):
        raise FeedTypeError(f"a column {NO_MATRICES}")
    tag = tagged(kind)
    if tag is not None:
        make = getattr(importlib.import_module("pyspark.sql.types"), tag[0])
        return list(map(make, *(column.field(part).to_pylist() for part in tag[1])))
    if pa.types.is_struct(kind):
        fields = [_values(column.field(i)) for i in range(kind.num_fields)]
        return make_rows(tuple(field.name for field in kind), fields, len(column))
    if pa.types.is_map(kind):
        return _maps(column)
    if is_list(kind):
        return _lists(column.flatten(), lengths(column))
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        # By way of integers: `to_pylist` would need the zone's data, and give aware datetimes.
        instants = plain_values(column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()))
        return [None if us is None else _local(us) for us in instants]
    return plain_values(column)


def _lists(flat: pa.Array, counts: Array) -> list[Any]:
    """Return lists of `counts` values each."""
    is_even = len(counts) > 0 and counts[0] > 0 and (counts == counts[0]).all()
    if is_even and _is_number(flat.type) and not flat.null_count:
        # The lists are made with the numbers in them: a third less work than to cut one list.
        table: list[Any] = to_array(flat).reshape(len(counts), -1).tolist()
        return table
    return split(_values(flat), counts)


def _maps(column: pa.Array) -> list[Any]:
    ends = column.offsets.to_pylist()  # into all of keys and items, also where this is a slice
    count = ends[-1] - ends[0] if ends else 0
    parts = (_values(part.slice(ends[0], count)) for part in (column.keys, column.items))
    entries = list(zip(*parts, strict=True))
    return [dict(entries[start - ends[0] : stop - ends[0]]) for start, stop in pairwise(ends)]


def _local(us: int) -> datetime:
    # As pyspark converts: a float of seconds would round the microseconds.
    return datetime.fromtimestamp(us // 1_000_000).replace(microsecond=us % 1_000_000)
