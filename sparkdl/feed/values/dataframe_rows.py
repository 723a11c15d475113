"""The rows of a DataFrame's Arrow batch, as `df.rdd` would give them.

Runs in: child
"""

from __future__ import annotations

import importlib
from datetime import datetime
from itertools import pairwise
from typing import Any

import pyarrow as pa

from sparkdl.feed.values.decode import make_rows, plain_values
from sparkdl.feed.values.linalg import is_matrix, matrices, vectors
from sparkdl.feed.values.linalg import is_vector as is_vector  # answers.py asks for it here
from sparkdl.feed.values.ndarrays import lengths, split

_TAGGED = {  # what Spark puts in the metadata of a struct's field: pyspark's class, its arguments
    b"variant": ("VariantVal", ("value", "metadata")),
    b"geometry": ("Geometry", ("wkb", "srid")),
    b"geography": ("Geography", ("wkb", "srid")),
}


def frame_rows(batch: pa.RecordBatch) -> list[Any]:
    """Return the rows of `batch` as pyspark Rows.

    Binary comes as bytes with any version of Spark, a struct as Row, a map as dict, a Spark ML
    vector or matrix as such, a variant or geometry as pyspark's class, a timestamp as naive
    datetime in the process's time zone. A value of a user-defined type other than Spark ML's comes
    as it is stored, because Arrow carries no more.
    """
    names = tuple(batch.schema.names)
    return make_rows(names, [_values(column) for column in batch.columns], batch.num_rows)


def is_list(kind: pa.DataType) -> bool:
    """Return whether `kind` is one of Arrow's list types."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def tagged(kind: pa.DataType) -> tuple[str, tuple[str, str]] | None:
    """Return pyspark's class, and the fields it is made of, for a struct that stands for one."""
    if not pa.types.is_struct(kind):
        return None
    found = [_TAGGED[tag] for field in kind for tag in field.metadata or {} if tag in _TAGGED]
    return found[0] if found and {field.name for field in kind} == set(found[0][1]) else None


def _values(column: pa.Array) -> list[Any]:
    kind = column.type
    if column.null_count and pa.types.is_nested(kind):
        present = iter(_values(column.drop_null()))
        return [next(present) if is_valid else None for is_valid in column.is_valid().to_pylist()]
    if is_vector(kind):
        return vectors(column)
    if is_matrix(kind):
        return matrices(column)
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
        return split(_values(column.flatten()), lengths(column))
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        instants = plain_values(column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()))
        return [None if us is None else _local(us) for us in instants]
    return plain_values(column)


def _maps(column: pa.Array) -> list[Any]:
    ends = column.offsets.to_pylist()  # into all of keys and items, also where this is a slice
    count = ends[-1] - ends[0] if ends else 0
    parts = (_values(part.slice(ends[0], count)) for part in (column.keys, column.items))
    entries = list(zip(*parts, strict=True))
    return [dict(entries[start - ends[0] : stop - ends[0]]) for start, stop in pairwise(ends)]


def _local(us: int) -> datetime:
    return datetime.fromtimestamp(us // 1_000_000).replace(microsecond=us % 1_000_000)
