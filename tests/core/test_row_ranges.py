"""Ranges of rows: what they name together, and what they leave."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.core.row_ranges import merge_ranges, uncovered

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def offsets(ranges: list[tuple[int, int]]) -> set[int]:
    return {offset for start, stop in ranges for offset in range(start, stop)}


@given(RANGES)
def test_merged_ranges_cover_the_same_offsets_with_gaps_between(
    ranges: list[tuple[int, int]],
) -> None:
    merged = merge_ranges(ranges)
    assert offsets(merged) == offsets(ranges)
    assert all(start < stop for start, stop in merged)
    assert all(left[1] < right[0] for left, right in pairwise(merged))


@given(st.integers(0, 45), st.integers(0, 45), RANGES)
def test_uncovered_is_what_the_ranges_leave(
    start: int, stop: int, ranges: list[tuple[int, int]]
) -> None:
    missing = uncovered(start, stop, ranges)
    assert offsets(missing) == set(range(start, stop)) - offsets(ranges)
    assert missing == merge_ranges(missing)
