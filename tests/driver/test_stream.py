"""Who is called with events, in which order, and what becomes of those who fail."""

from __future__ import annotations

import asyncio

import pytest

from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.driver.events import Checkpoint, Ended, Event, Stepped
from sparkdl.driver.lifecycle.transitions import begin
from sparkdl.driver.stream import ClusterEvents
from sparkdl.driver.threads import Changed
from sparkdl.driver.view import ClusterView


def events_of_cluster() -> ClusterEvents:
    spec, loop = ClusterSpec("c", plan_nodes(1)), asyncio.new_event_loop()
    loop.close()
    return ClusterEvents(spec, ClusterView(begin(spec, 0.0)), Changed(), loop)


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
