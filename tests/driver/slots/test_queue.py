"""Clusters of one program take turns for the slots of one Spark application."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import LaunchError, ReservationTimeoutError
from sparkdl.driver.slots.queue import Gate, Need, Turn, gate_of

SOON_S = 10.0


def need(name: str, nodes: int = 1, is_feeding: bool = False, room: int = 99) -> Need:
    return Need(name, nodes, nodes, is_feeding, room)


class Asker(threading.Thread):
    """Asks for its turn in a thread of its own, which lives until it is told to end."""

    def __init__(self, gate: Gate, need: Need, slots: int) -> None:
        super().__init__(daemon=True)
        self._gate, self._need, self._slots = gate, need, slots
        self.is_in, self.may_end = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        self._gate.enter(self._need, lambda: self._slots, SOON_S)
        self.is_in.set()
        self.may_end.wait(SOON_S)

    def waits(self) -> bool:
        deadline = Deadline.after(SOON_S)
        while self._need.cluster not in self._gate._waiting and not self.is_in.is_set():
            assert not deadline.has_passed
            threading.Event().wait(0.005)
        return not self.is_in.wait(0.05)

    def end(self) -> None:
        self._gate.leave(self._need.cluster)
        self.may_end.set()
        self.join(SOON_S)


def test_clusters_enter_while_slots_last_and_in_order_after_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "sparkdl.driver.slots.queue")
    gate = Gate()
    a, b = Asker(gate, need("a", 2), 4), Asker(gate, need("b"), 4)
    assert a.is_in.wait(SOON_S)
    assert b.is_in.wait(SOON_S)
    large = Asker(gate, need("large", 3), 4)
    assert large.waits()
    small = Asker(gate, need("small"), 4)  # it would fit, but it is not its turn
    assert small.waits()
    b.end()
    assert not large.is_in.wait(0.05)
    a.end()
    assert large.is_in.wait(SOON_S)
    assert small.is_in.wait(SOON_S)
    assert (gate.others("large"), gate.others("small"), gate.others("b")) == (1, 3, 4)
    for asker in (large, small):
        asker.end()
    assert "cluster large needs 3 task slots for 3 nodes; of 4 slots 3 are held by" in caplog.text
    assert "It is the turn of cluster small" in caplog.text


def test_one_slot_is_left_for_feeding_and_large_nodes_need_room() -> None:
    gate = Gate()
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
    gate = Gate()
    gate.enter(need("mine", 2), lambda: 2, 1.0)
    with pytest.raises(
        ReservationTimeoutError, match=r"held by mine \(2 nodes, launched .* Main.*Nobody made"
    ):
        gate.enter(need("too"), lambda: 2, 0.05)
    gate.leave("mine")
    gate.leave("mine")
    gate.enter(need("next"), lambda: 2, 0.0)
    assert gate_of("app-1") is gate_of("app-1")


def test_who_waits_says_at_once_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "sparkdl.driver.slots.queue")
    gate = Gate()
    first = Asker(gate, need("first", 2), 2)
    assert first.is_in.wait(SOON_S)
    assert not caplog.records
    second = Asker(gate, need("second"), 2)
    assert second.waits()
    (told,) = caplog.records
    assert told.levelname == "WARNING"
    assert "second needs 1 task slots" in told.message
    assert "held by first (2 nodes, launched 0 s ago in thread" in told.message
    first.end()
    assert second.is_in.wait(SOON_S)
    second.end()


def test_who_is_not_wanted_any_more_waits_no_longer() -> None:
    gate, is_given_up = Gate(), threading.Event()
    gate.enter(need("first", 2), lambda: 2, SOON_S)
    turn = Turn(gate, need("second"), lambda: 2, SOON_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(turn.wait, lambda: not is_given_up.is_set())
        is_given_up.set()
        with pytest.raises(LaunchError, match="second is not wanted"):
            waiting.result(SOON_S)
    gate.leave("first")
    turn.wait(lambda: True)
    with pytest.raises(ReservationTimeoutError, match=r"held by second \(1 nodes"):
        gate.enter(need("third", 2), lambda: 2, 0.0)
    turn.end()
    gate.enter(need("third", 2), lambda: 2, 0.0)
