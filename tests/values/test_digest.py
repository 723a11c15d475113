"""A digest of rows: the same however they are cut, another one for any other value."""

from __future__ import annotations

import datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pyarrow as pa
from hypothesis import given, strategies as st

from sparkdl.values.digest import RowDigest

KINDS: dict[pa.DataType, tuple[Any, Any]] = {
    pa.int64(): (1, 2),
    pa.float32(): (0.5, 0.25),
    pa.bool_(): (True, False),
    pa.string(): ("ab", "ac"),
    pa.large_string(): ("", "x"),
    pa.binary(): (b"\0", b"\0\0"),
    pa.binary(2): (b"ab", b"ba"),
    pa.decimal128(9, 2): (Decimal("1.20"), Decimal("1.21")),
    pa.timestamp("us"): (datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 2)),
    pa.list_(pa.float64()): ([1.0, None], [1.0, 0.0]),
    pa.large_list(pa.string()): (["a", "b"], ["ab"]),
    pa.list_(pa.int16(), 2): ([1, 2], [2, 1]),
    pa.map_(pa.string(), pa.bool_()): ([("k", True)], [("k", False)]),
    pa.struct({"a": pa.list_(pa.bool_())}): ({"a": [True, None]}, {"a": [True]}),
    pa.dictionary(pa.int8(), pa.string()): ("one", "other"),
}


def digest(batch: pa.RecordBatch, *cuts: int) -> int:
    found, borders = RowDigest(), [0, *sorted(cuts), batch.num_rows]
    for start, stop in pairwise(borders):
        found.add(batch.slice(start, stop - start))
    assert found.rows == batch.num_rows
    return found.value


def rows(columns: list[list[Any]]) -> pa.RecordBatch:
    arrays = [pa.array(column, kind) for column, kind in zip(columns, KINDS, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=[f"c{i}" for i in range(len(arrays))])


@given(st.data())
def test_cuts_do_not_matter_and_every_value_does(data: st.DataObject) -> None:
    many = data.draw(st.integers(1, 40))
    columns = [
        data.draw(st.lists(st.sampled_from([None, *pair]), min_size=many, max_size=many))
        for pair in KINDS.values()
    ]
    cuts = data.draw(st.lists(st.integers(0, many), max_size=4))
    batch = rows(columns)
    before = digest(batch)
    assert digest(batch, *cuts) == before
    padded = pa.Table.from_batches([rows([[None]] * len(KINDS)), batch])
    assert digest(padded.combine_chunks().to_batches()[0].slice(1), *cuts) == before
    place = data.draw(st.integers(0, len(columns) - 1))
    row = data.draw(st.integers(0, many - 1))
    others = [each for each in (None, *[*KINDS.values()][place]) if each != columns[place][row]]
    columns[place][row] = data.draw(st.sampled_from(others))
    assert digest(rows(columns), *cuts) != before


def test_order_and_columns_matter() -> None:
    table = pa.table({"a": [1, 2, 3], "b": [1, 2, 3]}).to_batches()[0]
    others = [table.take(pa.array([1, 0, 2])), table.slice(0, 2), table.select(["a"])]
    assert len({digest(each) for each in (table, *others)}) == len(others) + 1


def test_values_of_nulls_do_not_matter() -> None:
    def with_middle(byte: int) -> pa.RecordBatch:
        values = pa.py_buffer(bytes([1] * 8 + [byte] * 8 + [1] * 8))
        array = pa.Array.from_buffers(pa.int64(), 3, [pa.py_buffer(b"\x05"), values])
        return pa.RecordBatch.from_arrays([array], ["a"])

    assert digest(with_middle(5)) == digest(with_middle(6))
