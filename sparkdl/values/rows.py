"""Rows of an RDD become Arrow record batches, and come back as the rows they were.

A batch made here carries a `RowSchema` in its schema's metadata. A batch without one comes from a
DataFrame (`mapInArrow`); its rows come back as `df.rdd` would give them.

The values of a column are of one type, or None. `Codec` names it:

    bool int float str bytes     Arrow's own type
    bytearray date datetime      likewise, datetimes without a time zone
    decimal                      text
    scalar, ndarray              numpy's: primitives, fixed-size lists, ...: `ndarrays.py`
    list, tuple                  Arrow list of the encoded elements; struct if their types differ
    row, dict                    pyspark's Row with names, dicts of the same keys: struct
    map                          dicts of different keys: struct<keys, values> of two lists
    vector                       pyspark's vectors: struct
"""

from __future__ import annotations

import importlib
from collections import namedtuple
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from itertools import chain, pairwise, repeat
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from sparkdl.core.errors import FeedTypeError, ProtocolError
from sparkdl.values.ndarrays import (
    INT32_MAX,
    MODULES,
    Array,
    is_list,
    is_native,
    is_number,
    is_vector,
    lengths,
    load,
    load_ragged,
    split,
    store,
    store_lists,
    store_vectors,
    to_array,
    vectors,
    whole,
)

_KEY = b"sparkdl.rows"
# With more changes of kind than this, a batch would be cut into tiny ones.
_MAX_CUTS = 8
_FIXED = frozenset({NoneType, bool, int, float, date, datetime})
_SAMPLE = 32
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
_NAMES = {kind.__name__ for kind in _NATIVE}
_BY_BASE = {tuple: "tuple", list: "list", dict: "dict", Decimal: "decimal"}
_VECTORS = ("DenseVector", "SparseVector")


class Codec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The Python type of the values of an Arrow array.

    Attributes:
        name: one of the names in this module's docstring.
        of: the codecs of the parts: element; key and value; fields.
        detail: numpy dtype; a vector's module.
        names: the fields of a Row or dict, the places in a list or tuple of several types.
    """

    name: str
    of: tuple[Codec, ...] = ()
    detail: str = ""
    names: tuple[str, ...] = ()


Encoded = tuple[pa.Array, Codec]


class RowSchema(msgspec.Struct, frozen=True):
    """How the columns of a batch were rows.

    Attributes:
        kind: tuple, list, row (pyspark's) or dict, whose fields are the columns; or value: each
            row is the one column's value.
    """

    kind: str
    columns: tuple[Codec, ...]


def encode_rows(
    rows: Iterable[Any], max_nbytes: int = 4 << 20, max_rows: int = 10_000
) -> Iterator[pa.RecordBatch]:
    """Yield batches with the same rows in the same order; holds one batch's rows at a time.

    Rows that follow each other share a batch, and with it a schema, as long as they have the same
    kind and width. Where these alternate, so that batches would be tiny, rows are the values of a
    single column.

    Args:
        max_nbytes: where a batch ends, by an estimate of its bytes in Arrow; a row that is
            larger has a batch of its own.
        max_rows: where a batch ends, by rows.
    """
    pending: list[Any] = []
    pending_nbytes = 0
    for row in rows:
        nbytes = _estimate_nbytes(row)
        is_full = pending_nbytes + nbytes > max_nbytes or len(pending) >= max_rows
        if pending and is_full:
            yield from _encode_batch(pending)
            pending, pending_nbytes = [], 0
        pending.append(row)
        pending_nbytes += nbytes
    if pending:
        yield from _encode_batch(pending)


def rows(batch: pa.RecordBatch) -> list[Any]:
    """Return the rows of `batch` as they were: those given to `encode_rows`, or `df.rdd`'s."""
    schema = row_schema(batch)
    if schema is None:
        return frame_rows(batch)
    columns = [decode(batch.column(i), codec) for i, codec in enumerate(schema.columns)]
    if schema.kind == "value":
        return columns[0]
    if schema.kind == "row":
        return make_rows(tuple(batch.schema.names), columns, batch.num_rows)
    if schema.kind == "dict":
        names = batch.schema.names
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    tuples = zip(*columns, strict=True)
    return list(tuples) if schema.kind == "tuple" else list(map(list, tuples))


def row_schema(batch: pa.RecordBatch) -> RowSchema | None:
    """Return how the columns of `batch` were rows, or None if it comes from a DataFrame."""
    data = (batch.schema.metadata or {}).get(_KEY)
    return None if data is None else _parse_schema(data)


@lru_cache(maxsize=64)
def _parse_schema(data: bytes) -> RowSchema:
    try:
        return msgspec.json.decode(data, type=RowSchema)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ProtocolError(f"a feed's batch describes its rows wrongly: {error}") from None


def _encode_batch(rows: list[Any]) -> Iterator[pa.RecordBatch]:
    layouts = _layouts(rows)
    cuts = [i for i, (a, b) in enumerate(pairwise(layouts), start=1) if a != b]
    # Rows that alternate are the values of one column: a batch for each run would have a few rows.
    if len(cuts) > _MAX_CUTS:
        yield _encode_columns("value", ["value"], [rows])
        return
    for start, stop in pairwise([0, *cuts, len(rows)]):
        kind, fields = layouts[start] if len(layouts) > 1 else layouts[0]
        run = rows[start:stop]
        if kind == "value":
            yield _encode_columns(kind, ["value"], [run])
        elif kind == "dict":
            names = list(fields)
            yield _encode_columns(kind, names, [[row[name] for row in run] for name in names])
        else:
            names = list(fields) if kind == "row" else list(map(str, range(fields)))
            yield _encode_columns(kind, names, list(zip(*run, strict=True)))


def _encode_columns(
    kind: str, names: Sequence[str], columns: Sequence[Sequence[Any]]
) -> pa.RecordBatch:
    parts = [
        encode(column, "the row" if kind == "value" else f"field {name!r}")
        for name, column in zip(names, columns, strict=True)
    ]
    schema = RowSchema(kind, tuple(codec for _, codec in parts))
    fields = [pa.field(name, array.type) for name, (array, _) in zip(names, parts, strict=True)]
    metadata = {_KEY: msgspec.json.encode(schema)}
    return pa.RecordBatch.from_arrays(
        [array for array, _ in parts], schema=pa.schema(fields, metadata=metadata)
    )


def _layouts(rows: list[Any]) -> list[tuple[str, Any]]:
    """Return each row's kind and fields, or only the first if all rows are the same."""
    types = set(map(type, rows))
    if types in ({tuple}, {list}, {dict}):
        fields = set(map(tuple, rows)) if types == {dict} else set(map(len, rows))
        if len(fields) == 1:
            return [_layout(rows[0])]
    return [_layout(row) for row in rows]


def _layout(row: Any) -> tuple[str, Any]:
    """Return the kind of `row`, and its width, names or keys; rows alike in both share columns."""
    fields: Hashable
    if isinstance(row, tuple):
        fields = row_fields(row)
        kind, fields = ("row", fields) if fields else ("tuple", len(row))
    elif isinstance(row, list):
        kind, fields = "list", len(row)
    elif isinstance(row, dict) and all(type(key) is str for key in row):
        kind, fields = "dict", tuple(row)
    else:
        return "value", None
    return (kind, fields) if len(row) else ("value", None)  # a batch needs a column


def _estimate_nbytes(value: Any) -> int:
    """Return about how many bytes `value` takes in Arrow; long sequences are sampled."""
    kind = type(value)
    if kind in _FIXED:
        return 8
    if isinstance(value, str | bytes | bytearray):
        return len(value) + 4
    if isinstance(value, np.ndarray | np.generic):
        return value.nbytes
    if isinstance(value, dict):
        return _estimate_nbytes(list(value)) + _estimate_nbytes(list(value.values()))
    if isinstance(value, list | tuple):
        count = len(value)
        sample = value if count <= _SAMPLE else value[:: count // _SAMPLE]
        if _FIXED.issuperset(map(type, sample)):
            return 8 * count
        return 4 + sum(map(_estimate_nbytes, sample)) * count // max(len(sample), 1)
    parts = (getattr(value, "indices", None), getattr(value, "values", None))  # pyspark's vectors
    return 16 + sum(part.nbytes for part in parts if isinstance(part, np.ndarray))


def encode(values: Sequence[Any], where: str) -> Encoded:
    """Return the values of a column as one Arrow array of the same length, and how to decode it."""
    kinds = set(map(type, values))
    has_none = NoneType in kinds
    kinds.discard(NoneType)
    if not kinds:
        return pa.nulls(len(values)), Codec("null")
    # The common case first: Arrow converts a column of one plain type by itself.
    if len(kinds) == 1 and (kind := next(iter(kinds))) in _NATIVE:
        return _encode_native(values, kind, where)
    present = [value for value in values if value is not None] if has_none else values
    if kinds <= _BY_BASE.keys():
        keys: dict[tuple[str, Hashable], None] = {(_BY_BASE[kind], None): None for kind in kinds}
    else:
        keys = dict.fromkeys(_key(value, where) for value in present)
    if len(keys) > 1:
        found = " and ".join(sorted({f"{name} {detail or ''}".strip() for name, detail in keys}))
        raise FeedTypeError(
            f"{where} holds values of several types: {found}. Convert them to one type before "
            "feeding, for example in rdd.map; give all dicts the same keys"
        )
    ((name, detail),) = keys
    array, codec = _encode_present(present, name, detail, where)
    if has_none:
        is_there = np.fromiter((value is not None for value in values), bool, len(values))
        array = array.take(pa.array(np.cumsum(is_there) - 1, mask=~is_there))
    return array, codec


def row_fields(value: Any) -> tuple[str, ...] | None:
    """Return the names of a pyspark Row's fields; None if it is no Row or has no names."""
    if type(value).__name__ != "Row" or not isinstance(value, tuple):
        return None
    return tuple(map(str, getattr(value, "__fields__", ()))) or None


def _key(value: Any, where: str) -> tuple[str, Hashable]:
    """Return the codec's name and what values must share, beside it, to be in one array."""
    kind = type(value)
    if kind in _NATIVE:
        return kind.__name__, None
    if isinstance(value, np.ndarray | np.generic):
        if not is_native(value.dtype):
            raise FeedTypeError(
                f"{where} holds a numpy value of dtype {value.dtype}, which cannot travel in a "
                "feed. Convert it before feeding: to numbers with .astype(...), or to lists with "
                ".tolist()"
            )
        return "ndarray" if isinstance(value, np.ndarray) else "scalar", value.dtype.str
    if fields := row_fields(value):
        return "row", fields
    if kind.__module__ in MODULES and kind.__name__ in _VECTORS:
        return "vector", kind.__module__
    name = next((name for base, name in _BY_BASE.items() if isinstance(value, base)), None)
    if name is None:
        raise FeedTypeError(
            f"{where} holds a {kind.__module__}.{kind.__qualname__}, which cannot travel in a "
            "feed. Convert it before feeding, for example in rdd.map, to numbers, str, bytes, "
            "numpy arrays, or lists, tuples or dicts of these"
        )
    return name, None


def _encode_present(values: Sequence[Any], name: str, detail: Any, where: str) -> Encoded:
    if name == "scalar":
        return pa.array(np.array(values, detail)), Codec(name, detail=detail)
    if name == "ndarray":
        return store(values), Codec(name, detail=detail)
    if name == "vector":
        return store_vectors(values), Codec(name, detail=detail)
    if name == "decimal":
        return pa.array(list(map(str, values))), Codec(name)
    if name == "row":
        return _encode_fields(list(zip(*values, strict=True)), name, detail, where)
    if name == "dict":
        names = tuple(values[0])
        is_alike = names and all(type(key) is str for key in names)
        if is_alike and all(tuple(value) == names for value in values):
            columns = [[value[key] for value in values] for key in names]
            return _encode_fields(columns, name, names, where)
        keys, key = _encode_lists([list(value) for value in values], "list", where)
        items, item = _encode_lists([list(value.values()) for value in values], "list", where)
        array = pa.StructArray.from_arrays([keys, items], names=["keys", "values"])
        return array, Codec("map", (key, item))
    return _encode_lists(values, name, where)


def _encode_lists(values: Sequence[Any], name: str, where: str) -> Encoded:
    try:
        array, element = encode(list(chain.from_iterable(values)), where)
    except FeedTypeError:
        if len(widths := set(map(len, values))) > 1:
            raise
        # As a pair of a join is: each place has a type of its own.
        names = tuple(map(str, range(widths.pop())))
        return _encode_fields(list(zip(*values, strict=True)), name, names, where)
    return store_lists(list(map(len, values)), array), Codec(name, (element,))


def _encode_fields(
    columns: Sequence[Sequence[Any]], name: str, names: tuple[str, ...], where: str
) -> Encoded:
    parts = [encode(c, f"{where}.{field}") for c, field in zip(columns, names, strict=True)]
    array = pa.StructArray.from_arrays([array for array, _ in parts], names=list(names))
    return array, Codec(name, tuple(codec for _, codec in parts), names=names)


def _encode_native(values: Sequence[Any], kind: type, where: str) -> Encoded:
    if kind is datetime and any(value.tzinfo for value in values if value is not None):
        raise FeedTypeError(
            f"{where} holds a datetime with a time zone, which cannot travel in a feed. Convert it "
            "before feeding: to UTC without a zone, or to a number by .timestamp()"
        )
    try:
        array = pa.array(values, _NATIVE[kind])
        if isinstance(array, pa.ChunkedArray):  # Arrow splits what passes its 32-bit offsets
            raise OverflowError(f"more than {INT32_MAX} bytes")
        return array, Codec(kind.__name__)
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


def decode(array: pa.Array, codec: Codec) -> list[Any]:
    """Return the values that `encode` was given; numpy arrays among them are writable copies."""
    name = codec.name
    if name == "null":
        return [None] * len(array)
    if array.null_count and name not in _NAMES:
        return _around_nulls(array, decode(whole(array).drop_null(), codec))
    if name == "bytearray":
        return [None if value is None else bytearray(value) for value in array.to_pylist()]
    if name in _NAMES:
        return _plain_values(array)
    if name == "decimal":
        return list(map(Decimal, array.to_pylist()))
    if name == "scalar":
        return list(load(array))
    if name == "ndarray":
        # Copies, because views would keep the whole batch in memory and are read-only.
        arrays = load_ragged(array) if pa.types.is_struct(array.type) else load(array)
        return [np.array(value, codec.detail) for value in arrays]
    if name == "vector":
        return vectors(array, codec.detail)
    return _decode_nested(array, codec)


def _decode_nested(array: pa.Array, codec: Codec) -> list[Any]:
    name = codec.name
    if name in ("list", "tuple") and not codec.names:
        lists = split(decode(array.flatten(), codec.of[0]), lengths(array))
        return lists if name == "list" else list(map(tuple, lists))
    parts = [decode(array.field(i), part) for i, part in enumerate(codec.of)]
    if name == "row":
        return make_rows(codec.names, parts, len(array))
    if name in ("list", "tuple"):
        tuples = list(zip(*parts, strict=True))
        return tuples if name == "tuple" else list(map(list, tuples))
    if name == "dict":
        return [dict(zip(codec.names, each, strict=True)) for each in zip(*parts, strict=True)]
    return [dict(zip(*pair, strict=True)) for pair in zip(*parts, strict=True)]


def _around_nulls(array: pa.Array, present: Iterable[Any]) -> list[Any]:
    rest = iter(present)
    return [next(rest) if is_valid else None for is_valid in array.is_valid().to_pylist()]


def _plain_values(array: pa.Array) -> list[Any]:
    """Return the values of a primitive array as Python objects, None where null."""
    kind = array.type
    if is_number(kind) and not array.null_count:
        values: list[Any] = array.to_numpy(zero_copy_only=False).tolist()  # quicker than to_pylist
        return values
    if pa.types.is_timestamp(kind) and kind.tz is None:
        instants: list[Any] = array.to_numpy(zero_copy_only=False).astype("M8[us]").tolist()
        return instants
    return list(array.to_pylist())


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


def frame_rows(batch: pa.RecordBatch) -> list[Any]:
    """Return the rows of `batch` as pyspark Rows.

    With any version of Spark, binary comes as bytes, a struct as Row, a map as dict, and a Spark ML
    vector as itself, a timestamp as naive datetime in the process's time zone. Values of other
    user-defined types, variants and geometries come as they are stored: Arrow carries no more.
    """
    names = tuple(batch.schema.names)
    return make_rows(names, [_values(column) for column in batch.columns], batch.num_rows)


def _values(column: pa.Array) -> list[Any]:
    kind = column.type
    if column.null_count and pa.types.is_nested(kind):
        # The buffers below a nested null hold anything, so only the others are decoded.
        return _around_nulls(column, _values(whole(column).drop_null()))
    if is_vector(kind):
        return vectors(column)
    if pa.types.is_struct(kind):
        fields = [_values(column.field(i)) for i in range(kind.num_fields)]
        return make_rows(tuple(field.name for field in kind), fields, len(column))
    if pa.types.is_map(kind):
        return _maps(column)
    if is_list(kind):
        return _lists(column.flatten(), lengths(column))
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        # By way of integers: `to_pylist` would need the zone's data, and give aware datetimes.
        instants = _plain_values(column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()))
        return [None if us is None else _local(us) for us in instants]
    return _plain_values(column)


def _lists(flat: pa.Array, counts: Array) -> list[Any]:
    is_even = len(counts) > 0 and counts[0] > 0 and (counts == counts[0]).all()
    if is_even and is_number(flat.type) and not flat.null_count:
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
