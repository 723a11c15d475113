"""Rows by segment become rows by partition, also of segments that are gone."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.control.coverage import EpochRows
from sparkdl.feed.store.provenance import Provenance, rows_left, within
from sparkdl.feed.transfer.append import Span

spans = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 9)).map(
        lambda part: (part[0], part[1], part[1] + part[2])
    ),
    max_size=5,
)
offsets = st.sets(st.integers(0, 50))


def rows_of(parts: list[Span]) -> list[tuple[int, int]]:
    return [(part, row) for part, start, stop in parts for row in range(start, stop)]


@given(spans, offsets)
def test_part_of_a_segment_is_the_rows_at_these_offsets(
    parts: list[Span], wanted: set[int]
) -> None:
    ranges = [(offset, offset + 1) for offset in sorted(wanted)]
    rows = rows_of(parts)
    assert rows_of(within(parts, ranges)) == [rows[i] for i in sorted(wanted) if i < len(rows)]


@given(spans, st.dictionaries(st.integers(0, 2), offsets))
def test_rows_left_are_those_that_are_not_done(
    parts: list[Span], done: dict[int, set[int]]
) -> None:
    given_rows = {part: tuple((row, row + 1) for row in rows) for part, rows in done.items()}
    left = rows_left(parts, given_rows)
    rows = rows_of(parts)
    kept = [row for start, stop in left for row in rows[start:stop]]
    assert kept == [(part, row) for part, row in rows if row not in done.get(part, ())]
    assert all(stop < start for (_, stop), (start, _) in pairwise(left))


def test_rows_are_told_by_the_epoch_that_read_them_and_merged() -> None:
    origins = Provenance()
    origins.add(0, 0, ((0, 0, 10),))
    origins.add(1, 0, ((0, 10, 15), (1, 0, 5)))
    used: EpochRows = {0: {0: ((0, 10),), 1: ((0, 7),)}, 1: {0: ((2, 4), (6, 8)), 9: ((0, 1),)}}
    assert origins.rows(used) == {0: {0: ((0, 15),), 1: ((0, 2),)}, 1: {0: ((2, 4), (6, 8))}}
    assert origins.rows({}, dropped_to=0) == {0: {0: ((0, 15),), 1: ((0, 5),)}}


def test_origins_stay_until_the_last_epoch_that_reads_the_segment_is_forgotten() -> None:
    origins = Provenance()
    origins.add(0, 0, ((0, 0, 10),))
    origins.settle(2)  # epochs 0 to 2 read it
    origins.add(1, 3, ((0, 10, 20),))
    origins.forget(2)
    everything: EpochRows = {2: {0: ((0, 1),)}, 3: {1: ((0, 1),)}}
    assert origins.rows(everything) == {2: {0: ((0, 1),)}, 3: {0: ((10, 11),)}}
    origins.forget(3)
    assert origins.rows(everything) == {3: {0: ((10, 11),)}}
