"""Ranges of rows: what they name together, and what they leave."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise

from hypothesis import given, strategies as st

from sparkdl.core.row_ranges import Slice, Sliced, Span, merge_ranges, spans_within, uncovered

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


@given(SPANS, st.integers(1, 12), st.integers(1, 4))
def test_rows_are_put_in_the_order_of_the_slices_of_their_batches(
    spans: list[Span], batch_rows: int, count: int
) -> None:
    ends = [*accumulate(each.size for each in Slice.all(batch_rows, count))]
    rows, sliced = rows_of(spans), Sliced(tuple(spans), Slice.all(batch_rows, count))
    found, of = [*sliced.placed()], [bisect_right(ends, row % batch_rows) for _, row in rows]
    wanted = sorted(range(len(rows)), key=of.__getitem__)
    assert [at + i for at, (_, start, stop) in found for i in range(stop - start)] == wanted
    assert rows_of([span for _, span in found]) == [rows[at] for at in wanted]
    assert all(of[at] == of[at + stop - start - 1] for at, (_, start, stop) in found)
    owners = [i for i, (_, start, stop) in enumerate(spans) for _ in range(start, stop)]
    for at, (_, row) in enumerate(rows):
        place = sliced.starts[owners[at]][of[at]]
        assert wanted[place + sliced.slices[of[at]].before(row)] == at


@given(SPANS, st.sets(st.integers(0, 50)))
def test_part_of_a_segment_is_the_rows_at_its_offsets(parts: list[Span], wanted: set[int]) -> None:
    ranges = [(offset, offset + 1) for offset in sorted(wanted)]
    wanted_rows = [row for i, row in enumerate(rows_of(parts)) if i in wanted]
    assert rows_of(spans_within(parts, ranges)) == wanted_rows
