"""Numpy arrays inside Arrow: how arrays of any shape and dtype are laid out in lists.

Runs in: feeder, child

Arrays of one shape become nested fixed-size lists, so a column is one array [rows, *shape] again
without a copy. Arrays of different shapes become struct<shape, data>. A dtype that Arrow does not
have travels as bytes: uint8, with an axis more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

Array = np.ndarray[Any, Any]

_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
} | {"halffloat": np.dtype("f2"), "float": np.dtype("f4"), "double": np.dtype("f8")}
"""Arrow's names of the types whose values lie in memory as numpy's."""

INT32_MAX = 2**31 - 1
"""Arrow's lists, strings and binaries of 32 bits, and its fixed sizes, end here."""


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name under which arrays of `dtype` travel, None if they cannot.

    Strings travel under "<U" or "|S" without their width, which may differ from row to row.
    """
    if dtype.kind not in "biufcmMSU":
        return None
    name: str = dtype.str
    return name[:2] if dtype.kind in "SU" else name


def store(arrays: Sequence[Array], dtype: str) -> pa.Array:
    """Return arrays of one dtype, and any shapes, as an Arrow array with one element for each."""
    if not _is_native(dtype):
        arrays = [_as_bytes(array) for array in arrays]
    shapes = {array.shape for array in arrays}
    sizes = next(iter(shapes))
    if len(shapes) == 1 and 0 not in sizes and max(sizes, default=1) <= INT32_MAX:
        return _nest(np.stack(arrays))
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    data = store_lists([array.size for array in arrays], pa.array(flat))
    shape = pa.array([array.shape for array in arrays], pa.list_(pa.int64()))
    return pa.StructArray.from_arrays([shape, data], names=["shape", "data"])


def store_scalars(values: Sequence[Any], dtype: str) -> pa.Array:
    """Return numpy scalars of one dtype as an Arrow array."""
    array = np.array(values, dtype)
    return _nest(array if _is_native(dtype) else _as_bytes(array))


def store_lists(counts: Sequence[int], flat: pa.Array) -> pa.Array:
    """Return lists of `counts` elements each, that lie one after another in `flat`."""
    ends = np.cumsum([0, *counts], dtype=np.int64)
    if ends[-1] > INT32_MAX:
        return pa.LargeListArray.from_arrays(pa.array(ends), flat)
    return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), flat)


def load(array: pa.Array, dtype: str = "") -> Array:
    """Return fixed-size lists, nested to any depth, as one array [rows, *shape] without a copy.

    Args:
        array: no nulls; primitive values innermost.
        dtype: the name under which it travelled; "" for what Arrow has. Booleans are bits in
            Arrow: they alone are copied.
    """
    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
    return _typed(to_array(array).reshape(shape), dtype)


def load_ragged(array: pa.Array, dtype: str = "") -> list[Array]:
    """Return the arrays of a struct<shape, data>, without a copy."""
    data = array.field("data")
    pieces = split(load(data.flatten()), lengths(data))
    shapes = array.field("shape").to_pylist()
    return [_typed(piece.reshape(to), dtype) for piece, to in zip(pieces, shapes, strict=True)]


def lengths(array: pa.Array) -> Array:
    """Return how many elements each list of `array` has, 0 for a null; int64 [rows]."""
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        return np.full(len(array), kind.list_size, np.int64)
    if array.null_count or not len(array):
        counts = array.value_lengths()
        return np.asarray(counts.fill_null(0) if counts.null_count else counts).astype(np.int64)
    dtype = np.dtype(np.int64 if pa.types.is_large_list(kind) else np.int32)
    start = array.offset * dtype.itemsize
    ends = np.frombuffer(array.buffers()[1], dtype, len(array) + 1, start)
    return np.diff(ends).astype(np.int64)


def to_array(array: pa.Array) -> Array:
    """Return a column of values that numpy has a dtype for; without a copy if that is possible."""
    dtype = _DTYPES.get(str(array.type))
    if dtype is None or array.null_count or not len(array):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    # Arrow's own way imports pandas first, which takes as long as hundreds of batches.
    start = array.offset * dtype.itemsize
    return np.frombuffer(array.buffers()[1], dtype, len(array), start)


def split(flat: Any, counts: Array) -> list[Any]:
    """Cut a sequence into consecutive pieces of `counts` elements each."""
    ends = [0, *np.cumsum(counts).tolist()]
    return [flat[start:stop] for start, stop in pairwise(ends)]


def _nest(stacked: Array) -> pa.Array:
    array = pa.array(stacked.reshape(-1))
    for size in reversed(stacked.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _is_native(name: str) -> bool:
    dtype = np.dtype(name)
    return dtype.isnative and dtype.kind in "biuf" and dtype.itemsize <= 8


def _as_bytes(array: Array) -> Array:
    flat = np.frombuffer(bytearray(array.tobytes()), np.uint8)
    return flat.reshape(*array.shape, array.dtype.itemsize)


def _typed(array: Array, dtype: str) -> Array:
    """Give arrays that travelled as bytes, uint8 [*shape, itemsize], their dtype back."""
    if not dtype or _is_native(dtype):
        return array
    itemsize = array.shape[-1]
    if dtype[1] in "SU":
        dtype += str(itemsize // (4 if dtype[1] == "U" else 1))
    if 0 in array.shape:
        return np.empty(array.shape[:-1], dtype)
    return np.ascontiguousarray(array).view(dtype)[..., 0]
