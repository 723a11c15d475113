"""Who is called with events, in which order, and what becomes of those who fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.driver.events import Checkpoint, Ended, Event, Stepped
from sparkdl.driver.lifecycle.transitions import begin
from sparkdl.driver.stream import Batches, ClusterEvents
from sparkdl.driver.threads import Changed
from sparkdl.driver.view import View
from tests.doubles.nodes import SOON_S


class Kept(Batches):
    """Keeps batches; with `is_broken` it cannot."""

    def __init__(self, wait_s: float, is_broken: bool = False) -> None:
        super().__init__("The test's list", "sparkdl-kept", wait_s)
        self.batches: list[tuple[list[Event], bool]] = []
        self.has_taken = threading.Event()
        self.is_broken, self.is_finished = is_broken, False

    def _take(self, events: Sequence[Event], is_last: bool) -> None:
        if self.is_broken:
            raise ValueError("no room")
        if events:
            self.batches.append(([*events], is_last))
            self.has_taken.set()

    def _finish(self) -> None:
        self.is_finished = True


def events_of_cluster() -> ClusterEvents:
    spec, loop = ClusterSpec("c", plan_nodes(1)), asyncio.new_event_loop()
    loop.close()
    return ClusterEvents(spec, View(begin(spec, 0.0)), Changed(), loop)


def test_subscriber_hears_its_kinds_and_the_end_as_the_last() -> None:
    events, heard = events_of_cluster(), list[Event]()
    events.subscribe(heard.append, Stepped, Ended)
    events.publish(Stepped)
    events.publish(Checkpoint, "/c/1", 1)
    assert events.wants(Stepped)
    assert not events.wants(Checkpoint)
    events.end()
    events.publish(Stepped)
    assert [type(event) for event in heard] == [Stepped, Ended]
    late = list[Event]()
    events.subscribe(late.append, Stepped, Ended)
    events.publish(Stepped)
    assert late == heard[-1:]


def test_subscriber_that_fails_is_named_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        raise ValueError("no")

    events, heard = events_of_cluster(), list[Event]()
    events.subscribe(fail, Stepped)
    events.subscribe(heard.append, Stepped)
    events.publish(Stepped)
    events.publish(Stepped)
    assert len(heard) == 2
    assert caplog.text.count("fail failed on Stepped; the cluster continues") == 2
    assert "ValueError: no" in caplog.text


def test_batches_are_taken_in_order_and_all_before_the_end() -> None:
    kept, events = Kept(0.01), events_of_cluster()
    events.subscribe(kept.put, Checkpoint, Ended)
    events.publish(Checkpoint, "/c/1", 1)
    kept.start()
    assert kept.has_taken.wait(SOON_S)
    events.publish(Checkpoint, "/c/2", 2)
    events.end()
    assert kept.is_finished
    *made, last = [event for events, _ in kept.batches for event in events]
    assert [event.step for event in made if isinstance(event, Checkpoint)] == [1, 2]
    assert isinstance(last, Ended)
    assert kept.batches[-1][1]


def test_batches_that_cannot_be_taken_end_with_a_log_line_and_keep_no_events(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = Kept(0.0, is_broken=True)
    kept.start()
    kept.join(SOON_S)
    kept.put(Stepped("c", 1.0))
    assert kept.is_finished
    assert "The test's list has stopped after an error; the cluster continues" in caplog.text
    assert not kept._events
