"""Many Python numbers become one numpy array, in C and with their types checked.

Runs in: feeder, child

Marshal's format 2 writes a list or tuple as a header of 5 bytes and then, for each float, "g" and 8
bytes, for each int of 32 bits, "i" and 4 bytes, little-endian. One C call thus checks types and
takes values, and reads each object once: twice as fast as `set(map(type, values))` and `pa.array`.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from itertools import groupby
from types import NoneType
from typing import Any

import numpy as np

from sparkdl.feed.values.ndarrays import Array

_LAYOUTS = {
    float: (ord("g"), np.dtype([("tag", "u1"), ("value", "<f8")])),
    int: (ord("i"), np.dtype([("tag", "u1"), ("value", "<i4")])),
}
_HEADER_NBYTES = 5


def pack_numbers(values: Sequence[Any]) -> Array | None:
    """Return values that are all float, or all int of 32 bits, as one float64 or int64 array.

    Returns:
        None if the values are anything else.
    """
    kind = type(values[0]) if len(values) else NoneType
    if kind not in _LAYOUTS:
        return None
    items = _records(values, _LAYOUTS[kind][1])
    return None if items is None else _numbers(items, kind)


def pack_rows(rows: Sequence[Any], max_runs: int) -> list[Array] | None:
    """Return lists or tuples of one length as arrays [rows, columns], one for each run of a type.

    Returns:
        None if a column is not all float or all int of 32 bits, or the type changes along a row
        more often than `max_runs`.
    """
    runs = [(kind, len(list(group))) for kind, group in groupby(map(type, rows[0]))]
    if len(runs) > max_runs or not {kind for kind, _ in runs} <= _LAYOUTS.keys():
        return None
    fields = [(f"run{i}", _LAYOUTS[kind][1], (width,)) for i, (kind, width) in enumerate(runs)]
    items = _records(rows, np.dtype([("header", f"V{_HEADER_NBYTES}"), *fields]))
    if items is None:
        return None
    arrays = [_numbers(items[f"run{i}"], kind) for i, (kind, _) in enumerate(runs)]
    packed = [array for array in arrays if array is not None]
    return packed if len(packed) == len(runs) else None


def _records(values: Any, layout: np.dtype[Any]) -> Array | None:
    try:
        data = marshal.dumps(values, 2)
    except ValueError:  # something in there is no plain value
        return None
    if len(data) != _HEADER_NBYTES + len(values) * layout.itemsize:
        return None
    return np.frombuffer(data, layout, offset=_HEADER_NBYTES)


def _numbers(items: Array, kind: type) -> Array | None:
    # Nothing passes for a number: what comes first has a tag, and each tells where the next is.
    is_kind = (items["tag"] == _LAYOUTS[kind][0]).all()
    return np.asarray(items["value"].astype(kind)) if is_kind else None
