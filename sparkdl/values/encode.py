"""A column of Python values becomes one Arrow array, and a codec by which it can come back.

Runs in: feeder, child

`encode` looks at all values of a column at once and picks a codec; codecs nest:

    bool int float str bytes     Arrow's own type, with nulls where values are None; null if all are
    bytearray date timedelta     likewise
    datetime                     likewise; its UTC offset is kept, its zone's name is not
    decimal, npstr, npbytes      text or bytes
    scalar, ndarray              numpy's: primitives, fixed-size lists, ...: `ndarrays.py`
    list, tuple                  Arrow list of the encoded elements
    dict                         struct<keys, values> of two lists
    row, vector, matrix          pyspark's Row with names: struct; its vectors and matrices
    optional                     struct<there, value>: some dicts have no such key
    union                        dense union: the values are of several of these kinds
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Hashable, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import partial
from itertools import chain, compress, groupby
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from sparkdl.core.errors import FeedTypeError
from sparkdl.values.ndarrays import (
    INT32_MAX,
    MODULES,
    Array,
    dtype_name,
    store,
    store_lists,
    store_matrices,
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
    timedelta: pa.duration("us"),
}
_Key = tuple[str, Hashable]
_BY_TYPE: dict[type, str] = {kind: kind.__name__ for kind in _NATIVE} | {
    NoneType: "null",
    list: "list",
    tuple: "tuple",
    dict: "dict",
    Decimal: "decimal",
    datetime: "datetime",
    np.ndarray: "ndarray",
    np.str_: "npstr",
    np.bytes_: "npbytes",
}
_KEYS: dict[type, _Key] = {
    kind: (name, None) for kind, name in _BY_TYPE.items() if name not in ("datetime", "ndarray")
} | {dtype.type: ("scalar", dtype.str) for dtype in map(np.dtype, "?bBhHiIlLqQefdgFD")}
"""The result of `_key` for types that determine it alone, whatever the value."""
_BY_BASE = {np.generic: "scalar", tuple: "tuple", list: "list", dict: "dict"}
_BY_NAME = dict.fromkeys(("DenseVector", "SparseVector"), "vector") | dict.fromkeys(
    ("DenseMatrix", "SparseMatrix"), "matrix"
)
_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
# A character of UTF-8 has four bytes at most: an upper bound without encoding the text.
_UTF8_MAX_NBYTES = 4
# Arrow's type ids are signed bytes.
_MAX_UNION = 127
_WIDE = 16
_PACKED = {
    float: (ord("g"), np.dtype([("tag", "u1"), ("value", "<f8")])),
    int: (ord("i"), np.dtype([("tag", "u1"), ("value", "<i4")])),
}
# A byte for the type and four for the length.
_HEADER_NBYTES = 5


class Codec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The Python type of the values of an Arrow array.

    Attributes:
        name: one of the names in this module's docstring.
        of: the codecs of the parts: element; key and value; fields; members.
        detail: numpy dtype; UTC offset in microseconds ("" for naive); a vector's module.
        names: the fields of a Row.
    """

    name: str
    of: tuple[Codec, ...] = ()
    detail: str = ""
    names: tuple[str, ...] = ()


class _Missing:
    """Stands in a column where a dict has no such key."""


MISSING = _Missing()

Encoded = tuple[pa.Array, Codec]
Values = list[Any] | tuple[Any, ...] | np.ndarray[Any, Any]


def encode(values: Values, where: str) -> Encoded:
    """Return `values` as one Arrow array of the same length, and how to turn them back.

    Args:
        values: the values of one column, of any mix of kinds; or a column of what `pack_rows`
            returned.
        where: names the column in errors.

    Raises:
        FeedTypeError: if a value is of a type that cannot travel.
    """
    if isinstance(values, np.ndarray):
        return pa.array(values), Codec("float" if values.dtype.kind == "f" else "int")
    return _encode_objects(values, where)


def row_fields(value: Any) -> tuple[str, ...] | None:
    """Return the names of a pyspark Row's fields; None if it is no Row or has no names."""
    if type(value).__name__ != "Row" or not isinstance(value, tuple):
        return None
    return tuple(map(str, getattr(value, "__fields__", ()))) or None


def _encode_objects(values: Sequence[Any], where: str) -> Encoded:
    types = set(map(type, values))
    if _Missing in types:
        return _encode_optional(values, where)
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
    # Beside the native types above, only datetimes share their column with None.
    if len(members) > (2 if name == "datetime" and NoneType in types else 1):
        return _encode_union(values, keys, members, where)
    return _ENCODERS[name](values, detail, where)


def _key(value: Any, where: str) -> _Key:
    """Return the codec's name and what values must share, beside it, to be in one array."""
    kind = type(value)
    name = _BY_TYPE.get(kind)
    if name is None:
        name = next((name for base, name in _BY_BASE.items() if isinstance(value, base)), None)
        fields = row_fields(value)
        if fields:
            return "row", fields
        if kind.__module__ in MODULES and kind.__name__ in _BY_NAME:
            return _BY_NAME[kind.__name__], kind.__module__
    if name in ("ndarray", "scalar"):
        return name, _dtype_detail(value.dtype, where)
    if name == "datetime":
        offset = value.utcoffset()
        return name, "" if offset is None else str(offset // timedelta(microseconds=1))
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


def _encode_text(name: str, kind: type, values: Sequence[Any], _: Any, where: str) -> Encoded:
    if name == "decimal":  # numpy's text goes in as it is: its str() drops a NUL at the end
        values = list(map(str, values))
    return _encode_native(values, kind, where)[0], Codec(name)


def _encode_lists(name: str, values: Sequence[Any], _detail: Any, where: str) -> Encoded:
    counts = list(map(len, values))
    is_wide = counts[0] > _WIDE and len(set(counts)) == 1
    packed = pack_rows(values, max_runs=1) if is_wide else None
    flat = list(chain.from_iterable(values)) if packed is None else packed[0].reshape(-1)
    array, element = encode(flat, where)
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


def _encode_optional(values: Sequence[Any], where: str) -> Encoded:
    there = [value is not MISSING for value in values]
    array, codec = encode([None if value is MISSING else value for value in values], where)
    optional = pa.StructArray.from_arrays([pa.array(there), array], names=["there", "value"])
    return optional, Codec("optional", (codec,))


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
    "decimal": partial(_encode_text, "decimal", str),
    "npstr": partial(_encode_text, "npstr", str),
    "npbytes": partial(_encode_text, "npbytes", bytes),
    "list": partial(_encode_lists, "list"),
    "tuple": partial(_encode_lists, "tuple"),
    "dict": _encode_dicts,
    "row": _encode_rows,
    **{
        name: partial(_encode_by, store_all, name)
        for name, store_all in {
            "datetime": lambda v, utc: pa.array(v, pa.timestamp("us", "UTC" if utc else None)),
            "scalar": store_scalars,
            "ndarray": store,
            "vector": lambda values, _module: store_vectors(values),
            "matrix": lambda values, _module: store_matrices(values),
        }.items()
    },
}


def pack_rows(rows: Any, max_runs: int) -> list[Array] | None:
    """Return lists or tuples of one length as arrays [rows, columns], one for each run of a type.

    Why marshal: its format 2 writes a list or tuple as a header of 5 bytes and then, for each
    float, "g" and 8 bytes, for each int of 32 bits, "i" and 4 bytes. One C call checks the types
    and takes the values, and reads each object once. Encoding takes 20 us of CPU for a list of 784
    floats and 17 us for one of ints; by `set(map(type, ...))` and `pa.array` 34 and 38 us. Of 785
    columns it takes 26 and 22 us; by way of one numpy array 49 and 44 us. Without marshal, a
    process that unpickles, encodes and writes rows (measured without Spark) is slower by 16 %
    (lists of floats) to 49 % (of ints); with parsing from text, by 3 to 18 %. Single numbers and
    narrow rows gain nothing by it.

    Returns:
        None if a column is not all float or all int of 32 bits, or the type changes along a row
        more often than `max_runs`.
    """
    runs = [(kind, len(list(group))) for kind, group in groupby(map(type, rows[0]))]
    if len(runs) > max_runs or not {kind for kind, _ in runs} <= _PACKED.keys():
        return None
    fields = [(f"run{i}", _PACKED[kind][1], (width,)) for i, (kind, width) in enumerate(runs)]
    layout = np.dtype([("header", f"V{_HEADER_NBYTES}"), *fields])
    try:
        # Version 2 has no references: from 3 on an object that occurs twice is written once.
        data = marshal.dumps(rows, 2)
    except ValueError:  # something in there is no plain value
        return None
    # Larger integers and most other types have another length; the tags below find the rest.
    if len(data) != _HEADER_NBYTES + len(rows) * layout.itemsize:
        return None
    items = np.frombuffer(data, layout, offset=_HEADER_NBYTES)
    packed: list[Array] = []
    for i, (kind, _) in enumerate(runs):
        run = items[f"run{i}"]
        # The first item has a tag, and each tag says where the next item is: nothing else passes.
        if not (run["tag"] == _PACKED[kind][0]).all():
            return None
        packed.append(np.asarray(run["value"].astype(kind)))
    return packed
