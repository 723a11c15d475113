"""Every row that a feeder brings is in one place: spooled, in the log, sent, retained or freed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparkdl.control.messages import SpooledRange
from sparkdl.control.rows import EpochCount
from sparkdl.feed.store.buffer import AppendRequest, Pool, SegmentBuffer
from sparkdl.feed.store.segment import StoredSegment, read_segment, segment_nbytes
from sparkdl.feed.store.session import Exchange
from sparkdl.feed.store.store import NodeStore, StoreLimits
from tests.doubles.feeds import FEED, SOON_S, NoRoomError, Running, at_once, noting, numbers
from tests.doubles.until import until

BATCH = numbers(0, 100)
APART = 1_000_000
"""Between the first rows of two partitions."""

NBYTES = segment_nbytes(BATCH)


def memory_files() -> int:
    """Return how many descriptors of segments this process has."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "sparkdl" in os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


class Node:
    """A store, what it has reported of its spool, and what its child was sent."""

    def __init__(self, limits: StoreLimits, segments: int = 1000) -> None:
        self.ranges: list[SpooledRange] = []
        self.segments: list[StoredSegment] = []
        send = noting(self.segments)
        self.store = NodeStore(
            limits, SOON_S, send, lambda *of: self.ranges.extend(of[2]), self._press
        )
        self.store.budget.limit_segments = segments
        self.pressed = 0

    def _press(self, feed: str) -> None:
        self.pressed += 1

    def bring(
        self,
        part: int = 0,
        start: int = 0,
        rows: int = 100,
        keep: bool = False,
        epoch: int = 0,
        waits: bool = False,
    ) -> bool | None:
        """Do what a feeder does; column "x" tells partition and row. `None`: there is no room."""
        batch = numbers(part * APART + start, part * APART + start + rows)
        request = AppendRequest(epoch, keep=keep, spans=((part, start, start + rows),), run="run")
        return self._append(self.store.spool(FEED), batch, request, waits)

    def append(
        self, start: int = 0, stop: int = 100, epoch: int = 0, run: str = "run", keep: bool = False
    ) -> bool | None:
        """Do what a thread does that fetches or reads."""
        request = AppendRequest(epoch, keep=keep, spans=((9, start, stop),), run=run)
        return self._append(self.store.log(FEED), numbers(start, stop), request)

    def _append(
        self, to: SegmentBuffer, batch: pa.RecordBatch, request: AppendRequest, waits: bool = False
    ) -> bool | None:
        with nullcontext() if waits else at_once(self.store.budget):
            try:
                return to.append(batch, request)
            except NoRoomError:
                return None

    def end_child(self) -> None:
        """Begin a new generation."""
        self.store.close("the child has died")
        self.store.reopen(self.store.generation + 1)

    def found(self, run: str = "run") -> list[tuple[int, int]]:
        """Return which rows of a job are found again: the first row, how many."""
        return sorted((piece.start, piece.rows) for piece in self.store.recall(FEED, 0, run))

    @property
    def used(self) -> tuple[int, int, int]:
        budget = self.store.budget
        return budget.used_nbytes, budget.used_disk_nbytes, budget.num_segments


@contextmanager
def node(nbytes: int = 1 << 28, disk: Path | None = None, keeps: bool = False) -> Iterator[Node]:
    """Make a node, with twice as much room on disk, if there is one."""
    files = memory_files()
    it = Node(StoreLimits(nbytes, 2 * nbytes, disk, keeps))
    try:
        yield it
    finally:
        it.store.shut_down("the test is over")
    assert it.used == (0, 0, 0)
    assert memory_files() == files


def xs(segment: StoredSegment) -> list[int]:
    batch = read_segment(segment.fd).slice(segment.start, segment.rows)
    return [int(x) for x in batch.column("x").to_pylist()]


def test_rows_that_are_apart_in_their_partition_are_lots_of_one_segment() -> None:
    with node() as it:
        request = AppendRequest(spans=((3, 0, 40), (3, 70, 130)), run="run")
        assert it.store.spool(FEED).append(BATCH, request)
        assert [(piece.number, piece.start, piece.skip, piece.rows) for piece in it.ranges] == [
            *((0, 0, 0, 40), (0, 70, 40, 60))
        ]
        assert sum(piece.nbytes for piece in it.ranges) == NBYTES
        it.store.assign(FEED, 0, 30, 20)
        assert it.segments[0].spans == ((3, 30, 40), (3, 70, 80))


def test_rows_that_a_child_was_to_have_when_it_died_are_the_next_ones() -> None:
    with node(keeps=True) as it:
        it.bring()
        it.store.close("the child has died")
        it.store.assign(FEED, 0, 0, 60)
        it.store.reopen(1)
        assert it.found() == [(0, 60), (60, 40)]


@pytest.mark.parametrize(("memory", "segments"), [(4, 1000), (1000, 4)])
def test_spool_takes_half_of_the_room_and_never_locks_out_logs(memory: int, segments: int) -> None:
    with node(memory * NBYTES) as it:
        it.store.budget.limit_segments = segments
        assert [it.bring() for _ in range(3)] == [True, True, None]
        assert it.pressed == 0, "nothing that the child has would make room in the spool"
        assert [it.append() for _ in range(3)] == [True, True, None]
        assert it.pressed >= 1
        waiting = Running(lambda: it.bring(waits=True))
        it.store.spool(FEED).free(0, 0, 100)
        assert waiting.result()


def test_budget_is_shared_by_logs_and_each_may_have_one_segment() -> None:
    """Whoever waits for rows of one feed gets them however full the others are."""
    with node(NBYTES) as it:
        other = it.store.log("other")
        assert it.append()
        assert other.append(BATCH, AppendRequest())
        waiting = Running(lambda: other.append(BATCH, AppendRequest()))
        assert until(lambda: it.pressed)
        it.store.log(FEED).release([0])
        other.release([0])
        assert waiting.result()


def test_rows_go_to_disk_when_memory_is_full_if_they_are_kept(tmp_path: Path) -> None:
    with node(NBYTES, tmp_path) as it:
        assert [it.append(keep=True) for _ in range(4)] == [True, True, True, None]
        assert [segment.is_on_disk for segment in it.segments] == [False, True, True]
        assert it.used == (NBYTES, 2 * NBYTES, 3)
        assert list(tmp_path.iterdir()) == []  # without a name, so that nothing can be left behind
        assert read_segment(it.segments[2].fd).equals(BATCH)
    with node(NBYTES, tmp_path) as it:
        assert [it.append() for _ in range(2)] == [True, None]


def test_disk_that_is_full_before_its_time_counts_as_full(tmp_path: Path) -> None:
    with node(NBYTES, tmp_path / "gone") as it:
        assert [it.append(keep=True) for _ in range(2)] == [True, None], "writing fails"
        assert it.used == (NBYTES, 0, 1)


def test_epoch_is_whole_until_something_had_to_go() -> None:
    with node(2 * NBYTES) as it:
        log = it.store.log(FEED)
        for _ in range(2):
            assert it.append()
        for _ in range(2):  # the first count stands
            assert log.cut(0) == EpochCount(0, 200, is_whole=True)
        assert not log.press()  # what is counted as whole stays, whoever else wants room
        log.settle(0)
        assert log.press()
        log.release([0, 1])
        for epoch, is_whole in ((1, False), (2, True)):
            assert it.append(epoch=epoch)
            assert log.cut(epoch) == EpochCount(epoch, 100, is_whole)
            log.settle(epoch)
            log.release([epoch + 1])


def test_rows_that_come_again_are_retained_until_none_do() -> None:
    with node() as it:
        log = it.store.log(FEED)
        it.bring()
        log.retain_read(comes_again=True)
        it.store.assign(FEED, 0, 0, 100)
        log.forget(9)  # a checkpoint covers them: the next epoch reads them all the same
        log.release([0])
        (piece,) = it.store.recall(FEED, 1, "run")
        it.store.assign(FEED, piece.number, 0, 60)
        log.release([1])
        log.retain_read(comes_again=False)
        assert it.store.recall(FEED, 2, "run") == [], "the call has ended early"
        it.store.assign(FEED, piece.number, 60, 40)
        log.release([2])
        assert it.used == (0, 0, 0)


def test_what_was_read_makes_room_at_once_the_oldest_first() -> None:
    with node(3 * NBYTES, keeps=True) as it:
        for start in (0, 100, 200):
            it.append(start, start + 100)
        it.store.log(FEED).release([0, 1])
        assert it.used == (3 * NBYTES, 0, 3)
        assert it.append(300, 400)
        assert it.used == (3 * NBYTES, 0, 3)
        it.store.log(FEED).release([2])
        assert [it.bring() for _ in range(2)] == [True, None]
        assert it.used == (3 * NBYTES, 0, 3), "a full spool takes no room from retained rows"
        it.end_child()
        assert it.found() == [(0, 100), (200, 100), (300, 100)]


def test_what_a_checkpoint_covers_is_kept_no_longer() -> None:
    with node(keeps=True) as it:
        log = it.store.log(FEED)
        it.append(0, 10)
        log.settle(1)  # epochs 0 and 1 read it
        it.append(10, 20, epoch=2, run="later")
        log.release([0, 1])
        log.forget(1)
        assert it.store.budget.num_segments == 2
        log.forget(2)
        assert it.store.budget.num_segments == 1
        it.end_child()
        it.store.log(FEED).forget(9)  # of the next generation's epochs
        assert it.found("later") == [(10, 10)]


def test_what_a_checkpoint_covers_before_it_is_released_is_not_kept_at_all() -> None:
    """The last batch of an epoch may be covered while the epoch is not over at the child."""
    with node(keeps=True) as it:
        it.append(0, 10)
        it.append(10, 20, epoch=1)
        it.store.log(FEED).settle(0)
        it.store.log(FEED).forget(1)
        it.store.log(FEED).release([0, 1])
        assert it.store.budget.num_segments == 1
        it.end_child()
        assert it.found() == [(10, 10)]


@pytest.mark.parametrize("by", ["another job", "terminate", "exchange", "files"])
def test_rows_that_nobody_wants_again_are_not_found_again(by: str) -> None:
    with node(keeps=True) as it:
        log = it.store.log(FEED)
        if by == "exchange":
            log.append(numbers(0, 10), AppendRequest(exchange=Exchange("e")))
        else:
            it.append(0, 10, run="" if by == "files" else "run")
        if by == "terminate":
            log.close_call()
        it.end_child()
        assert it.found("another" if by == "another job" else "run") == []


NUMBER = st.integers(0, 99)


class Moves(RuleBasedStateMachine):
    """Feeders, the driver, other nodes and the child do what they like, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.files = memory_files()
        self.folder = TemporaryDirectory()
        self.it = Node(StoreLimits(1))

    @initialize(
        tenths=st.integers(1, 60), disk=st.booleans(), keeps=st.booleans(), most=st.integers(2, 9)
    )
    def begins(self, tenths: int, disk: bool, keeps: bool, most: int) -> None:
        folder = Path(self.folder.name)
        limits = StoreLimits(NBYTES * tenths // 10, 2 * NBYTES * disk, folder, keeps)
        self.it = Node(limits, most)
        self.epoch = self.row = 0
        self.ranges: dict[int, list[tuple[int, int, int]]] = {}
        self.here: dict[int, tuple[int, int]] = {}  # in the log, by number: first row, rows
        self.spooled: set[int] = set()
        self.settled: set[int] = set()
        """Rows of the log that no later epoch reads again, and those that a checkpoint covers."""
        self.covered: set[int] = set()

    def _notice(self) -> None:
        for piece in self.it.ranges:
            self.ranges[piece.number] = [(piece.start, 0, piece.rows)]
            self.spooled |= set(range(piece.start, piece.start + piece.rows))
        self.it.ranges.clear()

    @rule(rows=st.integers(1, 150), keep=st.booleans(), late=st.booleans())
    def feeder_brings(self, rows: int, keep: bool, late: bool) -> None:
        is_empty = not self.ranges
        outcome = self.it.bring(0, self.row, rows, keep, self.epoch - late)
        assert outcome is not False or late
        assert outcome or late or not is_empty
        self._notice()
        self.row += rows

    @rule(at=NUMBER, skip=NUMBER, rows=st.integers(1, 150), own=st.booleans())
    @precondition(lambda self: self.ranges)
    def driver_grants(self, at: int, skip: int, rows: int, own: bool) -> None:
        number = list(self.ranges)[at % len(self.ranges)]
        windows = self.ranges[number]
        first, low, high = windows.pop(skip % len(windows))
        low_cut = min(high - 1, low + skip)
        high_cut = min(high, low_cut + rows)
        windows += [(first, a, b) for a, b in ((low, low_cut), (high_cut, high)) if a < b]
        if not windows:
            del self.ranges[number]
        assigned = range(first + low_cut, first + high_cut)
        count = high_cut - low_cut
        spool = self.it.store.spool(FEED)
        if own:
            before = len(self.it.segments)
            self.it.store.assign(FEED, number, low_cut, count)
            for segment in self.it.segments[before:]:
                assert xs(segment) == list(assigned)
                self.here[segment.number] = assigned.start, count
        else:
            (read,) = spool.read([(number, low_cut, count)])
            assert read.column("x").to_pylist() == list(assigned)
            spool.free(number, low_cut, count)
        self.spooled -= set(assigned)

    @rule(at=NUMBER)
    @precondition(lambda self: self.ranges)
    def driver_wants_no_more(self, at: int) -> None:
        number = list(self.ranges)[at % len(self.ranges)]
        self._drop(number)

    def _drop(self, number: int) -> None:
        for first, low, high in self.ranges.pop(number):
            self.spooled -= set(range(first + low, first + high))
            self.it.store.spool(FEED).free(number, low, high - low)

    @rule(rows=st.integers(1, 150))
    def row_is_fetched(self, rows: int) -> None:
        """It never waits because of the spool alone."""
        span = (0, self.row, self.row + rows)
        request = AppendRequest(self.epoch, spans=(span,), run="run")
        batch = numbers(self.row, self.row + rows)
        is_stored = self.it._append(self.it.store.log(FEED), batch, request)
        assert is_stored or self.here
        if is_stored:
            self.here[self.it.segments[-1].number] = self.row, rows
            self.row += rows

    @rule(least=st.integers(0, 9))
    def child_releases(self, least: int) -> None:
        gone = list(self.here)[: 1 + least % 3]
        self.it.store.log(FEED).release(gone)
        for number in gone:
            del self.here[number]

    @rule(again=st.booleans())
    def epoch_is_cut(self, again: bool) -> None:
        log = self.it.store.log(FEED)
        self.it.store.spool(FEED).refuse(self.epoch)
        log.cut(self.epoch)
        if not again:
            log.settle(self.epoch)
            self.settled |= self._rows_here()
        self.epoch += 1
        for number in list(self.ranges):  # of an epoch that was cut they go to other nodes alone
            self._drop(number)

    @rule(recalls=st.booleans())
    def child_is_replaced(self, recalls: bool) -> None:
        before = (self._rows_here() | self.spooled) - self.covered
        self.it.end_child()
        self.it.segments.clear()
        self.ranges, self.spooled = {}, set()
        self.here.clear()
        self.settled, self.covered = set(), set()
        self.epoch = 0
        if recalls:
            ranges = self.it.store.recall(FEED, 0, "run")
            self.it.ranges += ranges
            self._notice()
            assert sum(piece.rows for piece in ranges) == len(self.spooled), "no row twice"
            assert not before - self.spooled or not self.it.store._keeps

    @rule()
    def checkpoint_covers(self) -> None:
        self.it.store.log(FEED).forget(self.epoch)
        self.covered |= self.settled

    def _rows_here(self) -> set[int]:
        return {x for first, rows in self.here.values() for x in range(first, first + rows)}

    @invariant()
    def bytes_are_those_of_the_segments(self) -> None:
        budget = self.it.store.budget
        held = sum(len(windows) > 0 for windows in self.ranges.values())
        assert budget._segments[Pool.SPOOL, FEED] == held
        assert budget._segments[Pool.LOG, FEED] == len(self.here)
        assert min(budget._nbytes.values(), default=0) >= 0
        assert budget.used_disk_nbytes >= 0
        assert memory_files() - self.files <= budget.num_segments

    def teardown(self) -> None:
        self.it.store.shut_down("over")
        assert self.it.used == (0, 0, 0)
        assert all(not n for n in self.it.store.budget._segments.values())
        assert memory_files() == self.files
        self.folder.cleanup()


TestAnySequence = Moves.TestCase
TestAnySequence.settings = settings(stateful_step_count=30)
