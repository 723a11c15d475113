"""Whoever asks and whoever has room: nodes get equally many rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.feed.transfer.balance import RowBalancer


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
