"""Nodes get equally many rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.feed.transfer.balance import level

TOTALS = st.lists(st.integers(0, 60), max_size=8)


def pour_one_by_one(num_rows: int, totals: list[int]) -> list[int]:
    shares = [0] * len(totals)
    for _ in range(num_rows if totals else 0):
        # The lowest now; among equals, who was lowest at first, then the lower index.
        lowest = min(range(len(totals)), key=lambda n: (totals[n] + shares[n], totals[n], n))
        shares[lowest] += 1
    return shares


@given(st.integers(0, 200), TOTALS)
def test_level_is_the_same_as_giving_each_row_to_the_lowest_node(
    num_rows: int, totals: list[int]
) -> None:
    assert level(num_rows, totals) == pour_one_by_one(num_rows, totals)


@given(st.integers(0, 10**12), TOTALS)
def test_level_gives_every_row_away(num_rows: int, totals: list[int]) -> None:
    shares = level(num_rows, totals)
    assert sum(shares) == (num_rows if totals else 0)
    assert all(share >= 0 for share in shares)


def test_level_fills_the_lowest_first_and_spreads_the_rest() -> None:
    assert level(7, [10, 0, 0]) == [0, 4, 3]
    assert level(5, [2, 1, 0]) == [0, 2, 3]


def test_level_refuses_negative_rows() -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        level(-1, [0])
