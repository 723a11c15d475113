"""The columns of Arrow batches become numpy arrays by name, without a copy where possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc  # `Array.flatten` imports it at the first batch otherwise

from sparkdl.core.errors import ConfigError, FeedTypeError, FrameworkMissingError
from sparkdl.values.ndarrays import (
    Array,
    csr_parts,
    dense_vectors,
    has_sparse,
    is_list,
    is_vector,
    lengths,
    load,
    load_ragged,
    nest_vectors,
    split,
    to_array,
)
from sparkdl.values.rows import Codec, row_schema

Columns = dict[str, Array]


class Packed:
    """Vectors, or arrays of them, [rows, …] as Arrow has them: sparse ones may be small.

    It can be cut and reordered like an array, and `unpacked` makes it one, or a `csr_array`.
    """

    def __init__(self, column: pa.Array, where: str, is_csr: bool = False) -> None:
        self._column, self._where, self._is_csr = column, where, is_csr

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, rows: slice | Array) -> Packed:
        """Return some rows: a slice without a copy, or those at places int64 `[rows]`."""
        part = self._column[rows] if isinstance(rows, slice) else self._column.take(pa.array(rows))
        return Packed(part, self._where, self._is_csr)

    @property
    def nbytes(self) -> int:
        return int(self._column.nbytes)

    def joined(self, others: Sequence[Packed]) -> Packed:
        column = pa.concat_arrays([self._column, *(p._column for p in others)])
        return Packed(column, self._where, self._is_csr)

    def like(self, part: Any) -> Packed:
        """Return vectors as these are: dense ones may come as float64 `[rows, size]`."""
        if isinstance(part, Packed):
            return part
        return Packed(nest_vectors(part, self._column.type), self._where)

    def array(self) -> Array:
        make = as_csr if self._is_csr else convert
        return make(self._column, where=self._where)


def is_csr(column: Any) -> bool:
    """Return whether a column is scipy's `csr_array` [rows, size], as `sparse=` asks for."""
    return hasattr(column, "indptr")


def places(csr: Any) -> Array:
    """Return row and column of each value of a `csr_array`, int64 [values, 2]."""
    rows = np.repeat(np.arange(csr.shape[0]), np.diff(csr.indptr))
    return np.stack([rows, csr.indices], axis=1)


def csr_array() -> Callable[..., Any]:
    """Return scipy's class, or raise a `FrameworkMissingError`."""
    try:
        made: Callable[..., Any] = import_module("scipy.sparse").csr_array
    except (ImportError, AttributeError) as error:
        raise FrameworkMissingError(
            f"sparse= needs SciPy 1.8 or later on every node ({error}): pip install scipy"
        ) from error
    return made


def as_csr(column: pa.Array, where: str) -> Any:
    """Return ML vectors as a `csr_array` [rows, size], a view of Arrow's memory where possible."""
    parts, shape = _of_one_size(csr_parts, column, where)
    return csr_array()(parts, shape=shape)


def unpacked(columns: Mapping[str, Any]) -> Columns:
    """Return columns as arrays, those of `to_columns(…, packs=True)` among them."""
    return {n: c.array() if isinstance(c, Packed) else c for n, c in columns.items()}


def to_columns(
    batch: pa.RecordBatch,
    columns: Sequence[str] | None = None,
    packs: bool = False,
    sparse: Sequence[str] = (),
) -> Columns:
    """Return columns of a batch as arrays, by name.

    Columns are named as in the DataFrame; for a batch of `encode_rows` by the Row's or dict's
    fields, "0", "1", ... for tuples and lists, and "value" for rows of one value. A struct becomes
    a column for each of its fields, to any depth, like "address.city"; where the struct is null,
    so are they, and nulls are refused.

    Args:
        batch: from a DataFrame or from `encode_rows`.
        columns: which columns; None means all. The name of a struct means all its fields.
        packs: columns with sparse vectors are `Packed`, in place of arrays, which may
            be a hundred times as large.
        sparse: columns of vectors that are `Packed` in any case, and become a `csr_array`.

    Raises:
        ConfigError: if there is no such column.
        FeedTypeError: if a column cannot be an array, see `convert`, or two have one name; if one
            of `sparse` holds no vectors.
    """
    parts = _parts(batch)
    found: Columns = {}
    for wanted in [None] if columns is None else columns:
        chosen = [part for part in parts if wanted is None or is_within(part[0], wanted)]
        if not chosen and batch.num_columns:
            names = ", ".join(repr(name) for name, _, _ in parts)
            raise ConfigError(f"the feed has no column {wanted!r}; its columns are {names}")
        names_chosen = [name for name, _, _ in chosen]
        for name, column, codec in chosen:
            if names_chosen.count(name) > 1:
                raise FeedTypeError(
                    f"the feed has {names_chosen.count(name)} columns {name!r}. Rename all but "
                    "one before feeding (df.withColumnRenamed), or drop them"
                )
            where = f"column {name!r}"
            if name in sparse and not column.null_count:  # which `convert` refuses
                if not is_vector(column.type):
                    raise FeedTypeError(
                        f"{where} holds {column.type}: sparse= takes columns of Spark ML vectors "
                        "alone. Feed vectors (pyspark.ml.functions.array_to_vector, "
                        "VectorAssembler), or leave it out of sparse="
                    )
                found[name] = cast(Array, Packed(column, where, is_csr=True))
            elif packs and not column.null_count and _may_be_sparse(column):
                found[name] = cast(Array, Packed(column, where))
            else:
                found[name] = convert(column, codec, where)
    if batch.num_columns and (missing := [name for name in sparse if name not in found]):
        raise ConfigError(
            f"sparse= names {missing[0]!r}: must name columns that are read, which are "
            f"{', '.join(found)}"
        )
    return found


def _may_be_sparse(column: pa.Array) -> bool:
    kind = column.type
    if is_vector(kind):
        return has_sparse(column)
    while is_list(kind):
        kind = kind.value_type
    return is_vector(kind)


def concat(parts: Sequence[Mapping[str, Array]]) -> Columns:
    """Return the rows of `parts` one after another; a single part is not copied.

    Where rows are arrays whose shapes differ from part to part, the column becomes an object
    array with one array per row. Numbers get their common dtype, as numpy has it: float32 and
    float64 are float64, int64 and float32 are float64. Objects and anything else are objects.
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
                "of one kind, or name the columns that all rows have"
            )
    return {name: _join([part[name] for part in parts], name) for name in names}


def slice_columns(cols: Mapping[str, Array], start: int, stop: int) -> Columns:
    return {name: array[start:stop] for name, array in cols.items()}


def _parts(batch: pa.RecordBatch) -> list[tuple[str, pa.Array, Codec | None]]:
    """Return the columns of a batch with structs taken apart: name, values, codec."""
    schema = row_schema(batch)
    codecs = [None] * batch.num_columns if schema is None else schema.columns
    parts = zip(batch.schema.names, batch.columns, codecs, strict=True)
    return [leaf for part in parts for leaf in _leaves(*part)]


def _leaves(
    name: str, column: pa.Array, codec: Codec | None
) -> Iterator[tuple[str, pa.Array, Codec | None]]:
    is_row = codec is not None and codec.name == "row"
    is_struct = pa.types.is_struct(column.type) and not is_vector(column.type)
    if not is_row and (codec is not None or not is_struct):
        yield name, column, codec
        return
    names = [field.name for field in column.type]
    codecs = [None] * len(names) if codec is None else codec.of
    for part in zip(names, column.flatten(), codecs, strict=True):  # null where the struct is
        yield from _leaves(f"{name}.{part[0]}", *part[1:])


def is_within(name: str, wanted: str) -> bool:
    """Return whether `name` is the column `wanted`, or a field of it."""
    return name == wanted or name.startswith(f"{wanted}.")


def _join(arrays: list[Array], name: str) -> Array:
    # Without rows a part has no shape or dtype of its own, and must not change those of the others.
    arrays = [array for array in arrays if len(array)] or arrays[:1]
    parts: list[Any] = list(arrays)
    packed = [part for part in parts if isinstance(part, Packed)]
    if packed and is_vector(packed[0]._column.type):
        parts = packed = [packed[0].like(part) for part in parts]
    if len(packed) == len(parts) and len({part._column.type for part in packed}) == 1:
        return cast(Array, packed[0].joined(packed[1:]))
    arrays = [part.array() if isinstance(part, Packed) else part for part in parts]
    if len({array.shape[1:] for array in arrays}) > 1:
        arrays = [objects(list(array)) for array in arrays]
    # Values of one kind share an array and keep their meaning; objects do with any.
    kinds = {"number" if a.dtype.kind in "biufc" else a.dtype.kind for a in arrays}
    if len(kinds - {"O"}) > 1:
        dtypes = " and ".join(dict.fromkeys(str(array.dtype) for array in arrays))
        raise FeedTypeError(
            f"column {name!r} holds values of types that do not mix: {dtypes}. Cast them to one "
            "type before feeding"
        )
    return np.concatenate(arrays)


def convert(column: pa.Array, codec: Codec | None = None, where: str = "the column") -> Array:
    """Return one Arrow column as one array; first axis: rows.

    ========================================  =======================================
    the column's type                         the array
    ========================================  =======================================
    float, double                             the same dtype, no copy
    byte, short, int, long                    the same dtype, no copy
    boolean                                   bool
    decimal                                   float64: digits past 15 are lost
    date                                      datetime64[D]
    timestamp                                 datetime64[us], always in UTC
    timestamp_ntz                             datetime64[us], as the clock shows it
    interval day to second                    timedelta64[us]
    time                                      timedelta64[ns] since midnight
    string, binary                            object: str, bytes
    arrays of equal length, to any depth      [rows, length, ...], no copy
    arrays of different lengths               object [rows]: one array per row
    Spark ML vectors                          float64 [rows, size]
    numpy arrays in rows of an RDD            [rows, *shape], no copy; object [rows]
                                              if the shapes differ
    struct, map, dict                         refused: `to_columns` takes structs
                                              apart
    ========================================  =======================================

    A null is refused in every type, and so is one among the elements of an array: it never becomes
    NaN, NaT or None, which a training would use without a word. A column that may hold nulls and
    holds none is like any other. Arrays that were not copied are read-only.

    Args:
        codec: of a column made by `encode`; it adds the Python type.
        where: names the column in errors.

    Raises:
        FeedTypeError: for a null, and for what the table says is refused.
    """
    # Before anything else: once converted, a null is a NaN, NaT or None like any other.
    if column.null_count:
        raise _nulls(column.null_count, len(column), column.type, where)
    if codec is not None and codec.name in _BY_CODEC:
        return _BY_CODEC[codec.name](column, codec, where)
    kind = column.type
    types = pa.types
    if is_list(kind):
        return _lists(column, codec.of[0] if codec is not None and codec.of else None, where)
    if types.is_time(kind):
        # numpy has no time of day: it becomes the time since midnight, by way of its integers.
        column = column.cast(pa.time64("ns")).cast(pa.int64()).cast(pa.duration("ns"))
    if types.is_struct(kind) or types.is_map(kind):
        return _structs(column, where)
    if types.is_decimal(kind) or (codec is not None and codec.name == "decimal"):
        return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
    return to_array(column)


def objects(values: Sequence[Any]) -> Array:
    """Return an object array [rows], also where the values are sequences themselves."""
    # `np.array` would make one array of several dimensions of equal sequences.
    return np.fromiter(values, object, len(values))


def is_text(column: Array) -> bool:
    """Return whether each row of an object array [rows] is a text or bytes."""
    return column.ndim == 1 and all(isinstance(value, (str, bytes)) for value in column)


def objects_in(column: Array) -> str:
    """Return what the rows of an array are, in words for an error."""
    if column.dtype != object:
        return f"values of {column.dtype}" + f" {list(column.shape[1:])}" * (column.ndim > 1)
    if is_text(column):
        return "text"
    if column.ndim > 1 or any(isinstance(v, np.ndarray) and v.dtype == object for v in column):
        held = "arrays of different lengths" if _holds_numbers(column) else "text or other objects"
        return f"arrays of {held}"
    if all(isinstance(value, np.ndarray) for value in column):
        return "arrays of different lengths"
    return f"values of {' and '.join(sorted({type(value).__name__ for value in column}))}"


def _holds_numbers(column: Array) -> bool:
    """Whether all that the rows of an object array hold is arrays of numbers, at any depth."""
    return all(
        isinstance(value, np.ndarray) and (value.dtype != object or _holds_numbers(value))
        for value in column.flat
    )


def _nulls(count: int, rows: int, kind: pa.DataType | str, where: str) -> FeedTypeError:
    return FeedTypeError(
        f"{where} holds {count} null{'s' * (count > 1)} among {rows} values of {kind}, and nulls "
        "do not become arrays. Fill them (df.fillna or coalesce; with float('nan') where NaN is "
        "meant), or drop those rows (df.dropna). Within arrays use functions.transform or "
        "functions.filter; in rows of an RDD replace None, and give all dicts the same keys"
    )


def _lists(column: pa.Array, element: Codec | None, where: str) -> Array:
    counts = lengths(column)
    flat = convert(pc.list_flatten(column), element, where)
    if (counts == counts[:1]).all():
        width = column.type.list_size if pa.types.is_fixed_size_list(column.type) else -1
        # Without rows only the type can say the width, and only a fixed-size list does.
        width = int(counts[0]) if len(counts) else max(width, 0)
        return flat.reshape(len(column), width, *flat.shape[1:])
    return objects(split(flat, counts))


def _structs(column: pa.Array, where: str) -> Array:
    if is_vector(column.type):
        return cast(Array, _of_one_size(dense_vectors, column, where))
    raise FeedTypeError(
        f"{where} is a {column.type}, which is no array. Feed its parts as separate columns, "
        "for example df.select('name.*') for a struct or df.select(col('name')['key']) for a "
        "map, or name the columns that are wanted"
    )


def _of_one_size(make: Callable[[pa.Array], Any], column: pa.Array, where: str) -> Any:
    try:
        return make(column)
    except ValueError as error:
        raise FeedTypeError(
            f"{where} holds {error}, which must have one size. Make all rows by one fitted "
            "transformer (CountVectorizerModel, HashingTF), or leave the other rows out"
        ) from None


def _arrays(column: pa.Array, _codec: Codec, _where: str) -> Array:
    if not pa.types.is_struct(column.type):
        return load(column)
    arrays = load_ragged(column)
    return np.stack(arrays) if len({a.shape for a in arrays}) == 1 else objects(arrays)


def _no_array(_column: pa.Array, codec: Codec, where: str) -> Array:
    raise FeedTypeError(
        f"{where} holds a {codec.name}, which is no array. Feed its parts as separate fields, "
        "or name the columns that are wanted"
    )


_BY_CODEC: dict[str, Callable[[pa.Array, Codec, str], Array]] = {
    "scalar": _arrays,
    "ndarray": _arrays,
    "vector": lambda column, _codec, where: _structs(column, where),
    "map": _no_array,
    "dict": _no_array,
    "row": _no_array,
}
