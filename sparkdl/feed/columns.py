"""Arrow columns become numpy arrays, without a copy where the layout allows it.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.feed.batch import row_schema
from sparkdl.feed.decode import decode
from sparkdl.feed.encode import Codec
from sparkdl.feed.frame import dense_vectors, is_list, is_vector
from sparkdl.feed.tensors import Array, lengths, load, load_ragged, split

Columns = dict[str, Array]

_NUMBERS = {"bool", "int", "float", "scalar", "decimal"}


def to_numpy(column: pa.Array) -> Array:
    """Return one Arrow column as one array; first axis: rows.

    ======================================  ==================================================
    numbers                                 the same dtype, no copy; floats: NaN where null
    booleans                                bool
    date, timestamp, duration               datetime64 (UTC) or timedelta64, NaT where null
    decimal                                 float64, NaN where null: digits past 15 are lost
    string, binary                          object: str, bytes, None where null
    lists of equal length, to any depth     [rows, length, ...], no copy
    lists of different lengths              object [rows]: one array per row
    Spark ML vectors                        float64 [rows, size]
    arrays of a `RowEncoder` batch          [rows, *shape], no copy; object [rows] if shapes differ
    ======================================  ==================================================

    Arrays that were not copied are read-only.

    Raises:
        FeedTypeError: if integers, booleans or lists have nulls, or for structs and maps.
    """
    return _convert(column, None, "the column")


def to_columns(batch: pa.RecordBatch, columns: Sequence[str] | None = None) -> Columns:
    """Return columns of a batch as arrays, by name.

    Columns are named as in the DataFrame; for a `RowEncoder` batch by the Row's or dict's
    fields, "0", "1", ... for tuples and lists, and "value" for rows of one value.

    Args:
        batch: from a DataFrame or from `RowEncoder`.
        columns: which columns; None means all.

    Raises:
        ConfigError: if there is no such column.
        FeedTypeError: if a column cannot be an array, see `to_numpy`.
    """
    names = batch.schema.names
    schema = row_schema(batch)
    found: Columns = {}
    for name in names if columns is None else columns:
        if name not in names:
            raise ConfigError(
                f"the feed has no column {name!r}; its columns are {', '.join(map(repr, names))}"
            )
        index = names.index(name)
        codec = None if schema is None else schema.columns[index]
        found[name] = _convert(batch.column(index), codec, f"column {name!r}")
    return found


def concat(parts: Sequence[Mapping[str, Array]]) -> Columns:
    """Return the rows of `parts` one after another; a single part is not copied.

    Where rows are arrays whose shapes differ from part to part, the column becomes an object
    array with one array per row.

    Raises:
        FeedTypeError: if the parts have different columns, or dtypes that have no common one.
    """
    if not parts:
        return {}
    if len(parts) == 1:
        return dict(parts[0])
    names = list(parts[0])
    for part in parts:
        if set(part) != set(names):
            raise FeedTypeError(
                f"the feed's rows have columns {names} at first and {list(part)} later. Feed rows "
                "of one kind, or name the columns that all rows have."
            )
    return {name: _join([part[name] for part in parts], name) for name in names}


def slice_columns(cols: Mapping[str, Array], start: int, stop: int) -> Columns:
    """Return rows `start` to `stop` of each column, as views."""
    return {name: array[start:stop] for name, array in cols.items()}


def _join(arrays: list[Array], name: str) -> Array:
    arrays = [array for array in arrays if len(array)] or arrays[:1]
    if len({array.shape[1:] for array in arrays}) > 1:
        arrays = [_objects(list(array)) for array in arrays]
    try:
        return np.concatenate(arrays)
    except TypeError as error:
        raise FeedTypeError(
            f"column {name!r} holds values of types that do not mix: {error}"
        ) from None


def _objects(values: Sequence[Any]) -> Array:
    """Return an object array [rows], also where the values are sequences themselves."""
    array = np.empty(len(values), object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def _convert(column: pa.Array, codec: Codec | None, where: str) -> Array:
    """Convert a column; a codec tells what Arrow's type does not."""
    if codec is not None and codec.name in _BY_CODEC:
        return _BY_CODEC[codec.name](column, codec, where)
    kind = column.type
    types = pa.types
    if is_list(kind):
        return _lists(column, codec.of[0] if codec is not None and codec.of else None, where)
    if types.is_struct(kind) or types.is_map(kind) or types.is_union(kind):
        return _structs(column, where)
    if types.is_decimal(kind):
        return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
    is_whole = types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind)
    if is_whole and column.null_count:
        raise _nulls(column, where)
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _nulls(column: pa.Array, where: str) -> FeedTypeError:
    return FeedTypeError(
        f"{where} holds {column.null_count} nulls among {len(column)} values of type "
        f"{column.type}, for which numpy has no value. Fill them before feeding (df.fillna, or "
        "coalesce), or drop those rows (df.dropna)."
    )


def _lists(column: pa.Array, element: Codec | None, where: str) -> Array:
    if column.null_count:
        raise _nulls(column, where)
    counts = lengths(column)
    flat = _convert(column.flatten(), element, where)
    if (counts == counts[:1]).all():
        width = column.type.list_size if pa.types.is_fixed_size_list(column.type) else -1
        width = int(counts[0]) if len(counts) else max(width, 0)
        return flat.reshape(len(column), width, *flat.shape[1:])
    return _objects(split(flat, counts))


def _structs(column: pa.Array, where: str) -> Array:
    if column.null_count:
        raise _nulls(column, where)
    if is_vector(column.type):
        try:
            return dense_vectors(column)
        except ValueError as error:
            raise FeedTypeError(f"{where} holds {error}; vectors must have one size") from None
    if pa.types.is_struct(column.type) and [f.name for f in column.type] == ["shape", "data"]:
        return _stack(load_ragged(column))
    raise FeedTypeError(
        f"{where} is a {column.type}, which is no array. Feed its parts as columns of their own, "
        "for example df.select('name.*') for a struct or df.select(col('name')['key']) for a map."
    )


def _stack(arrays: list[Array]) -> Array:
    return np.stack(arrays) if len({a.shape for a in arrays}) == 1 else _objects(arrays)


def _arrays(column: pa.Array, codec: Codec, _where: str) -> Array:
    dtype = "" if codec.name == "dense" else codec.detail
    if pa.types.is_struct(column.type):
        return _stack(load_ragged(column, dtype))
    return load(column, dtype)


def _sparse(column: pa.Array, _codec: Codec, where: str) -> Array:
    sizes = set(column.field("size").to_pylist())
    if len(sizes) > 1:
        raise FeedTypeError(f"{where} holds sparse vectors of sizes {sorted(sizes)}; feed one size")
    dense = np.zeros((len(column), *sizes))
    rows = np.repeat(np.arange(len(column)), lengths(column.field("indices")))
    indices = column.field("indices").flatten().to_numpy()
    dense[rows, indices] = column.field("values").flatten().to_numpy()
    return dense


def _decimals(column: pa.Array, _codec: Codec, _where: str) -> Array:
    return np.array(list(map(float, column.to_pylist())), np.float64)


def _mixed(column: pa.Array, codec: Codec, where: str) -> Array:
    """Numbers of several types get their common dtype; any other mix stays Python objects."""
    values = decode(column, codec)
    names = {part.name for part in codec.of}
    if names <= _NUMBERS:
        return np.array([float(v) if isinstance(v, Decimal) else v for v in values])
    if names <= _NUMBERS | {"null"}:
        raise FeedTypeError(f"{where} holds None among numbers. Replace it before feeding.")
    return _objects(values)


def _no_array(_column: pa.Array, codec: Codec, where: str) -> Array:
    raise FeedTypeError(
        f"{where} holds a {codec.name}, which is no array. Feed its parts as fields of their own."
    )


_BY_CODEC: dict[str, Callable[[pa.Array, Codec, str], Array]] = {
    "scalar": _arrays,
    "ndarray": _arrays,
    "dense": _arrays,
    "sparse": _sparse,
    "decimal": _decimals,
    "union": _mixed,
    "dict": _no_array,
    "row": _no_array,
}
