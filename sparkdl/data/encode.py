"""Columns become records: each value the feature that it is, many rows at a time.

Runs in: feeder
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.core.errors import WriteError
from sparkdl.data.columns import SEQUENCE_EXAMPLE, Column, Kind
from sparkdl.data.wire import (
    Bools,
    Ints,
    contents,
    encode_varints,
    field,
    from_contents,
    join,
    prefixed,
)

# Offsets of 64 bits, which `wire.py` works with throughout.
_WIDE = {Kind.BYTES: pa.large_binary(), Kind.INT64: pa.int64()}
_FILL = {Kind.BYTES: b"", Kind.FLOAT: 0.0, Kind.INT64: 0}
"""The placeholder of a null, which is then left out."""


def encode(
    batch: pa.RecordBatch, columns: Sequence[Column], record_type: str
) -> pa.LargeBinaryArray:
    """Return each row as a serialised message.

    Args:
        columns: those of `batch`, in its order.
        record_type: `Example` or `SequenceExample`.

    Raises:
        WriteError: for what a record cannot hold: a null within an array, a double beyond float.
    """
    nothing = pa.array([b""] * batch.num_rows, pa.large_binary())
    features, feature_lists = [nothing], [nothing]
    for column, array in zip(columns, batch.columns, strict=True):
        if column.depth == 2:
            feature_lists.append(_feature_list(column, array))
        else:
            features.append(_feature(column, array))
    message = prefixed(join(features), lambda length: field(1, length))
    if record_type != SEQUENCE_EXAMPLE:
        return message
    return join([message, prefixed(join(feature_lists), lambda length: field(2, length))])


def _feature(column: Column, array: pa.Array) -> pa.LargeBinaryArray:
    """Return each row's entry of the map of features; null where the row has none."""
    if column.depth == 0:
        values = array.cast(_WIDE.get(column.kind, column.leaf)).fill_null(_FILL[column.kind])
        offsets = np.arange(len(array) + 1)
    else:
        values, offsets = _flat(array)
    lists = _lists(column, values, offsets, _is_valid(array))

    def entry(length: int) -> bytes:
        head = _feature_head(column.kind, length)
        return _entry_head(column.name, len(head) + length) + head

    return prefixed(lists, entry)


def _feature_list(column: Column, array: pa.ListArray) -> pa.LargeBinaryArray:
    """Return each row's entry of the map of feature lists; null where the row has none."""
    inner, outer_offsets = _flat(array)
    values, offsets = _flat(inner)
    lists = _lists(column, values, offsets, _is_valid(inner))
    features = prefixed(lists, lambda length: _feature_head(column.kind, length))
    steps = prefixed(join([features]), lambda length: field(1, length))
    places, data = contents(steps)
    rows = from_contents(places[outer_offsets], data, _is_valid(array))
    return prefixed(rows, lambda length: _entry_head(column.name, length))


def _flat(array: pa.ListArray) -> tuple[pa.Array, Ints]:
    """Return the elements of all lists, and the n + 1 offsets of each list in them."""
    sizes = pc.list_value_length(array).fill_null(0).to_numpy()
    return array.flatten(), np.concatenate(
        [np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)]
    )


def _is_valid(array: pa.Array) -> Bools | None:
    return array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None


def _lists(
    column: Column, values: pa.Array, offsets: Ints, is_valid: Bools | None
) -> pa.LargeBinaryArray:
    """Return the contents of BytesList, FloatList or Int64List, without the head of packed ones."""
    if values.null_count:
        raise WriteError(
            f"column {column.name!r} has a null within an array, which a TFRecord cannot hold. "
            "Replace or remove it: filter(c, x -> x is not null)"
        )
    if column.kind is Kind.BYTES:
        whole = values.cast(_WIDE[column.kind])
        places, data = contents(prefixed(whole, lambda length: field(1, length)))
        return from_contents(places[offsets], data, is_valid)
    if column.kind is Kind.INT64:
        data, places = encode_varints(values.cast(_WIDE[column.kind]).to_numpy())
        return from_contents(places[offsets], data, is_valid)
    numbers = values.to_numpy()
    # An overflow is an error below, with the column's name, and not numpy's warning.
    with np.errstate(over="ignore"):
        floats = numbers.astype("<f4")
    if numbers.dtype != floats.dtype and (np.isinf(floats) & ~np.isinf(numbers)).any():
        largest = np.abs(numbers[np.isfinite(numbers)]).max()
        raise WriteError(
            f"column {column.name!r} has {largest:g}, which is beyond float: TFRecords hold 32 "
            "bits. Scale it, or write it as a string"
        )
    return from_contents(offsets * 4, np.ascontiguousarray(floats).view(np.uint8), is_valid)


def _entry_head(name: str, length: int) -> bytes:
    """Return what stands before a value of that length in a map."""
    key = name.encode()
    inner = field(1, len(key)) + key + field(2, length)
    return field(1, len(inner) + length) + inner


def _feature_head(kind: Kind, length: int) -> bytes:
    """Return what stands before a list's contents in a `Feature`; numbers are packed."""
    packed = field(1, length) if length and kind is not Kind.BYTES else b""
    return field(kind, len(packed) + length) + packed
