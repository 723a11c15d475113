"""A log takes segments within a budget, and what waits for room is told when it may go on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from sparkdl.control.rows import EpochCount
from sparkdl.feed.store.held import AppendRequest, Budget
from sparkdl.feed.store.log import Log
from sparkdl.feed.store.segment import (
    StoredSegment,
    read_segment,
    segment_nbytes,
)
from tests.doubles.feeds import SOON_S, NoRoomError, Running, at_once, noting, numbers

BATCH = numbers(0, 100)


NBYTES = segment_nbytes(BATCH)


FIRST = AppendRequest()


class Pressed:
    """Lets a test wait until an append waits for room."""

    def __init__(self) -> None:
        self.semaphore = threading.Semaphore(0)

    def __call__(self) -> None:
        self.semaphore.release()

    def wait(self) -> None:
        assert self.semaphore.acquire(timeout=SOON_S), "no append waits for room"


@contextmanager
def open_log(
    limit_nbytes: int,
    limit_segments: int | None = None,
    disk_nbytes: int = 0,
    folder: Path | None = None,
) -> Iterator[LogFixture]:
    fixture = LogFixture(limit_nbytes, limit_segments, disk_nbytes, folder)
    yield fixture
    fixture.log.close()


class LogFixture:
    def __init__(
        self, limit_nbytes: int, limit_segments: int | None, disk_nbytes: int, folder: Path | None
    ) -> None:
        self.pressed = Pressed()
        self.budget = Budget(limit_nbytes, self.pressed, limit_segments, disk_nbytes, folder)
        self.segments: list[StoredSegment] = []
        self.log = Log("input", self.budget, noting(self.segments))

    def append(self, batch: pa.RecordBatch = BATCH, place: AppendRequest = FIRST) -> bool:
        return self.log.append(batch, place)

    def is_full(self, place: AppendRequest = FIRST) -> bool:
        """Whether an append would have to wait."""
        with at_once(self.budget):
            try:
                return not self.append(place=place)
            except NoRoomError:
                return True


def descriptors() -> set[str]:
    return {name for name in os.listdir("/dev/fd") if os.path.exists(f"/dev/fd/{name}")}


# the budget


def test_budget_is_shared_by_logs_and_each_may_have_one_segment() -> None:
    """Whoever waits for rows of one feed gets them however full the others are."""
    with open_log(NBYTES) as it:
        other = Log("other", it.budget, noting(it.segments))
        assert it.append()
        assert other.append(BATCH, FIRST)
        waiting = Running(lambda: other.append(BATCH, FIRST))
        it.pressed.wait()
        it.log.close()
        other.release([0])
        assert waiting.result()
        other.close()
        assert it.budget.used_nbytes == 0


# epochs that are read again


KEPT = AppendRequest(keep=True)


def test_kept_rows_go_to_disk_when_memory_is_full(tmp_path: Path) -> None:
    before = descriptors()
    with open_log(NBYTES, disk_nbytes=2 * NBYTES, folder=tmp_path) as it:
        for _ in range(3):
            assert it.append(place=KEPT)
        assert [segment.is_on_disk for segment in it.segments] == [False, True, True]
        assert (it.budget.used_nbytes, it.budget.used_disk_nbytes) == (NBYTES, 2 * NBYTES)
        assert list(tmp_path.iterdir()) == []  # without a name, so that nothing can be left behind
        assert read_segment(it.segments[2].fd).equals(BATCH)
        assert it.is_full(KEPT)
        it.log.release([1])
        assert it.append(place=KEPT)
        assert it.segments[-1].is_on_disk
    assert descriptors() == before
    assert it.budget.used_disk_nbytes == 0


def test_rows_that_are_read_once_wait_for_memory_rather_than_go_to_disk(tmp_path: Path) -> None:
    with open_log(NBYTES, disk_nbytes=9 * NBYTES, folder=tmp_path) as it:
        assert it.append()
        assert it.is_full()


def test_epoch_is_whole_until_something_had_to_go() -> None:
    with open_log(2 * NBYTES) as it:
        for _ in range(2):
            assert it.append(place=KEPT)
        assert it.log.cut(0) == EpochCount(0, 200, is_whole=True)
        assert not it.log.press()  # what is counted as whole stays, whoever else wants room
        it.log.settle(0)
        assert it.log.press()
        it.log.release([0, 1])
        assert it.append(place=AppendRequest(1))
        assert it.log.cut(1) == EpochCount(1, 100, is_whole=False)
        it.log.settle(1)
        it.log.release([2])
        assert it.append(place=AppendRequest(2))
        assert it.log.cut(2) == EpochCount(2, 100, is_whole=True)


def test_disk_that_is_full_before_its_time_counts_as_full(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with open_log(NBYTES, disk_nbytes=9 * NBYTES, folder=gone) as it:
        assert it.append(place=KEPT)
        assert it.is_full(KEPT)  # writing fails
        assert it.budget.disk_nbytes == it.budget.used_disk_nbytes == 0
        assert it.budget.num_segments == 1


# segments


# rows that were read, by segment, become rows by partition until a checkpoint covers them


# any sequence
