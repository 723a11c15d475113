"""The store's locks are taken in one order, so that no two threads wait for each other."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparkdl.core.deadline import Deadline
from sparkdl.feed.store import budget, log, segment, store
from sparkdl.feed.store.log import Appended, AppendRequest, Attempt, Log
from sparkdl.feed.store.segment import write_segment
from sparkdl.feed.store.store import NodeStore, StoreLimits
from sparkdl.feed.transfer import balance
from tests.doubles.feeds import SOON_S, noting, numbers

ORDER = ["Budget", "NodeStore", "Log", "RetainedSegments", "RowBalancer", "Provenance"]
"""A thread that holds the lock of one may take those of the later ones."""
NESTED = {("Budget", "Log"), ("Budget", "RetainedSegments"), ("Log", "Provenance")}
BATCH = numbers(0, 100)
FD, NBYTES = write_segment(BATCH)
os.close(FD)
FEEDS = ("a", "b")


class Noted:
    """A lock that notes which other ones its thread holds when it is taken."""

    held: ClassVar[list[Noted]] = []
    nested: ClassVar[set[tuple[str, str]]] = set()

    def __init__(self, may_repeat: bool) -> None:
        self.owner = type(sys._getframe(2).f_locals["self"]).__name__
        self._may_repeat = may_repeat

    def acquire(self, *_: Any) -> bool:
        assert self not in self.held or self._may_repeat, f"{self.owner} would wait for itself"
        if self not in self.held:
            self.nested.update((other.owner, self.owner) for other in self.held)
        self.held.append(self)
        return True

    def release(self) -> None:
        self.held.remove(self)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Waiting(Noted):
    """A condition that nobody notifies: the time of a wait is over at once."""

    def wait(self, timeout: float | None = None) -> None:
        threading.Event().wait(timeout)

    def notify_all(self) -> None:
        assert self in self.held


@pytest.fixture(autouse=True, scope="module")
def _noted() -> Iterator[None]:
    noted = SimpleNamespace(
        Lock=lambda: Noted(may_repeat=False),
        Condition=lambda: Waiting(may_repeat=True),
        Event=threading.Event,
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (budget, log, segment, store, balance):
            patch.setattr(module, "threading", noted)
        yield


class Moves:
    """A store with room for two segments in memory and two on disk, and what is done to it."""

    def __init__(self, folder: Path) -> None:
        self.segments: list[Any] = []
        limits = StoreLimits(2 * NBYTES, folder=folder, disk_nbytes=NBYTES, keeps=True)
        self.store = NodeStore(limits, SOON_S, noting(self.segments), lambda feed: None)
        self.epoch = self.generation = self.attempts = 0

    def log(self, feed: str) -> Log:
        return self.store.log(feed)

    def append(self, feed: str, flag: bool) -> None:
        self.attempts += 1
        attempt = Attempt("run", self.attempts)
        epoch = max(self.epoch, self.log(feed).last_cut.epoch + 1)
        self.log(feed).begin(attempt, epoch)
        place = AppendRequest(epoch, attempt, keep=flag)
        for _ in range(2):
            outcome = self.log(feed).append(BATCH, Deadline.after(0.001), place)
            assert outcome in Appended

    def release(self, feed: str, flag: bool) -> None:
        here = [each.number for each in self.segments if each.feed == feed]
        self.log(feed).release(here[:1] if flag else here)

    def take_back(self, feed: str, flag: bool) -> None:
        here = [each.number for each in self.segments if each.feed == feed]
        self.log(feed).take_back(dict.fromkeys(here[-2:], 0))

    def cut(self, feed: str, flag: bool) -> None:
        self.log(feed).cut(self.epoch)
        if flag:
            self.log(feed).settle(self.epoch)
        self.epoch += 1

    def forget(self, feed: str, flag: bool) -> None:
        self.store.forget(feed, self.epoch + flag)

    def end_call(self, feed: str, flag: bool) -> None:
        self.log(feed).expect(self.epoch)
        self.log(feed).close_call()

    def begin_anew(self, feed: str, flag: bool) -> None:
        """Another child comes, which may be given again what the last one was brought."""
        self.store.close("over")
        self.generation += 1
        self.segments.clear()
        self.store.reopen(self.generation)
        self.store.resume(feed, self.epoch, "run", {}, 150 if flag else 0)

    def plan(self, feed: str, flag: bool) -> None:
        self.log(feed).visit(Attempt("run", self.attempts + 1), self.epoch, [0, 1])
        self.store.press_again()


MOVES = [
    *(Moves.append, Moves.append, Moves.append, Moves.release, Moves.take_back, Moves.cut),
    *(Moves.forget, Moves.end_call, Moves.begin_anew, Moves.plan),
]
ALL = [
    *[(Moves.append, "a", True)] * 3,
    *((Moves.plan, "a", True), (Moves.take_back, "a", True), (Moves.append, "a", True)),
    *((Moves.begin_anew, "a", True), (Moves.append, "b", False), (Moves.append, "b", False)),
    *((Moves.release, "b", True), (Moves.forget, "b", True), (Moves.cut, "a", True)),
]


@given(
    st.lists(st.tuples(st.sampled_from(MOVES), st.sampled_from(FEEDS), st.booleans()), max_size=25)
)
@example(ALL)
def test_locks_of_a_store_are_taken_in_one_order(moves: list[tuple[Any, str, bool]]) -> None:
    with TemporaryDirectory() as folder:
        it = Moves(Path(folder))
        for move, feed, flag in moves:
            move(it, feed, flag)
            assert Noted.held == []
        it.store.close("over")
        it.store.clear()
        assert (it.store.budget.used_nbytes, it.store.budget.num_segments) == (0, 0)
    assert Noted.nested >= NESTED, "the examples below show each of these"
    for outer, inner in Noted.nested:
        assert ORDER.index(outer) < ORDER.index(inner), f"{inner} is taken within {outer}"
