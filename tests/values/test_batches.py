"""Batches get the right size: small ones are joined, large ones cut."""

from __future__ import annotations

from sparkdl.values.batches import halve, join_small
from tests.doubles.feeds import numbers


def test_small_batches_of_one_schema_are_joined() -> None:
    rows = list(range(0, 5000, 10))
    found = list(join_small((numbers(row, row + 10) for row in rows), 4000))
    assert [batch.num_rows for batch in found] == [500] * 10
    large = list(join_small(iter([numbers(0, 5000), numbers(0, 0)]), 4000))
    assert [batch.num_rows for batch in large] == [5000]
    mixed = list(join_small(iter([numbers(0, 1), numbers(1, 2, width=2), numbers(2, 3)]), 4000))
    assert [batch.num_rows for batch in mixed] == [1, 1, 1]


def test_rows_that_come_slowly_are_not_held_back_for_others() -> None:
    assert [b.num_rows for b in join_small((numbers(i, i + 1) for i in range(3)), 4000, 0)] == [
        *(1, 1, 1)
    ]


def test_large_batches_are_cut_and_a_large_row_comes_alone() -> None:
    pieces = list(halve(numbers(0, 5000), 8000))
    assert all(4000 < piece.nbytes <= 8000 for piece in pieces)
    assert [x for piece in pieces for x in piece.column(0).to_pylist()] == list(range(5000))
    assert [piece.num_rows for piece in halve(numbers(0, 3), 1)] == [1, 1, 1]
