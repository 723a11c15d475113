"""Rows that a child had are found again by the next one, each once, and never stand in the way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.control.rows import PartRows
from sparkdl.core.deadline import Deadline
from sparkdl.core.row_ranges import merge_ranges
from sparkdl.feed.store.log import Appended, AppendRequest, Attempt
from sparkdl.feed.store.segment import StoredSegment, read_segment, write_segment
from sparkdl.feed.store.store import NodeStore, StoreLimits
from tests.doubles.feeds import FEED, SOON_S, noting, numbers

APART = 1000
"""Between the first rows of two partitions."""


class Node:
    """A store, and what it has told the child."""

    def __init__(self, limit_nbytes: int, limit_segments: int | None = None) -> None:
        self.segments: list[StoredSegment] = []
        limits = StoreLimits(limit_nbytes, keeps=True)
        self.store = NodeStore(limits, SOON_S, noting(self.segments), lambda _: None)
        self.budget = self.store.budget
        self.budget.limit_segments = limit_segments or 1000

    def bring(
        self, part: int, start: int, stop: int, epoch: int = 0, run: str = "call.0"
    ) -> Appended:
        """Do what a feeder's thread does; the column "x" tells partition and row."""
        log = self.store.log(FEED)
        attempt = Attempt(run, part)
        log.begin(attempt, epoch)
        batch = numbers(part * APART + start, part * APART + stop)
        return log.append(batch, Deadline.after(SOON_S), AppendRequest(epoch, attempt, start))

    def end_child(self, generation: int) -> None:
        """Begin a new generation."""
        self.store.close("the child has died")
        self.segments.clear()
        self.store.reopen(generation)

    @property
    def rows(self) -> list[int]:
        """What this generation's child was told."""
        return [x for s in self.segments for x in read_segment(s.fd).column("x").to_pylist()]

    def covered(self, part: int, run: str = "call.0") -> list[tuple[int, int]]:
        return self.store.log(FEED).begin(Attempt(run, part, 1), 0)


@contextmanager
def node(limit_nbytes: int = 1 << 20, limit_segments: int | None = None) -> Iterator[Node]:
    found = Node(limit_nbytes, limit_segments)
    yield found
    found.store.close("the test is over")
    found.store.clear()
    assert found.budget.used_nbytes == found.budget.num_segments == 0


def nbytes_of(rows: int) -> int:
    fd, nbytes = write_segment(numbers(0, rows))
    os.close(fd)
    return nbytes


segments = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 9), st.sampled_from(["read", "here"])), max_size=8
)
done_rows = st.dictionaries(
    st.integers(0, 3), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=3)
)


@given(st.lists(st.tuples(segments, done_rows), min_size=1, max_size=3))
def test_rows_that_are_not_covered_come_again_and_others_do_not(
    generations: list[tuple[list[tuple[int, int, str]], dict[int, list[tuple[int, int]]]]],
) -> None:
    """Some were read, some not; in later generations a feeder brings more behind them."""
    with node() as it:
        ends = [0, 0, 0]
        everything: set[int] = set()
        for generation, (brought, covered) in enumerate(generations):
            for part, rows, what in brought:
                start, ends[part] = ends[part], ends[part] + rows
                assert it.bring(part, start, ends[part]) is Appended.STORED
                everything |= {part * APART + row for row in range(start, ends[part])}
                if what == "read":
                    it.store.log(FEED).release([it.segments[-1].number])
            done: PartRows = {part: tuple(merge_ranges(r)) for part, r in covered.items()}
            it.end_child(generation + 1)
            it.store.resume(FEED, 3, "call.0", done, 1000)
            everything -= {
                part * APART + row
                for part, ranges in done.items()
                for start, stop in ranges
                for row in range(start, stop)
            }
            assert sorted(it.rows) == sorted(everything)
            assert {segment.epoch for segment in it.segments} <= {3}
            assert it.store.log(FEED).rows_of(3) == len(everything)
            assert it.budget.used_nbytes == sum(segment.nbytes for segment in it.segments)
            for part in range(3):
                told = it.store.log(FEED).begin(Attempt("call.0", part), 3)
                rows_told = {
                    part * APART + row for start, stop in told for row in range(start, stop)
                }
                assert rows_told == {x for x in everything if x // APART == part}
            origins = it.store.log(FEED).provenance.rows(
                {3: {segment.number: ((0, segment.rows),) for segment in it.segments}}
            )
            assert everything == {
                part * APART + row
                for part, ranges in origins.get(3, {}).items()
                for start, stop in ranges
                for row in range(start, stop)
            }


def test_what_was_read_makes_room_at_once_the_oldest_first() -> None:
    nbytes = nbytes_of(50)
    with node(3 * nbytes) as it:
        for start in (0, 50, 100):
            it.bring(0, start, start + 50)
        it.store.log(FEED).release([0, 1])
        assert it.budget.used_nbytes == 3 * nbytes
        assert it.bring(1, 0, 50) is Appended.STORED
        assert it.budget.used_nbytes == 3 * nbytes
        it.end_child(1)
        it.store.resume(FEED, 0, "call.0", {}, 1000)
        assert sorted(it.rows) == [*range(50, 150), *range(APART, APART + 50)]
        assert it.covered(0) == [(50, 150)]


def test_what_a_checkpoint_covers_is_kept_no_longer() -> None:
    with node() as it:
        log = it.store.log(FEED)
        it.bring(0, 0, 10)
        log.settle(1)  # epochs 0 and 1 read it
        it.bring(0, 10, 20, epoch=2, run="call.2")
        log.release([0, 1])
        it.store.forget(FEED, 1)
        assert it.budget.num_segments == 2
        it.store.forget(FEED, 2)
        assert it.budget.num_segments == 1
        it.end_child(1)
        it.store.forget(FEED, 9)  # of the next generation's epochs
        it.store.resume(FEED, 0, "call.2", {}, 1000)
        assert it.rows == list(range(10, 20))


def test_what_a_checkpoint_covers_before_it_is_released_is_not_kept_at_all() -> None:
    """The last batch of an epoch may be covered while the epoch is not over at the child."""
    with node() as it:
        it.bring(0, 0, 10)
        it.bring(0, 10, 20, epoch=1)
        it.store.log(FEED).settle(0)
        it.store.forget(FEED, 1)
        it.store.log(FEED).release([0, 1])
        assert it.budget.num_segments == 1
        it.end_child(1)
        it.store.resume(FEED, 0, "call.0", {}, 1000)
        assert it.rows == list(range(10, 20))


def test_what_was_read_holds_no_descriptors_that_are_wanted() -> None:
    with node(limit_segments=2) as it:
        for start in range(6):
            assert it.bring(0, start, start + 1) is Appended.STORED
            it.store.log(FEED).release([start])
        assert it.budget.num_segments == 2


def test_partition_that_is_being_brought_already_is_not_found_again() -> None:
    """Its feeder has been told that nothing is here."""
    with node() as it:
        it.bring(0, 0, 10)
        it.bring(1, 0, 10)
        it.end_child(1)
        assert it.store.log(FEED).begin(Attempt("call.0", 0), 0) == []
        it.store.resume(FEED, 0, "call.0", {}, 1000)
        assert it.rows == list(range(APART, APART + 10))


@pytest.mark.parametrize("by", ["another job", "terminate", "exchange"])
def test_rows_that_nobody_wants_again_are_not_found_again(by: str) -> None:
    with node() as it:
        log = it.store.log(FEED)
        if by == "exchange":
            log.append(numbers(0, 10), Deadline.after(SOON_S), AppendRequest(exchange="e"))
        else:
            it.bring(0, 0, 10)
        if by == "terminate":
            log.close_call()
        it.end_child(1)
        it.store.resume(FEED, 0, "call.1" if by == "another job" else "call.0", {}, 1000)
        assert it.rows == []
        assert it.covered(0) == []


def test_no_more_rows_are_found_again_than_are_the_nodes_part() -> None:
    with node() as it:
        it.bring(0, 0, 10)
        it.bring(1, 0, 10)
        it.end_child(1)
        it.store.resume(FEED, 0, "call.0", {0: ((2, 4),)}, 13)
        assert it.rows == [0, 1, *range(4, 10), *range(APART, APART + 5)]
        assert it.covered(1) == [(0, 5)]


def test_rows_of_the_child_before_the_last_may_be_elsewhere_by_now() -> None:
    with node() as it:
        it.bring(0, 0, 10)
        it.end_child(1)
        it.end_child(2)
        it.store.resume(FEED, 0, "call.0", {}, 1000)
        assert it.rows == []
        assert it.budget.used_nbytes == 0
