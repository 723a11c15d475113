"""What the slots mean for nodes that run is told when it changes for good."""

from __future__ import annotations

import pytest

from sparkdl.driver.slots.placement import UNCOUNTED, Standing
from sparkdl.driver.slots.watch import LASTING_S, SlotWatch

ENOUGH = Standing(3, False, "enough")
SHORT = Standing(3, True, "short")
FEWER = Standing(2, True, "fewer")


class Counts:
    """A watch, what it counts now, and what it has told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.standing: Standing | None = ENOUGH
        self.told: list[Standing] = []
        self.watch = SlotWatch(3, lambda: self.standing, self.told.append, lambda: self.now_s)

    def look(self, standing: Standing | None, after_s: float = 0.0, is_lost: bool = False) -> None:
        self.standing = standing
        self.now_s += after_s
        self.watch.look(is_lost)


@pytest.fixture
def counts() -> Counts:
    return Counts()


def test_slots_as_at_the_launch_are_no_news(counts: Counts) -> None:
    counts.look(ENOUGH)
    counts.look(Standing(3, False, "even more"), LASTING_S)
    assert counts.told == []


def test_a_shortage_that_lasts_is_told_once(counts: Counts) -> None:
    counts.look(SHORT)
    counts.look(SHORT, LASTING_S - 0.1)
    assert counts.told == []
    counts.look(SHORT, 0.1)
    counts.look(SHORT, LASTING_S)
    assert counts.told == [SHORT]


def test_an_executor_that_is_replaced_soon_is_no_news(counts: Counts) -> None:
    counts.look(SHORT)
    counts.look(ENOUGH, LASTING_S - 0.1)
    counts.look(SHORT, 0.1)
    counts.look(SHORT, LASTING_S - 0.1)
    assert counts.told == []


def test_each_change_has_to_last(counts: Counts) -> None:
    counts.look(SHORT)
    counts.look(FEWER, LASTING_S)
    assert counts.told == []
    counts.look(FEWER, LASTING_S)
    counts.look(ENOUGH)
    counts.look(ENOUGH, LASTING_S)
    assert counts.told == [FEWER, ENOUGH]


def test_slots_that_are_missing_from_the_beginning_are_told(counts: Counts) -> None:
    """An executor was lost between the choice of the placement and the start."""
    counts.look(FEWER)
    counts.look(FEWER, LASTING_S)
    assert counts.told == [FEWER]


def test_where_slots_cannot_be_counted_the_loss_of_a_node_is_enough(counts: Counts) -> None:
    counts.look(None, LASTING_S)
    assert counts.told == []
    counts.look(None, is_lost=True)
    counts.look(None, is_lost=True)
    assert counts.told == [UNCOUNTED]
