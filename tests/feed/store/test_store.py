"""A store keeps a node's feeds and open inference partitions; closed, it takes nothing."""

from __future__ import annotations

import threading

import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import FeedClosedError, InferenceError
from sparkdl.feed.store.held import Appended, AppendRequest
from sparkdl.feed.store.log import Log
from sparkdl.feed.store.segment import StoredSegment, segment_nbytes
from sparkdl.feed.store.store import NodeStore, StoreLimits
from tests.doubles.feeds import SOON_S, noting, numbers

BATCH = numbers(0, 10)


def append(log: Log) -> Appended:
    return log.append(BATCH, Deadline.after(SOON_S), AppendRequest())


class Heard:
    def __init__(self) -> None:
        self.segments: list[StoredSegment] = []
        self.pressed: list[str] = []
        self.is_pressed = threading.Semaphore(0)

    def store(self, limit_nbytes: int = 1 << 30) -> NodeStore:
        limits = StoreLimits(limit_nbytes)
        return NodeStore(limits, SOON_S, noting(self.segments), lambda *_: None, self._press)

    def _press(self, feed: str) -> None:
        self.pressed.append(feed)
        self.is_pressed.release()


def test_every_feed_is_pressed_when_an_append_waits_and_again_when_asked() -> None:
    heard = Heard()
    store = heard.store(limit_nbytes=1)
    for feed in ("a", "b"):  # each may have one segment
        append(store.log(feed))
    waiting = threading.Thread(target=lambda: append(store.log("b")))
    waiting.start()
    for _ in range(2):
        assert heard.is_pressed.acquire(timeout=SOON_S)
    assert sorted(heard.pressed) == ["a", "b"]
    store.budget.wake()
    for _ in range(2):
        assert heard.is_pressed.acquire(timeout=SOON_S)
    store.log("b").release([0])
    waiting.join(SOON_S)
    assert [s.feed for s in heard.segments] == ["a", "b", "b"]
    store.close("over")


def test_closed_store_takes_no_rows_in_any_feed_and_ends_what_waits() -> None:
    heard = Heard()
    store = heard.store()
    old, exchange = store.log("old"), store.open_exchange("0.a")
    exchange.expect(1)
    store.close("map_fun has returned")
    store.close("a later reason")
    assert old.is_closed
    assert store.log("new").is_closed
    assert append(store.log("new")) is Appended.CLOSED
    with pytest.raises(InferenceError, match="map_fun has returned"):
        list(exchange.results(SOON_S))
    with pytest.raises(FeedClosedError, match="map_fun has returned"):
        store.open_exchange("0.b")


def test_reopened_store_has_empty_logs_and_its_whole_budget() -> None:
    heard = Heard()
    store = heard.store(limit_nbytes=segment_nbytes(BATCH))
    assert append(store.log("a")) is Appended.STORED
    store.close("over")
    store.reopen(1)
    log = store.log("a")
    assert not log.is_closed
    assert log.rows_received == 0
    assert append(log) is Appended.STORED
    assert store.open_exchange("0.a") is store.exchange("0.a")
    store.close_exchange("0.a")
    assert store.exchange("0.a") is None
    store.close("over")
