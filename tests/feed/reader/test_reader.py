"""A reader keeps what may be given back, releases what may not, and never gives rows to two."""

from __future__ import annotations

import os
from typing import Any

import pytest

from sparkdl.control.channel import Reclaim, Release, Reopened, Terminated
from sparkdl.control.messages import EpochEnd, FeedBegin
from sparkdl.core.errors import ConfigError
from sparkdl.feed.reader.cursor import HEAD_STEPS, Item
from sparkdl.feed.reader.reader import FeedReader
from tests.doubles.feeds import FEED, Arrivals, NoticingCondition, Running, item, numbers


def first_row(taken: Any) -> int:
    assert isinstance(taken, Item)
    return int(taken.batch().column(0)[0].as_py())


def test_segments_that_overtake_an_epochs_end_stay_out_of_it() -> None:
    with Arrivals() as it:
        it.rows(1, epoch=0)
        it.rows(1, 1, epoch=1)
        owner = it.reader.claim()
        assert first_row(it.reader.take(owner)) == 0
        taking = Running(lambda: it.reader.take(owner))
        it.waits.wait_for_waiter()
        it.end_epoch(0)
        assert isinstance(taking.result(), EpochEnd)
        it.reader.finish_epoch(owner)
        assert [first_row(it.reader.take(owner)) for _ in range(2)] == [1, 2]


def test_epoch_whose_first_rows_are_gone_is_refused_to_begin_again() -> None:
    given = 2 * HEAD_STEPS
    with Arrivals() as it:
        it.rows(*[2] * given)
        owner = it.reader.claim()
        for _ in range(given):  # one row of two each, so that half of the segments is given whole
            it.reader.take(owner)
            it.reader.give(owner, 1)
        it.reader.on_message(Reclaim(FEED))
        for _ in range(2):
            owner = it.reader.claim()
            with pytest.raises(ConfigError, match=r"loop over it was left early.*steps=.*memory"):
                it.reader.take(owner)


def test_pressure_lasts_to_the_end_of_the_epoch() -> None:
    with Arrivals() as it:
        it.reader.on_message(Reclaim(FEED))
        it.rows(1, 1, epoch=0)
        it.end_epoch(0)
        it.rows(1, 1, epoch=1)
        owner = it.reader.claim()
        for expected in (0, 1):
            assert first_row(it.reader.take(owner)) == expected
            assert it.released == expected
            it.reader.give(owner, 1)
        it.reader.take(owner)
        it.reader.finish_epoch(owner)
        assert it.released == 2
        for _ in range(2):
            it.reader.take(owner)
            it.reader.give(owner, 1)
        assert it.released == 2


def test_what_was_taken_is_released_when_user_code_waits_under_pressure() -> None:
    """It gathers a batch that is larger than what the node may hold."""
    with Arrivals() as it:
        it.rows(1, 1)
        owner = it.reader.claim()
        for _ in range(2):
            it.reader.take(owner)
        taking = Running(lambda: it.reader.take(owner))
        it.waits.wait_for_waiter()
        it.reader.on_message(Reclaim(FEED))
        assert it.released == 2
        it.rows(1)
        assert first_row(taking.result()) == 2


def test_rows_of_inference_come_only_to_those_who_ask_and_do_not_count() -> None:
    with Arrivals() as it:
        it.batch(numbers(0, 7), exchange="0.a")
        it.rows(2)
        owner = it.reader.claim()
        assert first_row(it.reader.take(owner)) == 0
        it.reader.give(owner, 2)
        asked = it.reader.take(owner, with_exchange=True)
        assert isinstance(asked, Item)
        assert asked.segment.exchange == "0.a"
        assert asked.fd == -1  # mapped, so that no release comes between
        it.reader.answer_taken(asked)
        assert it.released == 1
        assert it.consumed == (2, 0)


def test_epoch_that_will_not_come_is_skipped() -> None:
    with Arrivals() as it:
        owner = it.reader.claim()
        taking = Running(lambda: it.reader.take(owner))
        it.rows(1, epoch=5)
        it.reader.on_message(FeedBegin(FEED, 5, 5))
        assert first_row(taking.result()) == 0
        it.end_epoch(5)
        it.reader.take(owner)
        it.reader.finish_epoch(owner)
        assert it.consumed[1] == 6


def test_peek_waits_for_the_first_segment_and_leaves_it() -> None:
    with Arrivals() as it:
        peeking = Running(it.reader.peek_batch)
        it.end_epoch(0)
        it.rows(4, epoch=1)
        batch = peeking.result()
        assert batch is not None
        assert batch.num_rows == 4
        owner = it.reader.claim()
        assert isinstance(it.reader.take(owner), EpochEnd)
        it.reader.finish_epoch(owner)
        assert first_row(it.reader.take(owner)) == 0


def test_terminated_reader_drops_everything_and_tells_the_agent_once() -> None:
    before = set(os.listdir("/dev/fd"))
    with Arrivals() as it:
        it.rows(1, 1)
        owner = it.reader.claim()
        it.reader.take(owner)
        it.reader.terminate()
        it.reader.terminate()
        assert it.sent.count(Terminated(FEED)) == 1
        it.rows(1)
        it.end_epoch(0)
        assert it.reader.take(owner) is None
        assert set(os.listdir("/dev/fd")) == before
        it.reader.on_message(Reclaim(FEED))
        assert not any(isinstance(message, Release) for message in it.sent)


def test_room_that_a_terminated_feeding_was_asked_for_is_not_made_in_the_next_one() -> None:
    """The agent believes that all of it is here and can be read again."""
    with Arrivals() as arrivals:
        reader = arrivals.reader
        arrivals.rows(10)
        reader.on_message(Reclaim(FEED))
        reader.terminate()
        reader.on_message(Reopened(FEED, 5))
        arrivals.rows(10, 10, epoch=5)
        owner = reader.claim()
        for _ in range(2):
            assert isinstance(reader.take(owner), Item)
            reader.give_for_good(owner, 10)
        arrivals.end_epoch(5, again=True)
        assert isinstance(reader.take(owner), EpochEnd)
        assert arrivals.released == 0
        reader.finish_epoch(owner)
        assert isinstance(reader.take(owner), Item)


def test_agent_is_told_now_and_then_and_when_there_is_nothing_left() -> None:
    sent: list[Any] = []
    # No host has been up for so long: the first report is due at once all the same.
    reader = FeedReader(FEED, sent.append)
    reader.report_period_s = 1e12
    reader._changed = waits = NoticingCondition()
    reader.add(item(numbers(0, 100), 0))
    owner = reader.claim()
    reader.take(owner)
    for _ in range(100):
        assert reader.give(owner, 1)
    assert [m.given.rows for m in sent] == [1]
    taking = Running(lambda: reader.take(owner))
    waits.wait_for_waiter()
    assert [(m.given.rows, m.is_waiting) for m in sent] == [(1, False), (100, True)]
    reader.on_message(EpochEnd(FEED, 0, {0: 100}))
    assert isinstance(taking.result(), EpochEnd)
