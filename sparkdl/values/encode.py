"""A column of Python values becomes one Arrow array, and a codec by which it can come back.

`encode` looks at all values of a column at once and picks a codec; codecs nest:

    bool int float str bytes     Arrow's own type, with nulls where values are None; null if all are
    bytearray date datetime      likewise, datetimes without a time zone
    decimal                      text
    scalar, ndarray              numpy's: primitives, fixed-size lists, ...: `ndarrays.py`
    list, tuple                  Arrow list of the encoded elements
    dict                         struct<keys, values> of two lists
    row, vector                  pyspark's Row with names: struct; its vectors
    union                        dense union: the values are of several of these kinds
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from itertools import chain, compress
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from sparkdl.core.errors import FeedTypeError
from sparkdl.values.ndarrays import (
    INT32_MAX,
    MODULES,
    dtype_name,
    store,
    store_lists,
    store_scalars,
    store_vectors,
)

_NATIVE: dict[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    bytearray: pa.binary(),
    date: pa.date32(),
    datetime: pa.timestamp("us"),
}
_Key = tuple[str, Hashable]
_BY_TYPE: dict[type, str] = {kind: kind.__name__ for kind in _NATIVE} | {
    NoneType: "null",
    list: "list",
    tuple: "tuple",
    dict: "dict",
    Decimal: "decimal",
    np.ndarray: "ndarray",
}
_KEYS: dict[type, _Key] = {
    kind: (name, None) for kind, name in _BY_TYPE.items() if name != "ndarray"
} | {dtype.type: ("scalar", dtype.str) for dtype in map(np.dtype, "?bBhHiIlLqQefdgFD")}
"""The result of `_key` for types that determine it alone, whatever the value."""
_BY_BASE = {np.generic: "scalar", tuple: "tuple", list: "list", dict: "dict"}
_VECTORS = ("DenseVector", "SparseVector")
_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
# A character of UTF-8 has four bytes at most: an upper bound without encoding the text.
_UTF8_MAX_NBYTES = 4
# Arrow's type ids are signed bytes.
_MAX_UNION = 127


class Codec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The Python type of the values of an Arrow array.

    Attributes:
        name: one of the names in this module's docstring.
        of: the codecs of the parts: element; key and value; fields; members.
        detail: numpy dtype; a vector's module.
        names: the fields of a Row.
    """

    name: str
    of: tuple[Codec, ...] = ()
    detail: str = ""
    names: tuple[str, ...] = ()


Encoded = tuple[pa.Array, Codec]


def encode(values: Sequence[Any], where: str) -> Encoded:
    """Return `values` as one Arrow array of the same length, and how to turn them back.

    Args:
        values: the values of one column, of any mix of kinds.
        where: names the column in errors.

    Raises:
        FeedTypeError: if a value is of a type that cannot travel.
    """
    types = set(map(type, values))
    kinds = types - {NoneType}
    if not kinds:
        return pa.nulls(len(values)), Codec("null")
    kind = next(iter(kinds))
    # The common case first: Arrow converts a column of one plain type by itself.
    if len(kinds) == 1 and kind in _NATIVE:
        return _encode_native(values, kind, where)
    if types <= _KEYS.keys():
        keys = [_KEYS[kind] for kind in (map(type, values) if len(types) > 1 else types)]
    else:
        keys = [_key(value, where) for value in values]
    members = list(dict.fromkeys(keys))
    name, detail = next(member for member in members if member[0] != "null")
    if len(members) > 1:  # None as well: only the native types above share their column with it
        return _encode_union(values, keys, members, where)
    return _ENCODERS[name](values, detail, where)


def row_fields(value: Any) -> tuple[str, ...] | None:
    """Return the names of a pyspark Row's fields; None if it is no Row or has no names."""
    if type(value).__name__ != "Row" or not isinstance(value, tuple):
        return None
    return tuple(map(str, getattr(value, "__fields__", ()))) or None


def _key(value: Any, where: str) -> _Key:
    """Return the codec's name and what values must share, beside it, to be in one array."""
    kind = type(value)
    name = _BY_TYPE.get(kind)
    if name is None:
        name = next((name for base, name in _BY_BASE.items() if isinstance(value, base)), None)
        fields = row_fields(value)
        if fields:
            return "row", fields
        if kind.__module__ in MODULES and kind.__name__ in _VECTORS:
            return "vector", kind.__module__
    if name in ("ndarray", "scalar"):
        return name, _dtype_detail(value.dtype, where)
    if name is None:
        raise FeedTypeError(
            f"{where} holds a {kind.__module__}.{kind.__qualname__}, which cannot travel in a "
            "feed. Convert it before feeding, for example in rdd.map, to numbers, str, bytes, "
            "numpy arrays, or lists, tuples or dicts of these"
        )
    return name, None


def _dtype_detail(dtype: np.dtype[Any], where: str) -> str:
    name = dtype_name(dtype)
    if name is None:
        raise FeedTypeError(
            f"{where} holds a numpy value of dtype {dtype}, which cannot travel in a feed. "
            "Convert it before feeding: to a plain dtype with .astype(...), or to lists with "
            ".tolist()"
        )
    return name


def _encode_native(values: Sequence[Any], kind: type, where: str) -> Encoded:
    native = _NATIVE[kind]
    if native in _LARGE:
        # Beyond 2 GiB 32-bit offsets do not reach, and Arrow would split the array.
        nbytes = sum(map(len, filter(None, values))) * (_UTF8_MAX_NBYTES if kind is str else 1)
        native = _LARGE[native] if nbytes > INT32_MAX else native
    if kind is datetime and any(value.tzinfo for value in values if value is not None):
        raise FeedTypeError(
            f"{where} holds a datetime with a time zone, which cannot travel in a feed. Convert it "
            "before feeding: to UTC without a zone, or to a number by .timestamp()"
        )
    try:
        return pa.array(values, native), Codec(kind.__name__)
    except (OverflowError, pa.ArrowException) as error:
        hint = "Split it into smaller values"
        if kind is int:
            hint = "Integers are 64 bits in a feed: feed it as float or str"
        raise FeedTypeError(f"{where} holds a {kind.__name__} too large: {error}. {hint}") from None
    except UnicodeEncodeError as error:
        raise FeedTypeError(
            f"{where} holds a str that is not valid Unicode: {error}. Feed it as bytes, or "
            "replace what is not Unicode: text.encode(errors='replace')"
        ) from None


def _encode_decimals(values: Sequence[Any], _: Any, where: str) -> Encoded:
    return _encode_native(list(map(str, values)), str, where)[0], Codec("decimal")


def _encode_lists(name: str, values: Sequence[Any], _detail: Any, where: str) -> Encoded:
    counts = list(map(len, values))
    array, element = encode(list(chain.from_iterable(values)), where)
    return store_lists(counts, array), Codec(name, (element,))


def _encode_dicts(values: Sequence[Any], _detail: Any, where: str) -> Encoded:
    keys, key = _encode_lists("list", values, None, where)
    items, item = _encode_lists("list", [list(value.values()) for value in values], None, where)
    array = pa.StructArray.from_arrays([keys, items], names=["keys", "values"])
    return array, Codec("dict", (key, item))


def _encode_rows(values: Sequence[Any], fields: Any, where: str) -> Encoded:
    columns = zip(*values, strict=True)
    parts = [encode(c, f"{where}.{field}") for c, field in zip(columns, fields, strict=True)]
    array = pa.StructArray.from_arrays([array for array, _ in parts], names=list(fields))
    return array, Codec("row", tuple(codec for _, codec in parts), names=fields)


def _encode_by(
    store: Callable[[Sequence[Any], Any], pa.Array],
    name: str,
    values: Sequence[Any],
    detail: Any,
    _where: str,
) -> Encoded:
    return store(values, detail), Codec(name, detail=detail)


def _encode_union(
    values: Sequence[Any], keys: Sequence[_Key], members: Sequence[_Key], where: str
) -> Encoded:
    if len(members) > _MAX_UNION:
        raise FeedTypeError(
            f"{where} holds values of {len(members)} types within one batch, and at most "
            f"{_MAX_UNION} can travel. Convert them to fewer types or dtypes before feeding"
        )
    numbers = {key: number for number, key in enumerate(members)}
    type_ids = np.fromiter(map(numbers.__getitem__, keys), np.int8, len(values))
    offsets = np.empty(len(values), np.int32)
    parts: list[Encoded] = []
    for number in range(len(members)):
        is_member = type_ids == number
        group = list(compress(values, is_member))
        offsets[is_member] = np.arange(len(group))
        parts.append(encode(group, where))
    arrays, codecs = zip(*parts, strict=True)
    array = pa.UnionArray.from_dense(pa.array(type_ids), pa.array(offsets), list(arrays))
    return array, Codec("union", codecs)


_Encoder = Callable[[Sequence[Any], Any, str], Encoded]
_ENCODERS: dict[str, _Encoder] = {
    "decimal": _encode_decimals,
    "list": partial(_encode_lists, "list"),
    "tuple": partial(_encode_lists, "tuple"),
    "dict": _encode_dicts,
    "row": _encode_rows,
    **{
        name: partial(_encode_by, store_all, name)
        for name, store_all in {
            "scalar": store_scalars,
            "ndarray": store,
            "vector": lambda values, _module: store_vectors(values),
        }.items()
    },
}
