"""Numpy arrays, and Spark's vectors, inside Arrow: how they are laid out in lists.

Arrays of one shape become nested fixed-size lists, so a column is one array [rows, *shape] again
without a copy. Arrays of different shapes become struct<shape, data>.

Vectors of Spark ML are laid out as Spark lays them out in a DataFrame: struct<type, size, indices,
values>. Type 0 is sparse, 1 dense.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import ProtocolError

Array = np.ndarray[Any, Any]

INT32_MAX = 2**31 - 1
"""Arrow's lists, strings and binaries of 32 bits, and its fixed sizes, end here."""
MODULES = ("pyspark.ml.linalg", "pyspark.mllib.linalg")
_SPARSE = 0
_NONE = np.empty(0, np.int32)
_VECTOR_FIELDS = ["type", "size", "indices", "values"]


def is_native(dtype: np.dtype[Any]) -> bool:
    return dtype.isnative and dtype.kind in "biuf" and dtype.itemsize <= 8


def is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def store(arrays: Sequence[Array]) -> pa.Array:
    """Return arrays of one dtype, and any shapes, as an Arrow array with one element for each."""
    shapes = {array.shape for array in arrays}
    sizes = next(iter(shapes))
    # Arrow has no fixed-size lists of length 0, and none beyond 32 bits.
    if len(shapes) == 1 and 0 not in sizes and max(sizes, default=1) <= INT32_MAX:
        return nest(np.stack(arrays))
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    data = store_lists([array.size for array in arrays], pa.array(flat))
    shape = pa.array([array.shape for array in arrays], pa.list_(pa.int64()))
    return pa.StructArray.from_arrays([shape, data], names=["shape", "data"])


def store_lists(counts: Sequence[int], flat: pa.Array) -> pa.Array:
    """Return lists of `counts` elements each, that lie one after another in `flat`."""
    ends = np.cumsum([0, *counts], dtype=np.int64)
    if ends[-1] > INT32_MAX:
        return pa.LargeListArray.from_arrays(pa.array(ends), flat)
    return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), flat)


def load(array: pa.Array) -> Array:
    """Return fixed-size lists, nested to any depth, as one array [rows, *shape] without a copy.

    Booleans, which are bits in Arrow, are copied.
    """
    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
    return to_array(array).reshape(shape)


def load_ragged(array: pa.Array) -> list[Array]:
    """Return the arrays of a struct<shape, data>, without a copy."""
    data = array.field("data")
    pieces = split(load(data.flatten()), lengths(data))
    shapes = array.field("shape").to_pylist()
    return [piece.reshape(to) for piece, to in zip(pieces, shapes, strict=True)]


def whole(array: pa.Array) -> pa.Array:
    """Return an array of which elements may be taken, as pyarrow takes them.

    Of a slice of fixed-size lists of lists pyarrow 26 takes others, without an error.
    """
    return pa.concat_arrays([array]) if array.offset and _is_deep(array.type) else array


def _is_deep(kind: pa.DataType) -> bool:
    of = [kind.field(i).type for i in range(kind.num_fields)]
    return any(map(_is_deep, of)) or (pa.types.is_fixed_size_list(kind) and of[0].num_fields > 0)


def lengths(array: pa.Array) -> Array:
    """Return how many elements each list of `array` has, 0 for a null; int64 [rows]."""
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        return np.full(len(array), kind.list_size, np.int64)
    # The fast way below reads the offsets, which know no nulls and may be missing without rows.
    if array.null_count or not len(array):
        counts = array.value_lengths()
        return np.asarray(counts.fill_null(0) if counts.null_count else counts).astype(np.int64)
    dtype = np.dtype(np.int64 if pa.types.is_large_list(kind) else np.int32)
    # A slice has the buffers of the whole array, and says where in them it begins.
    start = array.offset * dtype.itemsize
    ends = np.frombuffer(array.buffers()[1], dtype, len(array) + 1, start)
    return np.diff(ends).astype(np.int64)


def to_array(array: pa.Array) -> Array:
    """Return a column of a numpy dtype as an array, without a copy if possible."""
    kind = array.type
    # The values of these lie in memory as numpy's.
    is_plain = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not is_plain or array.null_count or not len(array):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    dtype = np.dtype(kind.to_pandas_dtype())
    # Arrow's own way imports pandas first, which takes as long as hundreds of batches.
    start = array.offset * dtype.itemsize
    return np.frombuffer(array.buffers()[1], dtype, len(array), start)


def split(flat: Any, counts: Array) -> list[Any]:
    ends = [0, *np.cumsum(counts).tolist()]
    return [flat[start:stop] for start, stop in pairwise(ends)]


def nest(stacked: Array) -> pa.Array:
    """Return numbers [rows, *shape] as fixed-size lists; `load` does the reverse."""
    array = pa.array(stacked.reshape(-1))
    for size in reversed(stacked.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def is_vector(kind: pa.DataType) -> bool:
    """Return whether `kind` is how Spark writes a column of ML vectors (VectorUDT)."""
    return pa.types.is_struct(kind) and [field.name for field in kind] == _VECTOR_FIELDS


def vectors(column: pa.Array, module: str = MODULES[0]) -> list[Any]:
    dense, sparse = factory(module, "DenseVector"), factory(module, "SparseVector")
    kinds, sizes = (column.field(name).to_pylist() for name in ("type", "size"))
    lists = column.field("indices")
    indices = split(_flat(lists), lengths(lists))  # which a vector copies
    return [
        sparse(size, places, numbers) if kind == _SPARSE else dense(numbers)
        for kind, size, places, numbers in zip(
            *(kinds, sizes, indices, _pieces(column.field("values"))), strict=True
        )
    ]


def store_vectors(values: Sequence[Any]) -> pa.Array:
    indices = [getattr(value, "indices", _NONE) for value in values]
    items = [value.values for value in values]
    # Only a sparse vector has indices, of whatever length: an empty one is no dense vector.
    is_dense = [each is _NONE for each in indices]
    sizes = [None if dense else each.size for dense, each in zip(is_dense, values, strict=True)]
    parts = [
        pa.array(is_dense).cast(pa.int8()),
        pa.array(sizes, pa.int32()),
        store_lists([*map(len, indices)], pa.array(np.concatenate(indices), pa.int32())),
        store_lists([*map(len, items)], pa.array(np.concatenate(items), pa.float64())),
    ]
    return pa.StructArray.from_arrays(parts, names=_VECTOR_FIELDS)


def nest_vectors(dense: Array, kind: pa.DataType) -> pa.Array:
    """Return float64 [rows, size] as dense vectors of a VectorUDT struct, by a single copy."""
    ends = np.arange(len(dense) + 1, dtype=np.int64) * dense.shape[1]
    lists = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(dense.reshape(-1)))
    parts = [
        pa.array(np.ones(len(dense), np.int8)),
        pa.nulls(len(dense), pa.int32()),
        pa.array([[]] * len(dense), kind.field("indices").type),
        lists.cast(kind.field("values").type),
    ]
    return pa.StructArray.from_arrays(parts, fields=list(kind))


def has_sparse(column: pa.Array) -> bool:
    return bool((column.field("type").to_numpy() == _SPARSE).any())


def dense_vectors(column: pa.Array) -> Array:
    """Return ML vectors of equal size as float64 [rows, size], sparse ones filled up."""
    counts, is_sparse, width = _layout(column)
    values = _flat(column.field("values"))
    if not is_sparse.any():
        return values.reshape(len(column), width)
    dense = np.zeros((len(column), width))
    # Arrays as long as the values are few: those of dense rows may be as large as the result.
    row_of = np.repeat(np.flatnonzero(is_sparse), counts[is_sparse])
    from_sparse = np.repeat(is_sparse, counts)
    dense[row_of, _flat(column.field("indices"))] = values[from_sparse]
    dense[~is_sparse] = values[~from_sparse].reshape(-1, width)
    return dense


def csr_parts(column: pa.Array) -> tuple[tuple[Array, Array, Array], tuple[int, int]]:
    """Return ML vectors of equal size as the arrays of a CSR matrix, and its shape [rows, size].

    The arrays are the values, their columns int32, and int64 `[rows + 1]` where each row begins.
    All elements of a dense vector are values; those of a sparse one are as they are stored.
    """
    counts, is_sparse, width = _layout(column)
    columns = _flat(column.field("indices"))
    if not is_sparse.all():
        from_sparse = np.repeat(is_sparse, counts)
        stored, columns = columns, np.empty(len(from_sparse), np.int32)
        columns[from_sparse] = stored
        columns[~from_sparse] = np.tile(np.arange(width, dtype=np.int32), (~is_sparse).sum())
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return (_flat(column.field("values")), columns, starts), (len(column), width)


def _layout(column: pa.Array) -> tuple[Array, Array, int]:
    """Return how many values each vector stores, which are sparse, and the size of all."""
    counts = lengths(column.field("values"))
    is_sparse = column.field("type").to_numpy() == _SPARSE
    sizes = np.where(is_sparse, np.asarray(column.field("size").fill_null(0)), counts)
    if len(sizes) and sizes.min() != sizes.max():
        raise ValueError(f"vectors of {sizes.min()} to {sizes.max()} elements")
    return counts, is_sparse, int(sizes[0]) if len(sizes) else 0


def factory(module: str, name: str) -> Any:
    if module not in MODULES:
        raise ProtocolError(f"a feed's batch names {module!r} as the home of its vectors")
    return getattr(importlib.import_module(module), name)


def _flat(lists: pa.Array) -> Array:
    flat: Array = lists.flatten().to_numpy()
    return flat


def _pieces(lists: pa.Array) -> list[Array]:
    # Arrow's memory is read-only, and user code may change a vector in place.
    return [piece.copy() for piece in split(_flat(lists), lengths(lists))]
