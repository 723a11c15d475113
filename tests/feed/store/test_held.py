"""Rows that a child had are found again by the next one, each once, and never stand in the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.feed.store.held import Appended, AppendRequest
from sparkdl.feed.store.segment import StoredSegment, segment_nbytes
from sparkdl.feed.store.store import NodeStore, StoreLimits
from tests.doubles.feeds import FEED, SOON_S, noting, numbers

STORED = Appended.STORED


class Node:
    """A store that retains rows, and what it has told the child."""

    def __init__(self, limit_nbytes: int, limit_segments: int) -> None:
        self.segments: list[StoredSegment] = []
        limits = StoreLimits(limit_nbytes, keeps=True)
        self.store = NodeStore(
            limits, SOON_S, noting(self.segments), lambda *_: None, lambda _: None
        )
        self.budget = self.store.budget
        self.budget.limit_segments = limit_segments

    def bring(
        self, part: int, start: int, stop: int, epoch: int = 0, run: str = "call.0"
    ) -> Appended:
        """Append rows that a job has brought."""
        request = AppendRequest(epoch, spans=((part, start, stop),), run=run)
        batch = numbers(start, stop)
        return self.store.log(FEED).append(batch, Deadline.after(SOON_S), request)

    def end_child(self, generation: int) -> None:
        """Begin a new generation."""
        self.store.close("the child has died")
        self.segments.clear()
        self.store.reopen(generation)

    def found(self, run: str = "call.0") -> list[tuple[int, int, int]]:
        """Return which rows of a job are found again: partition, first row, how many."""
        lots = self.store.recall(FEED, 0, run)
        return sorted((lot.partition, lot.start, lot.rows) for lot in lots)


@contextmanager
def node(limit_nbytes: int = 1 << 20, limit_segments: int = 1000) -> Iterator[Node]:
    it = Node(limit_nbytes, limit_segments)
    yield it
    it.store.shut_down("the test is over")
    assert it.budget.used_nbytes == it.budget.num_segments == 0


def test_what_was_read_makes_room_at_once_the_oldest_first() -> None:
    nbytes = segment_nbytes(numbers(0, 50))
    with node(3 * nbytes) as it:
        for start in (0, 50, 100):
            it.bring(0, start, start + 50)
        it.store.log(FEED).release([0, 1])
        assert it.budget.used_nbytes == 3 * nbytes
        assert it.bring(1, 0, 50) is STORED
        assert it.budget.used_nbytes == 3 * nbytes
        it.end_child(1)
        assert it.found() == [(0, 50, 50), (0, 100, 50), (1, 0, 50)]


def test_what_a_checkpoint_covers_is_kept_no_longer() -> None:
    with node() as it:
        log = it.store.log(FEED)
        it.bring(0, 0, 10)
        log.settle(1)  # epochs 0 and 1 read it
        it.bring(0, 10, 20, epoch=2, run="call.2")
        log.release([0, 1])
        log.forget(1)
        assert it.budget.num_segments == 2
        log.forget(2)
        assert it.budget.num_segments == 1
        it.end_child(1)
        it.store.log(FEED).forget(9)  # of the next generation's epochs
        assert it.found("call.2") == [(0, 10, 10)]


def test_what_a_checkpoint_covers_before_it_is_released_is_not_kept_at_all() -> None:
    """The last batch of an epoch may be covered while the epoch is not over at the child."""
    with node() as it:
        it.bring(0, 0, 10)
        it.bring(0, 10, 20, epoch=1)
        it.store.log(FEED).settle(0)
        it.store.log(FEED).forget(1)
        it.store.log(FEED).release([0, 1])
        assert it.budget.num_segments == 1
        it.end_child(1)
        assert it.found() == [(0, 10, 10)]


@pytest.mark.parametrize("by", ["another job", "terminate", "exchange", "files"])
def test_rows_that_nobody_wants_again_are_not_found_again(by: str) -> None:
    with node() as it:
        log = it.store.log(FEED)
        if by == "exchange":
            log.append(numbers(0, 10), Deadline.after(SOON_S), AppendRequest(exchange="e"))
        else:
            it.bring(0, 0, 10, run="" if by == "files" else "call.0")
        if by == "terminate":
            log.close_call()
        it.end_child(1)
        assert it.found("call.1" if by == "another job" else "call.0") == []
