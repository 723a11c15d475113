"""Ranges of rows: what they name together, and what they leave."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from sparkdl.core.row_ranges import Span, merge_ranges, spans_within, uncovered

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def offsets(ranges: list[tuple[int, int]]) -> set[int]:
    return {offset for start, stop in ranges for offset in range(start, stop)}


@given(RANGES)
def test_merged_ranges_cover_the_same_offsets_with_gaps(ranges: list[tuple[int, int]]) -> None:
    merged = merge_ranges(ranges)
    assert offsets(merged) == offsets(ranges)
    assert all(start < stop for start, stop in merged)
    assert all(left[1] < right[0] for left, right in pairwise(merged))


@given(st.integers(0, 45), st.integers(0, 45), RANGES)
def test_uncovered_is_what_is_left(start: int, stop: int, ranges: list[tuple[int, int]]) -> None:
    missing = uncovered(start, stop, ranges)
    assert offsets(missing) == set(range(start, stop)) - offsets(ranges)
    assert missing == merge_ranges(missing)


SPANS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 9)).map(
        lambda part: (part[0], part[1], part[1] + part[2])
    ),
    max_size=5,
)


def rows_of(parts: list[Span]) -> list[tuple[int, int]]:
    return [(part, row) for part, start, stop in parts for row in range(start, stop)]


@given(SPANS, st.sets(st.integers(0, 50)))
def test_part_of_a_segment_is_the_rows_at_its_offsets(parts: list[Span], wanted: set[int]) -> None:
    ranges = [(offset, offset + 1) for offset in sorted(wanted)]
    rows = rows_of(parts)
    wanted_rows = [row for i, row in enumerate(rows) if i in wanted]
    assert rows_of(spans_within(parts, ranges)) == wanted_rows
