"""Who is called with events, in which order, and what becomes of those who fail."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from sparkdl.driver.events import Changed, Ended, Event, Launched, Stepped
from sparkdl.driver.stream import Batches, Stream
from tests.doubles.nodes import SOON_S

ENDED = Ended("c", 9.0)


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


def test_subscriber_hears_its_kinds_and_the_end_as_the_last() -> None:
    stream, heard = Stream(), list[Event]()
    stream.add(heard.append, Stepped, Ended)
    stream.publish(Stepped("c", 1.0))
    stream.publish(Launched("c", 2.0, "plain", ()))
    assert stream.wants(Stepped)
    assert not stream.wants(Launched)
    stream.end(ENDED)
    stream.publish(Stepped("c", 10.0))
    assert heard == [Stepped("c", 1.0), ENDED]
    late = list[Event]()
    stream.add(late.append, Stepped, Ended)
    stream.publish(Stepped("c", 11.0))
    assert late == [ENDED]


def test_subscriber_that_fails_is_named_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        raise ValueError("no")

    stream, heard = Stream(), list[Event]()
    stream.add(fail, Stepped)
    stream.add(heard.append, Stepped)
    for time_s in (1.0, 2.0):
        stream.publish(Stepped("c", time_s))
    assert [event.time_s for event in heard] == [1.0, 2.0]
    assert caplog.text.count("fail failed on Stepped; the cluster goes on") == 2
    assert "ValueError: no" in caplog.text


def test_batches_are_taken_in_order_and_all_before_the_end() -> None:
    kept, stream = Kept(0.01), Stream()
    stream.add(kept.put, Launched, Changed, Ended)
    first, second = Launched("c", 0.0, "plain", ("worker:0",)), Changed("c", 1.0, "running")
    stream.publish(first)
    kept.start()
    assert kept.has_taken.wait(SOON_S)
    stream.publish(second)
    stream.end(ENDED)
    assert kept.is_finished
    assert [event for events, _ in kept.batches for event in events] == [first, second, ENDED]
    assert kept.batches[-1][1]


def test_batches_that_cannot_be_taken_end_with_a_log_line_and_keep_no_events(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = Kept(0.0, is_broken=True)
    kept.start()
    kept.join(SOON_S)
    kept.put(Stepped("c", 1.0))
    assert kept.is_finished
    assert "The test's list ends here, and the cluster goes on" in caplog.text
    assert not kept._events
