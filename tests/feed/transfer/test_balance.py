"""Whoever asks and whoever has room: nodes get equally many rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.feed.transfer.balance import RowBalancer, level, transfers

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


def test_plans_keep_nodes_level_whoever_has_room() -> None:
    ledger = RowBalancer()
    assert ledger.plan(0, 101, [0, 1], {}) == [51, 50]
    assert ledger.plan(0, 101, [0, 1], {}) == [50, 51]
    assert ledger.plan(0, 30, [0], {}) == [30]  # the other one was full
    assert ledger.plan(0, 50, [0, 1], {}) == [10, 40]
    assert ledger.plan(0, 50, [0, 1, 2], {}) == [0, 0, 50]
    assert ledger.plan(0, 10, [], {}) == []


def test_rows_that_come_back_are_planned_anew() -> None:
    ledger = RowBalancer()
    ledger.plan(0, 200, [0, 1], {})
    assert ledger.plan(0, 60, [0, 1], {0: 60}) == [60, 0]


def test_epochs_have_books_of_their_own_until_they_are_forgotten() -> None:
    ledger = RowBalancer()
    ledger.plan(0, 10, [0], {})
    ledger.plan(1, 10, [0], {})
    ledger.forget(0)
    assert ledger.plan(0, 10, [0, 1], {}) == [5, 5]
    assert ledger.plan(1, 10, [0, 1], {}) == [0, 10]


def test_stream_of_single_rows_reaches_all_nodes_in_turn() -> None:
    ledger, totals = RowBalancer(), [0, 0]
    for epoch in range(6):
        ahead = {node: total - min(totals) for node, total in enumerate(totals)}
        share = ledger.plan(epoch, 1, [0, 1], {}, ahead)
        totals = [total + rows for total, rows in zip(totals, share, strict=True)]
        ledger.forget(epoch)
    assert totals == [3, 3]


@given(st.lists(st.integers(0, 500), max_size=20), st.integers(1, 6))
def test_nodes_with_room_differ_by_a_row_at_most(sizes: list[int], num_nodes: int) -> None:
    ledger, totals = RowBalancer(), [0] * num_nodes
    for rows in sizes:
        shares = ledger.plan(0, rows, range(num_nodes), {})
        assert sum(shares) == rows
        totals = [total + share for total, share in zip(totals, shares, strict=True)]
    assert max(totals) - min(totals) <= 1


@given(st.dictionaries(st.integers(0, 99), st.integers(0, 60), max_size=20))
def test_transfers_make_totals_differ_by_a_row_at_most(totals: dict[int, int]) -> None:
    orders = transfers(totals, totals)
    after = dict(totals)
    for giver, gets in orders.items():
        for getter, rows in gets.items():
            assert rows > 0
            after[giver] -= rows
            after[getter] += rows
    assert max(after.values(), default=0) - min(after.values(), default=0) <= 1
    assert sum(len(gets) for gets in orders.values()) < max(1, len(totals))
    assert not {*orders} & {getter for gets in orders.values() for getter in gets}


def test_node_that_can_give_no_more_keeps_the_rest() -> None:
    assert transfers({0: 10, 1: 0}, {0: 2}) == {0: {1: 2}}
    assert transfers({0: 10, 1: 9}, {0: 10}) == {}
    assert transfers({0: 9, 1: 9, 2: 0}, {1: 9}) == {1: {2: 3}}
