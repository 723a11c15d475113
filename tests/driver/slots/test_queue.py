"""Clusters of one program take turns for the slots of one Spark application."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

import pytest

from sparkdl.core.errors import ConfigError, LaunchError, ReservationTimeoutError
from sparkdl.driver.slots.queue import Gate, Need, Turn, gate_of

SOON_S = 10.0
LOOK_S = 0.01


def need(name: str, nodes: int = 1, is_feeding: bool = False, room: int = 99) -> Need:
    return Need(name, nodes, nodes, is_feeding, room)


def enter(gate: Gate, need: Need, timeout_s: float) -> None:
    """Take the turn of a cluster where there are two slots."""
    Turn(gate, need, lambda: 2, timeout_s).wait(lambda: True)


class Asker(threading.Thread):
    """Asks for its turn in a thread of its own, which lives until it is told to end."""

    def __init__(self, gate: Gate, need: Need, slots: int) -> None:
        super().__init__(daemon=True)
        self._turn = Turn(gate, need, lambda: slots, SOON_S, self)
        self._changed = threading.Condition()
        self._looks = 0
        self.is_in, self.may_end = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        self._turn.wait(self._is_wanted)
        self.is_in.set()
        self.may_end.wait(SOON_S)

    def _is_wanted(self) -> bool:
        """Count the looks that found no room."""
        with self._changed:
            self._looks += 1
            self._changed.notify_all()
        return True

    def waits(self) -> bool:
        """Wait until it has looked twice more; return whether it has found no room either time.

        The first of these looks may have begun before what was done last.
        """
        with self._changed:
            enough = self._looks + 2
            return self._changed.wait_for(lambda: self._looks >= enough, SOON_S)

    def end(self) -> None:
        self._turn.end()
        self.may_end.set()
        self.join(SOON_S)


def test_clusters_enter_while_slots_last_and_in_order_after_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "sparkdl.driver.slots.queue")
    gate = Gate(LOOK_S)
    a, b = Asker(gate, need("a", 2), 4), Asker(gate, need("b"), 4)
    assert a.is_in.wait(SOON_S)
    assert b.is_in.wait(SOON_S)
    large = Asker(gate, need("large", 3), 4)
    assert large.waits()
    small = Asker(gate, need("small"), 4)  # it would fit, but it is not its turn
    assert small.waits()
    b.end()
    assert large.waits()
    a.end()
    assert large.is_in.wait(SOON_S)
    assert small.is_in.wait(SOON_S)
    assert (gate.others("large"), gate.others("small"), gate.others("b")) == (1, 3, 4)
    for asker in (large, small):
        asker.end()
    assert "cluster large needs 3 task slots for 3 nodes; of 4 slots 3 are held by" in caplog.text
    assert "Cluster small has its task slots and starts" in caplog.text


def test_one_slot_is_left_for_feeding_and_large_nodes_need_room() -> None:
    gate = Gate(LOOK_S)
    fed = Asker(gate, need("fed", 2, is_feeding=True), 4)
    assert fed.is_in.wait(SOON_S)
    second = Asker(gate, need("second", 2), 4)
    assert second.waits()
    fed.end()
    assert second.is_in.wait(SOON_S)
    large = Asker(gate, need("large", 1, room=2), 9)
    assert large.waits()
    second.end()
    assert large.is_in.wait(SOON_S)
    large.end()


def test_who_waits_for_itself_is_told_and_loses_its_place() -> None:
    gate = Gate(LOOK_S)
    enter(gate, need("mine", 2), SOON_S)
    with pytest.raises(
        ReservationTimeoutError,
        match=r"held by mine \(2 nodes, launched .* Main.*No slots became free",
    ):
        enter(gate, need("too"), 0.0)
    gate.leave("mine")
    gate.leave("mine")
    enter(gate, need("next"), 0.0)
    assert gate_of("app-1") is gate_of("app-1")


def holding(gate: Gate, name: str, unfed: str, starter: threading.Thread) -> Turn:
    """Have a cluster of a thread hold both slots."""
    turn = Turn(gate, need(name, 2), lambda: 2, SOON_S, starter)
    turn.wait(lambda: True)
    turn.watch(lambda: unfed)
    return turn


def test_who_waits_for_a_cluster_that_it_never_fed_is_told_at_once() -> None:
    gate, me = Gate(LOOK_S), threading.current_thread()
    mine = holding(gate, "mine", "'input'", me)
    with pytest.raises(
        ConfigError, match=r"held by mine .*mine waits for feed 'input', which was never fed, and"
    ):
        enter(gate, need("too"), math.inf)
    mine.end()
    mine.watch(lambda: "'input'")  # too late: it has left
    enter(gate, need("next"), 0.0)
    assert not gate._unfed


def may_end_by_itself(gate: Gate) -> None:
    holding(gate, "mine", "", threading.current_thread())


def belongs_to_another_thread(gate: Gate) -> None:
    holding(gate, "its", "'input'", threading.main_thread())


@pytest.mark.parametrize("holds", [may_end_by_itself, belongs_to_another_thread])
def test_cluster_that_may_end_is_waited_for(holds: Callable[[Gate], None]) -> None:
    gate = Gate(LOOK_S)
    looks = iter([True] * 5 + [False])

    def ask() -> None:
        holds(gate)
        with pytest.raises(LaunchError, match="not wanted"):
            Turn(gate, need("too"), lambda: 2, SOON_S).wait(lambda: next(looks))

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(SOON_S)
    assert next(looks, None) is None


def test_thread_of_the_program_that_may_shut_the_cluster_down_is_waited_for() -> None:
    gate = Gate(LOOK_S)
    mine = holding(gate, "mine", "'input'", threading.current_thread())
    waits = threading.Event()

    def shut_down() -> None:
        waits.wait(SOON_S)
        mine.end()

    def ask() -> bool:
        waits.set()
        return True

    other = threading.Thread(target=shut_down, daemon=False)
    other.start()
    Turn(gate, need("too"), lambda: 2, SOON_S).wait(ask)
    other.join(SOON_S)


def test_who_waits_says_at_once_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "sparkdl.driver.slots.queue")
    gate = Gate(LOOK_S)
    first = Asker(gate, need("first", 2), 2)
    assert first.is_in.wait(SOON_S)
    assert not caplog.records
    second = Asker(gate, need("second"), 2)
    assert second.waits()
    (told,) = caplog.records
    assert told.levelname == "WARNING"
    assert "second needs 1 task slot for" in told.message
    assert "held by first (2 nodes, launched 0 s ago in thread" in told.message
    first.end()
    assert second.is_in.wait(SOON_S)
    second.end()


def test_who_is_not_wanted_any_more_waits_no_longer() -> None:
    gate = Gate(LOOK_S)
    enter(gate, need("first", 2), SOON_S)
    turn, looks = Turn(gate, need("second"), lambda: 2, SOON_S), iter([True, True, False])
    with pytest.raises(LaunchError, match="second is not wanted"):
        turn.wait(lambda: next(looks))
    gate.leave("first")
    turn.wait(lambda: True)
    with pytest.raises(ReservationTimeoutError, match=r"held by second \(1 node,"):
        enter(gate, need("third", 2), 0.0)
    turn.end()
    enter(gate, need("third", 2), 0.0)
