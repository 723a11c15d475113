"""The rows of a DataFrame's Arrow batch, as `df.rdd` would give them.

Runs in: child
"""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.feed.decode import make_rows, plain_values, vectors
from sparkdl.feed.tensors import Array, lengths, split

_VECTOR_FIELDS = ["type", "size", "indices", "values"]


def frame_rows(batch: pa.RecordBatch) -> list[Any]:
    """Return the rows of `batch` as pyspark Rows.

    Binary comes as bytearray, a struct as Row, a map as dict, a Spark ML vector as such, a
    timestamp as naive datetime in the process's time zone.
    """
    names = tuple(batch.schema.names)
    return make_rows(names, [_values(column) for column in batch.columns])


def is_vector(kind: pa.DataType) -> bool:
    """Return whether `kind` is how Spark writes a column of ML vectors (VectorUDT)."""
    return pa.types.is_struct(kind) and [field.name for field in kind] == _VECTOR_FIELDS


def is_list(kind: pa.DataType) -> bool:
    """Return whether `kind` is one of Arrow's list types."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def dense_vectors(column: pa.Array) -> Array:
    """Return a column of ML vectors of equal size as float64 [rows, size], sparse ones filled up.

    Args:
        column: a VectorUDT struct without nulls.

    Raises:
        ValueError: if the vectors' sizes differ.
    """
    counts = lengths(column.field("values"))
    is_sparse = column.field("type").to_numpy() == 0
    sizes = np.where(is_sparse, np.asarray(column.field("size").fill_null(0)), counts)
    if len(sizes) and sizes.min() != sizes.max():
        raise ValueError(f"vectors of {sizes.min()} to {sizes.max()} elements")
    width = int(sizes[0]) if len(sizes) else 0
    values: Array = column.field("values").flatten().to_numpy()
    if not is_sparse.any():
        return values.reshape(len(column), width)
    dense = np.zeros((len(column), width))
    row_of = np.repeat(np.arange(len(column)), counts)
    from_sparse = is_sparse[row_of]
    indices = column.field("indices").flatten().to_numpy()
    dense[row_of[from_sparse], indices] = values[from_sparse]
    dense[~is_sparse] = values[~from_sparse].reshape(-1, width)
    return dense


def _values(column: pa.Array) -> list[Any]:
    kind = column.type
    if column.null_count and pa.types.is_nested(kind):
        present = iter(_values(column.drop_null()))
        return [next(present) if is_valid else None for is_valid in column.is_valid().to_pylist()]
    if is_vector(kind):
        return _vectors(column)
    if pa.types.is_struct(kind):
        fields = [_values(column.field(i)) for i in range(kind.num_fields)]
        return make_rows(tuple(field.name for field in kind), fields)
    if pa.types.is_map(kind):
        entries = list(zip(_values(column.keys), _values(column.items), strict=True))
        ends = column.offsets.to_pylist()  # into all of keys and items, also where this is a slice
        return [dict(entries[start:stop]) for start, stop in pairwise(ends)]
    if is_list(kind):
        return split(_values(column.flatten()), lengths(column))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return [None if value is None else bytearray(value) for value in column.to_pylist()]
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        instants = plain_values(column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()))
        return [None if us is None else _local(us) for us in instants]
    return plain_values(column)


def _local(us: int) -> datetime:
    return datetime.fromtimestamp(us // 1_000_000).replace(microsecond=us % 1_000_000)


def _vectors(column: pa.Array) -> list[Any]:
    make = vectors("pyspark.ml.linalg")
    parts = (column.field(name).to_pylist() for name in _VECTOR_FIELDS)
    return [
        make.sparse(size, indices, values) if kind == 0 else make.dense(values)
        for kind, size, indices, values in zip(*parts, strict=True)
    ]
