"""Rows of an RDD become Arrow record batches, and come back as the rows they were.

A batch made here carries a `RowSchema` in its schema's metadata. A batch without one comes from a
DataFrame (`mapInArrow`); its rows come back as `df.rdd` would give them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from datetime import date, datetime
from functools import lru_cache
from itertools import pairwise
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from sparkdl.core.errors import ProtocolError
from sparkdl.values.decode import decode, frame_rows, make_rows
from sparkdl.values.encode import Codec, encode, row_fields

_KEY = b"sparkdl.rows"
# With more changes of kind or type than this, a batch would be cut into tiny ones.
_MAX_CUTS = 8
_FIXED = frozenset({NoneType, bool, int, float, date, datetime})
_SAMPLE = 32


class RowSchema(msgspec.Struct, frozen=True):
    """How the columns of a batch were rows.

    Attributes:
        kind: tuple, list, row (pyspark's) or dict, whose fields are the columns; or value: each
            row is the one column's value.
        columns: one codec per column.
    """

    kind: str
    columns: tuple[Codec, ...]


def encode_rows(
    rows: Iterable[Any], max_nbytes: int = 4 << 20, max_rows: int = 10_000
) -> Iterator[pa.RecordBatch]:
    """Yield batches with the same rows in the same order; holds one batch's rows at a time.

    Rows that follow each other share a batch, and with it a schema, as long as they have the
    same kind, width and types. Where these alternate, so that batches would be tiny, they share
    one all the same: a mixed column is an Arrow union then, and rows of different width are values
    of a single column.

    Args:
        max_nbytes: where a batch ends, by an estimate of its bytes in Arrow; a row that is
            larger has a batch of its own.
        max_rows: where a batch ends, by rows.

    Raises:
        FeedTypeError: if a row holds a value that cannot travel; it names field and type.
    """
    pending: list[Any] = []
    pending_nbytes = 0
    for row in rows:
        nbytes = _estimate_nbytes(row)
        is_full = pending_nbytes + nbytes > max_nbytes or len(pending) >= max_rows
        if pending and is_full:
            yield from _encode_batch(pending)
            pending, pending_nbytes = [], 0
        pending.append(row)
        pending_nbytes += nbytes
    if pending:
        yield from _encode_batch(pending)


def rows(batch: pa.RecordBatch) -> list[Any]:
    """Return the rows of `batch` as they were: those given to `encode_rows`, or `df.rdd`'s."""
    schema = row_schema(batch)
    if schema is None:
        return frame_rows(batch)
    columns = [decode(batch.column(i), codec) for i, codec in enumerate(schema.columns)]
    if schema.kind == "value":
        return columns[0]
    if schema.kind == "row":
        return make_rows(tuple(batch.schema.names), columns, batch.num_rows)
    if schema.kind == "dict":
        names = batch.schema.names
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    tuples = zip(*columns, strict=True)
    return list(tuples) if schema.kind == "tuple" else list(map(list, tuples))


def row_schema(batch: pa.RecordBatch) -> RowSchema | None:
    """Return how the columns of `batch` were rows, or None if it comes from a DataFrame.

    Raises:
        ProtocolError: if the batch carries something else under our name.
    """
    data = (batch.schema.metadata or {}).get(_KEY)
    return None if data is None else _parse_schema(data)


@lru_cache(maxsize=64)
def _parse_schema(data: bytes) -> RowSchema:
    try:
        return msgspec.json.decode(data, type=RowSchema)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ProtocolError(f"a feed's batch describes its rows wrongly: {error}") from None


def _encode_batch(rows: list[Any]) -> Iterator[pa.RecordBatch]:
    layouts = _layouts(rows)
    cuts = [i for i, (a, b) in enumerate(pairwise(layouts), start=1) if a != b]
    # Rows that alternate are the values of one column: a batch for each run would have a few rows.
    if len(cuts) > _MAX_CUTS:
        yield from _encode_columns("value", ["value"], [rows])
        return
    for start, stop in pairwise([0, *cuts, len(rows)]):
        kind, fields = layouts[start] if len(layouts) > 1 else layouts[0]
        run = rows[start:stop]
        if kind == "value":
            yield from _encode_columns(kind, ["value"], [run])
        elif kind == "dict":
            names = list(fields)
            yield from _encode_columns(kind, names, [[row[name] for row in run] for name in names])
        else:
            names = list(fields) if kind == "row" else list(map(str, range(fields)))
            yield from _encode_columns(kind, names, list(zip(*run, strict=True)))


def _encode_columns(
    kind: str, names: Sequence[str], columns: Sequence[Sequence[Any]]
) -> Iterator[pa.RecordBatch]:
    cuts = sorted({cut for column in columns for cut in _type_cuts(column)})
    # A column of mixed types is a union then, and the batch stays whole.
    if len(cuts) > _MAX_CUTS:
        cuts = []
    for start, stop in pairwise([0, *cuts, len(columns[0])]):
        parts = [
            encode(column[start:stop], "the row" if kind == "value" else f"field {name!r}")
            for name, column in zip(names, columns, strict=True)
        ]
        schema = RowSchema(kind, tuple(codec for _, codec in parts))
        fields = [pa.field(name, array.type) for name, (array, _) in zip(names, parts, strict=True)]
        metadata = {_KEY: msgspec.json.encode(schema)}
        arrays = [array for array, _ in parts]
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields, metadata=metadata))


def _layouts(rows: list[Any]) -> list[tuple[str, Any]]:
    """Return each row's kind and fields, or only the first if all rows are the same."""
    types = set(map(type, rows))
    if types in ({tuple}, {list}, {dict}):
        fields = set(map(tuple, rows)) if types == {dict} else set(map(len, rows))
        if len(fields) == 1:
            return [_layout(rows[0])]
    return [_layout(row) for row in rows]


def _layout(row: Any) -> tuple[str, Any]:
    """Return the kind of `row`, and its width, names or keys; rows alike in both share columns."""
    fields: Hashable
    if isinstance(row, tuple):
        fields = row_fields(row)
        kind, fields = ("row", fields) if fields else ("tuple", len(row))
    elif isinstance(row, list):
        kind, fields = "list", len(row)
    elif isinstance(row, dict) and all(type(key) is str for key in row):
        kind, fields = "dict", tuple(row)
    else:
        return "value", None
    return (kind, fields) if len(row) else ("value", None)  # a batch needs a column


def _type_cuts(column: Sequence[Any]) -> list[int]:
    """Return where the type changes along a column; None goes with any."""
    # The common case first: one pass in C finds a column of one type.
    if len(set(map(type, column)) - {NoneType}) <= 1:
        return []
    cuts: list[int] = []
    last: type | None = None
    for i, value in enumerate(column):
        if value is not None:
            if last is not None and type(value) is not last:
                cuts.append(i)
            last = type(value)
    return cuts


def _estimate_nbytes(value: Any) -> int:
    """Return about how many bytes `value` takes in Arrow; long sequences are sampled."""
    kind = type(value)
    if kind in _FIXED:
        return 8
    if isinstance(value, str | bytes | bytearray):
        return len(value) + 4
    if isinstance(value, np.ndarray | np.generic):
        return value.nbytes
    if isinstance(value, dict):
        return _estimate_nbytes(list(value)) + _estimate_nbytes(list(value.values()))
    if isinstance(value, list | tuple):
        count = len(value)
        sample = value if count <= _SAMPLE else value[:: count // _SAMPLE]
        if _FIXED.issuperset(map(type, sample)):
            return 8 * count
        return 4 + sum(map(_estimate_nbytes, sample)) * count // max(len(sample), 1)
    parts = (getattr(value, "indices", None), getattr(value, "values", None))  # pyspark's vectors
    return 16 + sum(part.nbytes for part in parts if isinstance(part, np.ndarray))
