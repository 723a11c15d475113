"""The store has one lock, and no thread holds another one while it takes that, or takes another.

A row meets two locks at an agent: `Budget.lock`, which guards all of the store, and the one of a
`Fetcher`, which guards what is to be fetched next. (`FdReceiver` has one for descriptors that have
come.) What the store calls with its lock held only leaves work to the agent's loop.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from sparkdl.feed.store import buffer, segment
from sparkdl.feed.store.buffer import AppendRequest
from sparkdl.feed.transfer import fetch
from tests.doubles.feeds import FEED, LevelDriver, LocalNode, Running, numbers, values


class Noted(threading.Condition):
    """A lock that notes which other ones its thread holds when it is taken."""

    held: ClassVar[threading.local] = threading.local()
    taken: ClassVar[set[str]] = set()
    nested: ClassVar[set[tuple[str, str]]] = set()

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __enter__(self) -> bool:
        found = super().__enter__()
        stack = self.held.__dict__.setdefault("names", [])
        Noted.taken.add(self.name)
        Noted.nested.update((outer, self.name) for outer in stack if outer != self.name)
        stack.append(self.name)
        return found

    def __exit__(self, *of: Any) -> None:
        self.held.__dict__["names"].pop()
        super().__exit__(*of)


@pytest.fixture
def _noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((buffer, "store"), (fetch, "fetcher")):
        noted = SimpleNamespace(Condition=lambda name=name: Noted(name), Thread=threading.Thread)
        monkeypatch.setattr(module, "threading", noted)
    Noted.taken.clear()
    Noted.nested.clear()


@pytest.mark.usefixtures("_noted")
def test_no_thread_takes_a_lock_on_a_rows_way_while_it_holds_another() -> None:
    """Rows are spooled, assigned, fetched, read and released, with room for a few of them."""
    nbytes = segment.segment_nbytes(numbers(0, 100))
    with LocalNode(0, 4 * nbytes) as one, LocalNode(1, 4 * nbytes) as other:
        LevelDriver([one, other])
        reading = [Running(lambda node=node: values(node.reader())) for node in (one, other)]  # type: ignore[misc]
        for start in range(0, 2000, 100):
            request = AppendRequest(spans=((0, start, start + 100),), run="run")
            batch = numbers(start, start + 100)
            assert one.feeds.store.spool(FEED).append(batch, request)
        for node in (one, other):
            node.wait_received(1000)
            node.end_epoch(0, {0: 1000, 1: 1000})
        assert sorted(x for each in reading for x in each.result()) == list(range(2000))
    assert Noted.taken == {"store", "fetcher"}
    assert Noted.nested == set()
