"""Rows are shared out evenly, and ranges of offsets add up."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.core.row_ranges import merge_ranges, uncovered
from sparkdl.feed.reader.batches import Tail, agreed_steps, next_share
from sparkdl.feed.transfer.balance import level

NODES = st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=8)
RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def offsets(ranges: list[tuple[int, int]]) -> set[int]:
    return {offset for start, stop in ranges for offset in range(start, stop)}


def pour_one_by_one(num_rows: int, totals: list[int], is_open: list[bool]) -> list[int]:
    shares = [0] * len(totals)
    for _ in range(num_rows if any(is_open) else 0):
        open_nodes = [node for node in range(len(totals)) if is_open[node]]
        # The lowest now; among equals, who was lowest at first, then the lower index.
        lowest = min(open_nodes, key=lambda n: (totals[n] + shares[n], totals[n], n))
        shares[lowest] += 1
    return shares


@given(st.integers(0, 200), NODES)
def test_level_is_the_same_as_giving_each_row_to_the_lowest_node(
    num_rows: int, nodes: list[tuple[int, bool]]
) -> None:
    totals, is_open = [total for total, _ in nodes], [flag for _, flag in nodes]
    assert level(num_rows, totals, is_open) == pour_one_by_one(num_rows, totals, is_open)


@given(st.integers(0, 10**12), NODES)
def test_level_gives_every_row_away_and_nothing_to_closed_nodes(
    num_rows: int, nodes: list[tuple[int, bool]]
) -> None:
    shares = level(num_rows, [total for total, _ in nodes], [flag for _, flag in nodes])
    assert sum(shares) == (num_rows if any(flag for _, flag in nodes) else 0)
    assert all(share == 0 for share, (_, flag) in zip(shares, nodes, strict=True) if not flag)
    assert all(share >= 0 for share in shares)


def test_level_fills_the_lowest_first_and_spreads_the_rest() -> None:
    assert level(7, [10, 0, 0], [True, True, True]) == [0, 4, 3]
    assert level(5, [2, 1, 0], [True, True, True]) == [0, 2, 3]
    assert level(3, [0, 0], [False, True]) == [0, 3]


def test_level_refuses_negative_rows_and_uneven_arguments() -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        level(-1, [0], [True])
    with pytest.raises(ValueError, match="zip"):
        level(1, [0, 0], [True])


ROWS = st.lists(st.integers(0, 1000), max_size=6)


@given(ROWS, st.integers(1, 50), st.sampled_from(["short", "pad"]))
def test_agreed_steps_are_just_enough_for_the_fullest_node(
    rows: list[int], batch: int, tail: Tail
) -> None:
    steps = agreed_steps(rows, batch, tail)
    assert all(count <= steps * batch for count in rows)
    assert steps == 0 or any(count > (steps - 1) * batch for count in rows)


@given(ROWS, st.integers(1, 50), st.sampled_from(["drop", "carry"]))
def test_agreed_steps_of_full_batches_are_as_many_as_every_node_can_take(
    rows: list[int], batch: int, tail: Tail
) -> None:
    steps = agreed_steps(rows, batch, tail)
    assert all(count >= steps * batch for count in rows)
    assert not rows or any(count < (steps + 1) * batch for count in rows)


def test_agreed_steps_refuse_an_empty_batch() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        agreed_steps([1], 0, "short")


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 50))
def test_shares_use_every_row_once_and_leave_a_row_for_each_step(
    rows: int, steps: int, batch: int
) -> None:
    left, shares = rows, []
    for step in range(steps):
        shares.append(next_share(left, steps - step, batch))
        left -= shares[-1]
    assert all(0 <= share <= batch for share in shares)
    assert left == max(0, rows - steps * batch)
    assert shares.count(0) == max(0, steps - rows)
    assert shares == sorted(shares, reverse=True)  # nobody waits for rows that others have


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
