"""Columns as the frameworks' tensors hold them: times as integers, rows of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.values.columns import Columns, is_csr, is_text, is_within, objects_in
from sparkdl.values.ndarrays import Array

LENGTH, MASK = ".length", ".mask"
"""Ends of the names of a padded column's further columns: int64 `[rows]`, bool `[rows, length]`."""
Padding = Mapping[str, int | None]
"""Columns with the length that their rows are padded to; `None` is the batch's longest row."""


def as_numbers(name: str, column: Array) -> Array:
    """Return dates as int64 days since 1970, other times as int64 microseconds, the rest as it is.

    Timestamps count from 1970 in UTC, times of day from midnight. NaT is refused, and sparse rows.
    """
    if is_csr(column):
        raise FeedTypeError(
            f"column {name!r} is sparse, and must be an array here: leave it out of sparse="
        )
    if column.dtype.kind not in "mM":
        return column
    if np.isnat(column).any():
        raise FeedTypeError(f"column {name!r} holds NaT, which is no time: drop or fill such rows")
    is_date = column.dtype.kind == "M" and np.datetime_data(column.dtype)[0] == "D"
    # Spark's own units.
    unit = "D" if is_date else "us"
    return column.astype(f"{column.dtype.kind}8[{unit}]", copy=False).view(np.int64)


def no_tensor(name: str, column: Array, framework: str) -> FeedTypeError:
    return FeedTypeError(
        f"column {name!r} holds {objects_in(column)}, which {framework} has no tensor for. Feed it "
        "as numbers, arrays of one shape, or read it with ctx.batches. Where a map_fun or train_fn "
        f"reads the feed, pad={{{name!r}: None}}, or a length instead of None, fills up arrays of "
        "different lengths"
    )


def check_padding(padding: Padding) -> None:
    lengths = padding.values() if isinstance(padding, Mapping) else [0]
    if not all(each is None or (isinstance(each, int) and each > 0) for each in lengths):
        raise ConfigError(
            f"pad={padding!r}: must be a dict of columns with a length of 1 or more each, or None "
            "for the longest row of a batch"
        )


def check_shared(padding: Padding) -> None:
    if None in padding.values():
        raise ConfigError(
            f"pad={dict(padding)}: the nodes share arrays, which need one length on all of them. "
            "Give a number instead of None"
        )


def no_sparse(sparse: Sequence[str], where: str) -> None:
    if sparse:
        raise ConfigError(
            f"sparse={list(sparse)}: cannot be used {where}. Leave it out: vectors are then made "
            "dense, one batch at a time"
        )


def stored(columns: tuple[str, ...] | None, padding: Padding) -> tuple[str, ...] | None:
    """Return the columns of the feed from which `padded` makes the wanted ones."""
    made = {name + end: name for name in padding for end in (LENGTH, MASK)}
    return None if columns is None else tuple(dict.fromkeys(made.get(c, c) for c in columns))


def padded(columns: Columns, padding: Padding, wanted: tuple[str, ...] | None) -> Columns:
    """Return columns with rows filled up with zeros or empty texts, and their lengths and masks.

    The name of a column in `wanted` means its length and mask as well.
    """
    found = dict(columns)
    for name, length in padding.items():
        if name not in found:
            raise ConfigError(
                f"pad= names {name!r}: must name columns of the feed, which are "
                f"{', '.join(columns)}"
            )
        column = found.pop(name)
        names = (name, name + LENGTH, name + MASK)
        made = dict(zip(names, _filled(name, column, length), strict=True))
        if taken := made.keys() & found.keys():
            raise ConfigError(f"pad= adds a column {taken.pop()!r}; rename the one of the feed")
        found |= {
            each: array
            for each, array in made.items()
            if wanted is None or any(is_within(each, column) for column in wanted)
        }
    return found


def _unnested(name: str, column: Array) -> tuple[Array, Array]:
    """Return the values of rows of different lengths one after another, and the lengths."""
    if column.ndim > 1:
        # Rows of equal length are one array, and not an array of arrays.
        counts = np.full(len(column), column.shape[1], np.int64)
        return column.reshape(-1, *column.shape[2:]), counts
    if column.dtype != object or not all(isinstance(v, np.ndarray) for v in column.flat):
        raise FeedTypeError(
            f"column {name!r} holds {objects_in(column)}, and must hold arrays. Feed arrays "
            "in all rows, or leave it out of pad="
        )
    # An empty row says nothing of the shape behind its first dimension.
    parts = [part for part in column if len(part)] or [column[0]]
    if len({part.shape[1:] for part in parts}) > 1:
        raise FeedTypeError(
            f"column {name!r} holds arrays that differ in more than their first dimension. Make "
            "their other dimensions equal, or read the column with ctx.batches"
        )
    return np.concatenate(parts), np.fromiter(map(len, column), np.int64, len(column))


def _filled(name: str, column: Array, length: int | None) -> tuple[Array, Array, Array]:
    flat, lengths = _unnested(name, column)
    is_object = flat.dtype == object
    if is_object and not is_text(flat):
        kind = objects_in(flat)
        raise FeedTypeError(
            f"column {name!r} holds arrays of {kind}, and pad= can only fill one dimension. "
            "Flatten them, or read the column with ctx.batches"
        )
    longest = int(lengths.max(initial=0))
    if length is not None and longest > length:
        raise FeedTypeError(
            f"column {name!r} has a row of length {longest}, and pad={{{name!r}: {length}}} does "
            f"not truncate: give a larger length, or feed functions.slice({name!r}, 1, {length})"
        )
    mask = np.arange(longest if length is None else length) < lengths[:, None]
    shape = (*mask.shape, *flat.shape[1:])
    rows = np.full(shape, "", object) if is_object else np.zeros(shape, flat.dtype)
    # The mask is filled row by row, as `flat` lies.
    rows[mask] = flat
    return rows, lengths, mask
