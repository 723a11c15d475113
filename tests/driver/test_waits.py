"""Which nodes wait, and for whom: decided from what their children have reported."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from sparkdl.control.messages import NodeActive
from sparkdl.driver.view import Shares, Waits

Seconds = Callable[[float], tuple[float, float]]
"""Shares of the next second in which a node waits for rows and for the others, at its beginning."""


def waits_of(*nodes: Seconds, seconds: int = 75, others_known: bool = True) -> Waits:
    """Return what nodes have waited for that report once a second."""
    waits, totals = Waits(), [(0.0, 0.0)] * len(nodes)
    for second in range(seconds):
        for node_id, node in enumerate(nodes):
            rows, others = node(second)
            totals[node_id] = totals[node_id][0] + rows, totals[node_id][1] + others
            active = NodeActive(
                0,
                watched_s=second + 1.0,
                rows_s=totals[node_id][0],
                others_s=totals[node_id][1] if others_known else -1.0,
            )
            waits.note(node_id, active, 1000.0 + second)
    return waits


def always(rows: float, others: float) -> Seconds:
    return lambda second: (rows, others)


def test_shares_are_those_of_the_last_minute() -> None:
    waits = waits_of(lambda second: (1.0, 0.0) if second < 60 else (0.2, 0.4), seconds=300)
    shares = waits.shares([0])[0]
    assert (shares.rows, shares.others) == pytest.approx((0.2, 0.4))
    assert waits.shares([0, 7]).keys() == {0}, "of one that has reported nothing none are known"


def test_node_that_does_not_wait_while_the_others_do_is_the_one_they_wait_for() -> None:
    fast, slow = always(0.0, 0.6), always(0.0, 0.05)
    assert waits_of(fast, slow).lags([0, 1]) == {1: pytest.approx(0.55)}
    assert waits_of(fast, fast, slow, fast).lags(range(4)) == {2: pytest.approx(0.55)}
    assert waits_of(fast, slow).shares([0, 1])[1].lag == pytest.approx(0.55)


def test_nobody_is_awaited_before_all_have_been_looked_at_for_a_minute() -> None:
    fast, slow = always(0.0, 0.6), always(0.0, 0.05)
    for seconds in (1, 30, 50):
        assert waits_of(fast, slow, seconds=seconds).lags([0, 1]) == {}


LEVEL = always(0.0, 0.3)
CHECKPOINT_S = 25


@pytest.mark.parametrize(
    "nodes",
    [
        (LEVEL, LEVEL),
        (LEVEL,),
        (LEVEL, always(0.0, 0.1)),
        (always(0.9, 0.0), always(0.9, 0.0)),
        (always(0.0, 0.0), always(0.8, 0.0)),
        (lambda second: (0.0, float(second % 60 < CHECKPOINT_S)), always(0.0, 0.0)),
        (lambda second: (0.0, float(second % 20 > 15)), always(0.0, 0.0)),
        (lambda second: (0.0, float(second // 30 % 2)), lambda second: (0.0, 1 - second // 30 % 2)),
    ],
    ids=[
        "level nodes",
        "one node",
        "nodes that differ a little",
        "nodes that wait for rows",
        "one has more rows",
        "a checkpoint of the chief",
        "the ends of epochs",
        "turns at being slow",
    ],
)
def test_nobody_is_awaited_for_long_where_nobody_is_a_straggler(nodes: tuple[Seconds, ...]) -> None:
    for seconds in range(60, 140, 3):
        assert waits_of(*nodes, seconds=seconds).lags(range(len(nodes))) == {}


def test_nobody_is_awaited_where_waits_for_others_are_unknown_as_with_gpus() -> None:
    waits = waits_of(always(0.1, 0.6), always(0.3, 0.0), others_known=False)
    shares = waits.shares([0, 1])
    assert [round(shares[node].rows, 3) for node in (0, 1)] == [0.1, 0.3]
    assert all(math.isnan(each.others) and not each.lag for each in shares.values())


def test_a_restart_begins_anew_and_what_comes_late_of_before_does_not_count() -> None:
    waits = waits_of(always(0.0, 0.6), always(0.0, 0.0))
    waits.note(0, NodeActive(1, watched_s=2.0, rows_s=1.0, others_s=0.0), 1080.0)
    waits.note(1, NodeActive(0, watched_s=99.0, rows_s=50.0, others_s=0.0), 1080.5)
    assert waits.shares([0, 1]) == {0: Shares(0.5, 0.0)}
    assert waits.lags([0, 1]) == {}


def test_a_child_that_begins_again_in_its_generation_counts_from_nothing() -> None:
    waits = Waits()
    waits.note(0, NodeActive(0, watched_s=40.0, rows_s=40.0, others_s=0.0), 0.0)
    waits.note(0, NodeActive(0, watched_s=10.0, rows_s=0.0, others_s=0.0), 1.0)
    assert waits.shares([0])[0].rows == pytest.approx(40 / 50)
