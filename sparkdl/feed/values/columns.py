"""The columns of Arrow batches become numpy arrays by name, and are joined and cut.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.feed.values.arrays import convert, objects
from sparkdl.feed.values.dataframe_rows import tagged
from sparkdl.feed.values.encode import Codec
from sparkdl.feed.values.linalg import is_matrix, is_vector
from sparkdl.feed.values.ndarrays import Array
from sparkdl.feed.values.row_codec import row_schema

Columns = dict[str, Array]


def to_columns(batch: pa.RecordBatch, columns: Sequence[str] | None = None) -> Columns:
    """Return columns of a batch as arrays, by name.

    Columns are named as in the DataFrame; for a `RowEncoder` batch by the Row's or dict's
    fields, "0", "1", ... for tuples and lists, and "value" for rows of one value. A struct becomes
    a column for each of its fields, to any depth, like "address.city"; where the struct is null,
    so are they.

    Args:
        batch: from a DataFrame or from `RowEncoder`.
        columns: which columns; None means all. The name of a struct means all its fields.

    Raises:
        ConfigError: if there is no such column.
        FeedTypeError: if a column cannot be an array, see `arrays.to_numpy`, or two have one name.
    """
    parts = _parts(batch)
    found: Columns = {}
    for wanted in [None] if columns is None else columns:
        chosen = [part for part in parts if wanted is None or _is_within(part[0], wanted)]
        if not chosen and batch.num_columns:
            names = ", ".join(repr(name) for name, _, _ in parts)
            raise ConfigError(f"the feed has no column {wanted!r}; its columns are {names}")
        names_chosen = [name for name, _, _ in chosen]
        for name, column, codec in chosen:
            if names_chosen.count(name) > 1:
                raise FeedTypeError(
                    f"the feed has {names_chosen.count(name)} columns {name!r}. Rename all but one "
                    "before feeding (df.withColumnRenamed), or drop them."
                )
            found[name] = convert(column, codec, f"column {name!r}")
    return found


def concat(parts: Sequence[Mapping[str, Array]]) -> Columns:
    """Return the rows of `parts` one after another; a single part is not copied.

    Where rows are arrays whose shapes differ from part to part, the column becomes an object
    array with one array per row. Numbers get their common dtype, as numpy has it: float32 and
    float64 are float64, int64 and float32 are float64. Objects and anything else are objects.

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
    if not is_row and (codec is not None or not _is_plain_struct(column.type)):
        yield name, column, codec
        return
    names = [field.name for field in column.type]
    codecs = [None] * len(names) if codec is None else codec.of
    for part in zip(names, column.flatten(), codecs, strict=True):
        yield from _leaves(f"{name}.{part[0]}", *part[1:])


def _is_plain_struct(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) and not (is_vector(kind) or is_matrix(kind) or tagged(kind))


def _is_within(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}.")


def _join(arrays: list[Array], name: str) -> Array:
    arrays = [array for array in arrays if len(array)] or arrays[:1]
    if len({array.shape[1:] for array in arrays}) > 1:
        arrays = [objects(list(array)) for array in arrays]
    if not _mix(array.dtype for array in arrays):
        dtypes = " and ".join(dict.fromkeys(str(array.dtype) for array in arrays))
        raise FeedTypeError(
            f"column {name!r} holds values of types that do not mix: {dtypes}. Cast them to one "
            "type before feeding."
        )
    return np.concatenate(arrays)


def _mix(dtypes: Iterable[np.dtype[Any]]) -> bool:
    """Return whether values of these dtypes can share an array and mean what they meant."""
    kinds = {"number" if dtype.kind in "biufc" else dtype.kind for dtype in dtypes}
    return len(kinds - {"O"}) <= 1
