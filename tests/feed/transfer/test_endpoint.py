"""A node's feeds: rows to the child, counts to the coordinator, room where it is waited for."""

from __future__ import annotations

import pytest

from sparkdl.control import messages as msg
from sparkdl.control.channel import Reclaim
from sparkdl.control.rows import FeedCount, PartRows
from sparkdl.feed.reader.batches import EpochBatches
from sparkdl.feed.reader.cursor import Item
from sparkdl.feed.store.buffer import AppendRequest
from sparkdl.feed.store.segment import segment_nbytes
from sparkdl.feed.transfer import endpoint
from tests.doubles.feeds import FEED, SOON_S, LocalNode, Running, numbers, values

BATCH = numbers(0, 100)

NBYTES = segment_nbytes(BATCH)


def append(node: LocalNode, epoch: int = 0, feed: str = FEED) -> bool:
    return node.feeds.store.log(feed).append(BATCH, AppendRequest(epoch))


def last_told(progress: list[msg.FeedProgress], feed: str = FEED) -> FeedCount:
    counts = [count for each in progress for count in each.counts if count.feed == feed]
    return counts[-1] if counts else FeedCount(feed)


def told(progress: list[msg.FeedProgress], feed: str = FEED) -> tuple[int, int, int, bool]:
    """Return rows received, rows consumed, epochs done, and whether it is closed, as last told."""
    count = last_told(progress, feed)
    return count.rows_received, count.given.rows, count.given.epochs, count.closed


def test_counts_the_driver_waits_for_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PROGRESS_PERIOD_S", 1000 * SOON_S)
    with LocalNode() as node:
        append(node)  # the first rows of an epoch
        node.wait_told(lambda all_told: told(all_told) == (100, 0, 0, False))
        append(node)
        for epoch in range(20):
            node.end_epoch(epoch, {0: 200}, again=epoch < 19)
        for _ in range(20):
            assert len(values(node.reader())) == 200
        node.wait_told(lambda all_told: told(all_told) == (200, 4000, 20, False))
        # One more where user code has waited for a row in vain.
        assert len(node.told) in (3, 4), "not for each epoch that the driver has announced"
        append(node, epoch=20)
        node.wait_told(lambda all_told: told(all_told) == (300, 4000, 20, False))


def test_child_that_wants_no_more_ends_the_feeding_and_the_next_one_is_taken() -> None:
    with LocalNode() as node:
        node.call(lambda: node.feeds.on_driver_message(msg.FeedBegin(FEED, 0, 2)))
        append(node)
        append(node, feed="other")
        node.reader().terminate()
        node.wait_told(lambda all_told: last_told(all_told).closed_to == 2)
        assert not append(node, epoch=2)
        assert append(node, feed="other")
        assert node.feeds.store.budget.num_segments == 2
        node.call(lambda: node.feeds.on_driver_message(msg.FeedBegin(FEED, 3, 3)))
        assert append(node, epoch=3)
        node.end_epoch(3, {0: 100})
        assert values(node.reader()) == list(range(100))
        node.call(lambda: node.feeds.close("the child has returned"))
        node.wait_told(lambda all_told: last_told(all_told).closed)
        assert last_told(node.told).closed_to == 2, "which is why the feeding ends"


def test_child_is_asked_for_room_once_until_it_gives_some() -> None:
    with LocalNode(limit_nbytes=NBYTES) as node:
        append(node)
        waiting = [Running(lambda: append(node)) for _ in range(3)]
        node.wait_sent(lambda sent: sent == [Reclaim(FEED)])
        node.call(lambda: None)
        reading = Running(lambda: values(node.reader()))
        for each in waiting:
            assert each.result()
        node.end_epoch(0, {0: 400})
        assert reading.result() == list(range(100)) * 4


def test_feeder_that_waits_at_the_end_of_an_epoch_is_not_forgotten_in_the_next() -> None:
    """The epoch's rows were all released before its end, which ends the child's haste as well."""
    with LocalNode(limit_nbytes=2 * NBYTES) as node:
        assert append(node)
        reader = node.reader()
        owner = reader.claim()
        reader.take(owner)
        reader.give(owner, 100)
        assert append(node, epoch=1)
        third = Running(lambda: append(node, epoch=1))
        assert third.result()  # the first segment was released for it
        fourth = Running(lambda: append(node, epoch=1))
        node.wait_sent(lambda sent: sent.count(Reclaim(FEED)) == 2)
        node.end_epoch(0, {0: 100})
        assert isinstance(reader.take(owner), msg.EpochEnd)
        reader.finish_epoch(owner)
        for _ in range(2):
            assert isinstance(reader.take(owner), Item)
            reader.give(owner, 100)
        assert isinstance(reader.take(owner), Item)
        assert fourth.result()


def test_rows_that_were_used_are_told_by_partition() -> None:
    """Two attempts at a partition, one segment read in part, one epoch again, one terminated."""
    with LocalNode(tracks=True) as node:
        log = node.feeds.store.log(FEED)

        def bring(partition: int, start: int, epoch: int = 0) -> None:
            place = AppendRequest(epoch, spans=((partition, start, start + 100),), run="run")
            assert log.append(BATCH, place)

        bring(3, 0)
        bring(5, 100)
        bring(3, 100)
        node.end_epoch(0, {0: 300}, again=True)
        node.end_epoch(1, {0: 300})
        assert len(values(node.reader())) == 300
        batches = iter(EpochBatches(node.reader(), 50))
        for _ in range(3):
            next(batches)

        def told(batches: int | None) -> dict[int, PartRows]:
            used = node.link.feeds.positions(batches)[0]
            return node.call(lambda: node.feeds.coverage(used)).get(FEED, {})

        assert told(None) == {
            0: {3: ((0, 200),), 5: ((100, 200),)},
            1: {3: ((0, 100),), 5: ((100, 150),)},
        }
        assert told(1) == {0: {3: ((0, 200),), 5: ((100, 200),)}}
        assert len(list(batches)) == 3
        node.call(lambda: node.feeds.on_driver_message(msg.FeedBegin(FEED, 2, 4)))
        bring(0, 0, epoch=2)
        node.reader().terminate()
        node.wait_told(lambda all_told: last_told(all_told).closed_to == 4)
        assert told(None)[2] == {0: ((0, 100),)}, "dropped on purpose"
