"""An inbox keeps a node's feeds and open inference partitions; closed, it takes nothing."""

from __future__ import annotations

import os
import threading

import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import FeedClosedError, InferenceError
from sparkdl.feed.store.log import Log
from sparkdl.feed.store.segment import StoredSegment, write_segment
from sparkdl.feed.store.store import NodeStore, StoreLimits, StoreListener
from sparkdl.feed.transfer.append import Appended, AppendRequest
from tests.doubles.feeds import SOON_S, numbers

BATCH = numbers(0, 10)


def append(log: Log) -> Appended:
    return log.append(BATCH, Deadline.after(SOON_S), AppendRequest())


class Heard:
    def __init__(self) -> None:
        self.segments: list[StoredSegment] = []
        self.received: list[str] = []
        self.pressed: list[str] = []
        self.is_pressed = threading.Semaphore(0)

    def inbox(self, limit_nbytes: int = 1 << 30) -> NodeStore:
        listener = StoreListener(self.segments.append, self.received.append, self._press)
        return NodeStore(StoreLimits(limit_nbytes), SOON_S, listener)

    def _press(self, feed: str) -> None:
        self.pressed.append(feed)
        self.is_pressed.release()


def test_feeds_come_into_being_when_named() -> None:
    inbox = Heard().inbox()
    assert inbox.logs == ()
    log = inbox.log("a")
    assert inbox.log("a") is log
    assert inbox.log("b") is not log
    assert set(inbox.logs) == {log, inbox.log("b")}


def test_listener_hears_of_segments_and_rows() -> None:
    heard = Heard()
    inbox = heard.inbox()
    append(inbox.log("a"))
    inbox.received("a")
    assert [(s.feed, s.rows) for s in heard.segments] == [("a", 10)]
    assert heard.received == ["a"]
    inbox.close("over")


def test_every_feed_is_pressed_when_an_append_waits_and_again_when_asked() -> None:
    heard = Heard()
    inbox = heard.inbox(limit_nbytes=1)
    for feed in ("a", "b"):  # each may have one segment
        append(inbox.log(feed))
    waiting = threading.Thread(target=lambda: append(inbox.log("b")))
    waiting.start()
    for _ in range(2):
        assert heard.is_pressed.acquire(timeout=SOON_S)
    assert sorted(heard.pressed) == ["a", "b"]
    inbox.press_again()
    for _ in range(2):
        assert heard.is_pressed.acquire(timeout=SOON_S)
    inbox.log("b").release([0])
    waiting.join(SOON_S)
    assert [s.feed for s in heard.segments] == ["a", "b", "b"]
    inbox.close("over")


def test_closed_inbox_takes_no_rows_in_any_feed_and_ends_what_waits() -> None:
    heard = Heard()
    inbox = heard.inbox()
    old, exchange = inbox.log("old"), inbox.open_exchange("0.a")
    exchange.expect(1)
    inbox.close("map_fun has returned")
    inbox.close("a later reason")
    assert old.is_closed
    assert inbox.log("new").is_closed
    assert append(inbox.log("new")) is Appended.CLOSED
    with pytest.raises(InferenceError, match="map_fun has returned"):
        list(exchange.results(SOON_S))
    with pytest.raises(FeedClosedError, match="map_fun has returned"):
        inbox.open_exchange("0.b")


def test_feed_can_be_named_for_the_first_time_while_a_closed_inbox_is_pressed() -> None:
    """Whoever waits for room holds the budget and asks the inbox, never the other way round."""
    threads: list[threading.Thread] = []

    def press(_feed: str) -> None:
        if not threads:
            inbox.close("over")
            naming = threading.Thread(target=inbox.log, args=("new",))
            naming.start()
            naming.join(SOON_S)
            threads.extend([naming, threading.Thread(target=inbox.press_again)])
            threads[1].start()

    inbox = NodeStore(StoreLimits(1), SOON_S, StoreListener(lambda _: None, lambda _: None, press))
    assert append(inbox.log("a")) is Appended.STORED
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(append(inbox.log("a"))))
    waiting.start()
    waiting.join(SOON_S)
    assert taken == [Appended.CLOSED]
    assert inbox.log("new").is_closed


def test_reopened_inbox_has_empty_logs_and_its_whole_budget() -> None:
    heard = Heard()
    fd, nbytes = write_segment(BATCH)
    os.close(fd)
    inbox = heard.inbox(limit_nbytes=nbytes)
    assert append(inbox.log("a")) is Appended.STORED
    inbox.close("over")
    inbox.reopen(1)
    log = inbox.log("a")
    assert not log.is_closed
    assert log.rows_received == 0
    assert append(log) is Appended.STORED
    assert inbox.open_exchange("0.a") is inbox.exchange("0.a")
    inbox.close_exchange("0.a")
    assert inbox.exchange("0.a") is None
    inbox.close("over")
