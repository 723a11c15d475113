"""Rows that another agent holds come to the node they are assigned to, or a reason does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec import structs

from sparkdl.control.channel import EndMark, Reclaim
from sparkdl.control.messages import Assign, AssignedRange, EpochEnd, FeedBegin, FeedCut, FeedEnd
from sparkdl.control.rows import FeedCount
from sparkdl.feed.store.buffer import AppendRequest
from sparkdl.feed.store.segment import segment_nbytes
from sparkdl.feed.transfer import fetch
from tests.doubles.feeds import FEED, LocalNode, NodeProxy, numbers, values
from tests.doubles.until import until

NBYTES = segment_nbytes(numbers(0, 100))


def spool(node: LocalNode, start: int, rows: int = 100, epoch: int = 0) -> None:
    request = AppendRequest(epoch, spans=((0, start, start + rows),), run="run")
    assert node.feeds.store.spool(FEED).append(numbers(start, start + rows), request)


def last_count(node: LocalNode) -> FeedCount:
    counts = [count for each in node.told for count in each.counts if count.feed == FEED]
    return counts[-1] if counts else FeedCount(FEED)


@contextmanager
def holder_and_fetcher(nbytes: int = 1 << 28) -> Iterator[tuple[LocalNode, LocalNode]]:
    with LocalNode(0) as holder, LocalNode(1, nbytes) as node:
        holder.driver = node.driver = None
        yield holder, node


def range_of(number: int = 0, skip: int = 0, rows: int = 100, start: int = 0) -> AssignedRange:
    return AssignedRange(0, number, skip, rows, ((0, start, start + rows),))


def assign(node: LocalNode, uri: str, *assigned: AssignedRange, in_order: bool = False) -> None:
    order = Assign(FEED, 0, "run", assigned, {0: uri}, in_order=in_order)
    node.call(lambda: node.feeds.on_driver_message(order))


def test_windows_are_fetched_in_order_and_freed_at_their_holder() -> None:
    with holder_and_fetcher() as (holder, node):
        spool(holder, 0)
        assign(node, holder.uri, range_of(0, 50, 50, 50), range_of(0, 0, 20, 0))
        node.wait_received(70)
        node.end_epoch(0, {1: 70})
        assert values(node.reader()) == [*range(50, 100), *range(20)]
        rest = NBYTES * 50 // 100 - NBYTES * 20 // 100
        assert until(lambda: holder.feeds.store.budget.used_nbytes == rest), "it is told last"


def test_rows_that_were_fetched_are_covered_by_their_partition() -> None:
    with LocalNode(0) as holder, LocalNode(1, tracks=True) as node:
        holder.driver = node.driver = None
        spool(holder, 30)
        assign(node, holder.uri, range_of(0, 10, 90, 40))
        node.wait_received(90)
        node.end_epoch(0, {1: 90})
        values(node.reader())
        used = node.link.feeds.positions(None)[0]
        assert node.call(lambda: node.feeds.coverage(used)) == {FEED: {0: {0: ((40, 130),)}}}


@pytest.mark.parametrize(
    ("are_near", "large", "shared"),
    [(True, 1, []), (True, 0.4, [5, 20]), (True, 0, [5, 20, 1]), (False, 0, [20])],
    ids=["on one machine", "some are large", "all are large", "on two machines"],
)
def test_rows_in_an_order_come_as_files_on_one_machine(
    monkeypatch: pytest.MonkeyPatch, are_near: bool, large: float, shared: list[int]
) -> None:
    monkeypatch.setattr(fetch, "_LARGE", large)
    with holder_and_fetcher() as (holder, node):
        if are_near:
            monkeypatch.setattr(fetch.Fetcher, "_get", None)
        else:
            assert node.feeds._receiver is not None
            monkeypatch.setattr(node.feeds._receiver.fd_receiver, "name", "elsewhere")
        for each, start in ((holder, 0), (holder, 100), (node, 200)):
            spool(each, start)
        own = structs.replace(range_of(0, 20, 50, 220), holder=1)
        ranges = (range_of(1, 5, 90, 105), own, range_of(0, 1, 30, 1), range_of(1, 0, 5, 100))
        assign(node, holder.uri, *ranges, in_order=True)
        node.wait_received(175)
        node.end_epoch(0, {1: 175})
        expected = [*range(105, 195), *range(220, 270), *range(1, 31), *range(100, 105)]
        segments = node.feeds.store.log(FEED)._segments.values()
        assert [each.start for each in segments if each.start] == shared
        assert values(node.reader()) == expected
        left = (70 + 5) * NBYTES // 100
        assert until(lambda: abs(holder.feeds.store.budget.used_nbytes - left) < 4)
        fetcher = node.feeds._feeds[FEED].fetcher
        assert fetcher is not None
        assert not fetcher._mapped


def test_marks_wait_until_the_rows_before_them_are_here() -> None:
    with holder_and_fetcher(NBYTES) as (holder, node):
        spool(holder, 0)
        spool(holder, 100)
        assign(node, holder.uri, range_of(), range_of(1, start=100))
        node.wait_received(100)  # the others find no room until the child has read these
        end = EpochEnd(FEED, 0, {1: 200})
        for message in (FeedCut(FEED, 0), end, FeedEnd(())):
            node.call(lambda message=message: node.feeds.on_driver_message(message))  # type: ignore[misc]
        node.call(lambda: None)
        assert not [each for each in node.sent if not isinstance(each, Reclaim)]
        assert not node.feeds.store.spool(FEED).takes(0), "rows of feeders are refused at once"
        assert last_count(node).cut.epoch == -1
        assert values(node.reader()) == list(range(200))
        node.wait_told(lambda _: last_count(node).cut.rows == 200)
        node.wait_sent(lambda sent: EndMark("") in sent)
        marks = [each for each in node.sent if not isinstance(each, Reclaim)]
        assert marks == [end, EndMark("")]


def test_connection_that_breaks_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_PAUSE_S", 0.01)
    with holder_and_fetcher() as (holder, node):
        spool(holder, 0)
        with NodeProxy(holder.target) as proxy:
            uri = proxy.target.uri
        assign(node, uri, range_of())
        node.call(lambda: None)
        with NodeProxy(holder.target, port=int(uri.rpartition(":")[2])):
            node.wait_received(100)
        assert last_count(node).problem == ""


@pytest.mark.parametrize("other", ["is silent", "is gone"])
def test_agent_that_does_not_answer_is_named_and_fails_the_node(other: str) -> None:
    with LocalNode(0) as holder, LocalNode(1, silence_s=0.5) as node:
        holder.driver = node.driver = None
        spool(holder, 0)
        with NodeProxy(holder.target) as link:
            link.stall() if other == "is silent" else link.cut()
            assign(node, link.target.uri, range_of())
            assert until(lambda: bool(node.lacking))
        said = "unreachable: cannot fetch rows from worker:0: no answer from 127.0.0.1 within "
        assert node.lacking[0].startswith(said)
        assert last_count(node).problem == "", "the call fails with the attempt"


def test_rows_that_are_not_there_fail_their_holder_and_are_waited_for() -> None:
    with holder_and_fetcher() as (holder, node):
        spool(holder, 0)
        assign(node, holder.uri, range_of(0, 0, 60), range_of(1, 50, 10, 50))
        assert until(lambda: bool(holder.lacking))
        assert "rows 50 to 60 of segment 1" in holder.lacking[0]
        node.wait_received(60)
        assert (node.lacking, last_count(node).problem) == ([], "")


def test_own_rows_that_are_not_there_fail_the_node_and_no_mark_goes_past_them() -> None:
    with LocalNode(0) as node:
        node.driver = None
        spool(node, 0)
        assign(node, "", range_of(0, 0, 60), range_of(1, 50, 10, 50))
        node.call(lambda: node.feeds.on_driver_message(FeedCut(FEED, 0)))
        node.call(lambda: None)
        assert len(node.lacking) == 1
        assert last_count(node).cut.epoch == -1
        node.call(lambda: node.feeds.reopen(1))
        node.call(lambda: node.feeds.on_driver_message(FeedCut(FEED, 0)))
        node.wait_told(lambda _: last_count(node).cut.epoch == 0)


def test_next_child_is_fetched_nothing_for_that_was_meant_for_the_last() -> None:
    with holder_and_fetcher() as (holder, node), NodeProxy(holder.target) as proxy:
        spool(holder, 0)
        proxy.cut()
        assign(node, proxy.target.uri, range_of())
        node.end_epoch(0, {1: 100})
        node.call(lambda: node.feeds.close("the child has died"))
        node.call(lambda: node.feeds.reopen(1))
        node.call(lambda: None)
        assert EpochEnd(FEED, 0, {1: 100}) not in node.sent


def test_rows_of_an_earlier_child_are_told_before_the_epoch_begins() -> None:
    with LocalNode(keeps=True) as node:
        spool(node, 0)
        node.wait_received(100)
        node.driver = None
        node.call(lambda: node.feeds.close("the child has died"))
        node.call(lambda: node.feeds.reopen(1))
        node.spooled.clear()
        node.call(lambda: node.feeds.on_driver_message(FeedBegin(FEED, 3, 3, "run")))
        node.wait_told(lambda _: last_count(node).began == 3)
        assert [(each.epoch, each.generation) for each in node.spooled] == [(3, 1)]
        assert [(each.partition, each.start, each.rows) for each in node.ranges] == [(0, 0, 100)]
