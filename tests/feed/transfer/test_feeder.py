"""A partition's rows reach the nodes level and once each, whatever happens to a node."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pytest

from sparkdl.control.descriptors import FdSender
from sparkdl.core.errors import FeedTimeoutError
from sparkdl.feed.reader.cursor import Item
from sparkdl.feed.transfer import feeder
from sparkdl.feed.transfer.feeder import Feeder
from sparkdl.feed.transfer.messages import FedPartition, FeederError, FeedSpec, Target
from tests.control.rooms import TOKEN, room
from tests.doubles.feeds import (
    FEED,
    SOON_S,
    LocalNode,
    NodeProxy,
    Running,
    numbers,
    order,
    train_in_step,
    values,
)
from tests.doubles.until import until

patient = partial(order, ack_wait_s=SOON_S)
"""No node counts as late, however slow this machine is."""


def batches(rows: int, size: int, width: int = 1) -> Iterator[pa.RecordBatch]:
    for start in range(0, rows, size):
        yield numbers(start, min(rows, start + size), width)


def then(
    source: Iterator[pa.RecordBatch], at: int, do: Callable[[], object]
) -> Iterator[pa.RecordBatch]:
    """Yield what `source` does, and do something before batch `at`."""
    for number, batch in enumerate(source):
        if number == at:
            do()
        yield batch


def read(nodes: list[LocalNode]) -> list[list[int]]:
    """End the epoch at all nodes and return their rows."""
    for node in nodes:
        node.end_epoch(0, {})
    return [values(node.reader()) for node in nodes]


def flat(rows: list[list[int]]) -> list[int]:
    return sorted(value for each in rows for value in each)


# level


@pytest.mark.parametrize("is_near", [True, False])
def test_rows_are_spread_level_and_come_once_each(
    is_near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As descriptors on the node's own machine, through Flight from another one."""
    if not is_near:
        monkeypatch.setattr(FdSender, "connect", lambda name, token: None)
    with LocalNode(0) as a, LocalNode(1) as b, LocalNode(2) as c:
        nodes = [a, b, c]
        feed = Feeder(patient([node.target for node in nodes]), 4)
        fed = feed.feed(batches(1001, 100))
        assert fed == FedPartition(4, {0: 334, 1: 334, 2: 333}, 0, 1001)
        assert [node.rows_received for node in nodes] == [334, 334, 333]
        assert flat(read(nodes)) == list(range(1001))


def test_nodes_that_have_fewer_rows_get_more() -> None:
    with LocalNode(0) as a, LocalNode(1) as b:
        Feeder(patient([a.target]), 0).feed(batches(50, 50))
        fed = Feeder(patient([a.target, b.target]), 1).feed(batches(70, 30))
        assert fed.rows == {0: 10, 1: 60}


def test_partition_without_rows_reaches_nobody() -> None:
    with LocalNode(0) as node:
        assert Feeder(order([node.target]), 0).feed(iter([])) == FedPartition(0, {}, 0, 0)
        empty = numbers(0, 0)
        assert Feeder(order([node.target]), 0).feed(iter([empty])) == FedPartition(0, {}, 0, 0)
        assert node.feeds.store.logs == ()


def test_rows_that_a_checkpoint_covers_are_not_fed_again() -> None:
    with LocalNode(0) as a, LocalNode(1) as b:
        done = {4: ((0, 150), (990, 1001)), 5: ((0, 7),)}
        again = replace(order([a.target, b.target]), done=done, skipped=frozenset({5}))
        fed = Feeder(again, 4).feed(batches(1001, 100))
        assert fed == FedPartition(4, {0: 420, 1: 420}, 0, 1001)
        assert Feeder(again, 5).feed(iter([None])) == FedPartition(5, {}, 0), "not even read"
        assert flat(read([a, b])) == list(range(150, 990))


def test_rows_of_a_finished_cluster_are_unused_except_what_a_checkpoint_covers() -> None:
    """The coordinator says that every `map_fun` has returned; the node does not answer any more."""

    async def scene() -> FedPartition:
        with LocalNode(0) as node:
            gone = node.target
        async with room() as finished:
            finished.heard.failure = None
            again = replace(order([gone]), done={4: ((0, 30), (90, 100))})
            again = replace(again, coordinator=finished.address.url, token=TOKEN)
            return await asyncio.to_thread(Feeder(again, 4).feed, batches(100, 10))

    assert asyncio.run(scene()) == FedPartition(4, {}, 60, -1)


def test_a_speculative_twin_of_an_attempt_that_has_ended_brings_nothing() -> None:
    with LocalNode(0) as a, LocalNode(1) as b:
        again = order([a.target, b.target])
        assert Feeder(again, 4, attempt=7).feed(batches(100, 10)).rows == {0: 50, 1: 50}
        for attempt in (9, 8):  # one that began later, and one that was slower
            if attempt == 8:
                with pytest.raises(FeederError, match="a later one has begun"):
                    Feeder(again, 4, attempt=8).feed(batches(100, 10))
            else:
                assert Feeder(again, 4, attempt).feed(batches(100, 10)).rows == {0: 50, 1: 50}
        assert flat(read([a, b])) == list(range(100))


def test_partition_of_several_schemas_comes_whole() -> None:
    with LocalNode(0) as a, LocalNode(1) as b:
        mixed = [
            numbers(0, 10),
            numbers(10, 20, width=3),
            numbers(20, 30).replace_schema_metadata({"k": "v"}),
            numbers(30, 31),
        ]
        fed = Feeder(order([a.target, b.target]), 0).feed(iter(mixed))
        assert sum(fed.rows.values()) == 31
        found = []
        for node in (a, b):
            node.end_feed()
            reader = node.reader()
            owner = reader.claim()
            while isinstance(item := reader.take(owner), Item):
                found += item.batch().column("x").to_pylist()
        assert sorted(found) == list(range(31))


# closed nodes


def test_rows_that_a_closed_node_refuses_go_to_others() -> None:
    with LocalNode(0) as a, LocalNode(1) as b:

        def close() -> None:
            a.call(lambda: a.feeds.close("map_fun has returned"))

        feed = Feeder(patient([a.target, b.target]), 0)
        fed = feed.feed(then(batches(100, 10), 4, close))
        assert fed.rows_refused == 0
        assert fed.rows[0] in (10, 15, 20)  # two batches may be on their way when the node closes
        assert fed.rows[0] + fed.rows[1] == 100
        assert b.rows_received == fed.rows[1]
        assert len(set(values_at_end(b))) == fed.rows[1]


def values_at_end(node: LocalNode) -> list[int]:
    node.end_feed()
    return values(node.reader())


def test_node_closed_from_the_start_gets_nothing() -> None:
    with LocalNode(0) as a, LocalNode(1) as b:
        a.call(lambda: a.feeds.close("over"))
        fed = Feeder(order([a.target, b.target]), 0).feed(batches(100, 10))
        assert fed == FedPartition(0, {0: 0, 1: 100}, 0, 100)


@pytest.mark.parametrize("is_endless", [False, True])
def test_rows_that_nobody_wants_are_counted_until_the_feeder_is_cancelled(is_endless: bool) -> None:
    with LocalNode(0) as a, LocalNode(1) as b:
        read_until = 0

        def source() -> Iterator[pa.RecordBatch]:
            nonlocal read_until
            for batch in itertools.cycle(batches(1000, 10)) if is_endless else batches(1000, 10):
                read_until += 10
                if read_until == 50:
                    for node in (a, b):
                        node.call(lambda node=node: node.feeds.close("over"))  # type: ignore[misc]
                if read_until == 2000:
                    feeding.cancel()
                yield batch

        feeding = Feeder(order([a.target, b.target]), 0)
        if is_endless:
            with pytest.raises(FeederError, match="it was cancelled"):
                feeding.feed(source())
            return
        fed = feeding.feed(source())
        assert sum(fed.rows.values()) + fed.rows_refused == read_until == 1000


# full nodes


def test_share_of_a_full_node_goes_to_others_at_once() -> None:
    """Pieces are larger than any buffer between feeder and node."""
    with LocalNode(0, limit_nbytes=1000) as full, LocalNode(1) as free:
        reading: list[Running[list[int]]] = []

        def source() -> Iterator[pa.RecordBatch]:
            yield from batches(8000, 1000, width=1000)
            assert full.rows_received == 500
            assert free.rows_received > 4000
            full.call(lambda: None)
            reading.append(Running(lambda: values(full.reader())))

        fed = Feeder(order([full.target, free.target], ack_wait_s=0.05), 0).feed(source())
        full.end_epoch(0, {})
        free.end_epoch(0, {})
        assert fed.rows_refused == 0
        assert fed.rows[0] <= 2000
        assert flat([reading[0].result(), values(free.reader())]) == list(range(8000))


def test_nodes_that_stay_full_are_named_when_time_is_up() -> None:
    with LocalNode(0, limit_nbytes=1000) as node:
        feed = Feeder(order([node.target], timeout_s=0.2), 0)
        with pytest.raises(FeedTimeoutError, match=r"worker:0 stored no row .* Raise the timeout"):
            feed.feed(batches(1000, 100))


def test_rows_that_wait_at_a_full_node_go_to_a_hungry_one() -> None:
    """In a synchronous step nobody reads before the other node has its rows as well."""
    with LocalNode(0, limit_nbytes=1000) as full, LocalNode(1) as hungry:
        fed = Feeder(order([full.target, hungry.target], ack_wait_s=0.05), 0).feed(
            batches(600, 200)
        )
        assert fed.rows == {0: 100, 1: 500}
        assert flat(read([full, hungry])) == list(range(600))


def test_one_feeder_tiny_budgets_and_nodes_that_step_together_come_to_an_end() -> None:
    """Each node takes its next batch only when the other has one too, and both are mostly full."""
    with LocalNode(0, limit_nbytes=1) as a, LocalNode(1, limit_nbytes=1) as b:
        nodes = [a, b]
        training = train_in_step(nodes)
        fed = Feeder(order([node.target for node in nodes]), 0).feed(batches(1000, 50))
        for node in nodes:
            node.end_epoch(0, fed.rows)
        assert flat([each.result() for each in training]) == list(range(1000))


# broken connections


def test_node_that_cannot_be_reached_is_named() -> None:
    with LocalNode(0) as node, NodeProxy(node.target) as proxy:
        proxy.cut()
        with pytest.raises(FeederError, match=r"worker:0: .*connect"):
            Feeder(order([proxy.target]), 0).feed(batches(10, 10))


def test_wrong_token_is_said_to_be_wrong() -> None:
    with LocalNode(0) as node:
        wrong = FeedSpec(FEED, 0, "run", (node.target,), "another token", SOON_S)
        with pytest.raises(FeederError, match=r"worker:0: .*wrong or missing token"):
            Feeder(wrong, 0).feed(batches(10, 10))
        assert "another token" not in repr(wrong)


def test_node_that_dies_while_the_feeder_waits_for_it_is_named() -> None:
    with LocalNode(0, limit_nbytes=1000) as node, NodeProxy(node.target) as proxy:
        feeding = Running(lambda: Feeder(order([proxy.target]), 0).feed(batches(300, 100)))
        node.wait_sent(lambda sent: bool(sent))  # a Reclaim: the second batch waits for room
        proxy.cut()
        with pytest.raises(FeederError, match="worker:0: "):
            feeding.result()


def test_node_that_dies_between_batches_is_named() -> None:
    with LocalNode(0) as a, LocalNode(1) as b, NodeProxy(b.target) as proxy:
        feed = Feeder(order([a.target, proxy.target]), 0)
        with pytest.raises(FeederError, match="worker:1: "):
            feed.feed(then(batches(100, 10), 5, proxy.cut))


def test_node_that_says_no_word_any_more_is_awaited_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its link is cut: no connection ends, and the thread that feeds may stand in a call."""
    monkeypatch.setattr(feeder, "LATE_S", 0.1)
    with LocalNode(0) as a, LocalNode(1) as b, NodeProxy(b.target) as link:
        feed = Feeder(order([a.target, link.target]), 0)
        feeding = Running(lambda: feed.feed(then(batches(100, 10), 5, link.stall)))
        assert until(lambda: feed.awaited == [link.target])
        link.cut()
        with pytest.raises(FeederError, match="worker:1: "):
            feeding.result()
        assert set(feed.awaited) == {link.target}, "until it is decided"


def test_error_in_the_partition_is_raised_and_leaves_no_connection() -> None:
    with LocalNode(0) as node:

        def fail() -> None:
            raise ArithmeticError("from the user's own code")

        before = set(threading.enumerate())
        with pytest.raises(ArithmeticError, match="user's own code"):
            Feeder(order([node.target]), 0).feed(then(batches(100, 10), 5, fail))
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith("sparkdl-acks"):
                thread.join(SOON_S)
                assert not thread.is_alive()


# attempts


@pytest.mark.parametrize("at", [1, 5, 9])
def test_second_attempt_skips_what_has_arrived(at: int) -> None:
    with (
        LocalNode(0) as a,
        LocalNode(1) as b,
        NodeProxy(a.target) as net_a,
        NodeProxy(b.target) as net_b,
    ):

        def cut() -> None:
            net_a.cut()
            net_b.cut()

        first = Feeder(patient([net_a.target, net_b.target]), 0, attempt=1)
        with pytest.raises(FeederError, match=r"worker:0|worker:1"):
            first.feed(then(batches(1000, 100), at, cut))
        assert a.rows_received + b.rows_received >= 100 * (at - 3)
        second = Feeder(patient([a.target, b.target]), 0, attempt=2)
        fed = second.feed(batches(1000, 100))
        # What the first had on its way stays in the books: two pieces for each node at most.
        assert abs(fed.rows[0] - fed.rows[1]) <= 200
        assert sum(fed.rows.values()) == 1000
        assert fed.rows_refused == 0
        assert flat(read([a, b])) == list(range(1000))


def test_second_attempt_may_cut_its_batches_otherwise() -> None:
    with (
        LocalNode(0) as a,
        LocalNode(1) as b,
        NodeProxy(a.target) as net_a,
        NodeProxy(b.target) as net_b,
    ):
        first = Feeder(patient([net_a.target, net_b.target]), 0, attempt=1)
        with pytest.raises(FeederError, match="worker:0"):
            first.feed(then(batches(500, 37), 8, net_a.cut))
        Feeder(patient([b.target, a.target]), 0, attempt=2).feed(batches(500, 100))
        assert flat(read([a, b])) == list(range(500))


def test_rows_of_a_lost_attempt_that_still_wait_for_room_do_not_come_twice() -> None:
    """Spark has given the attempt up and does not know; its batch waits at the full node."""
    with LocalNode(0, limit_nbytes=1000) as a, NodeProxy(a.target) as proxy, LocalNode(1) as b:
        lost = Running(lambda: Feeder(order([proxy.target]), 0, attempt=1).feed(batches(300, 100)))
        a.wait_sent(lambda sent: bool(sent))
        proxy.cut()
        with pytest.raises(FeederError, match="worker:0"):
            lost.result()
        fed = Feeder(order([b.target, a.target]), 0, attempt=2)
        feeding = Running(lambda: fed.feed(batches(300, 100)))
        reading = Running(lambda: values(a.reader()))
        feeding.result()
        for node in (a, b):
            node.end_epoch(0, {})
        assert flat([reading.result(), values(b.reader())]) == list(range(300))


def test_attempt_that_was_overtaken_fails() -> None:
    with LocalNode(0) as node:

        def overtake() -> None:
            Feeder(order([node.target]), 0, attempt=2).feed(batches(100, 10))

        early = Feeder(order([node.target]), 0, attempt=1)
        with pytest.raises(FeederError, match="attempt 1 at partition 0"):
            early.feed(then(batches(100, 10), 5, overtake))
        assert flat(read([node])) == list(range(100))


def test_same_partition_of_another_job_is_fed_again() -> None:
    with LocalNode(0) as node:
        for run in ("first", "second"):
            fed = Feeder(order([node.target], run), 0).feed(batches(10, 10))
            assert fed.rows == {0: 10}
        assert node.rows_received == 20


def test_targets_are_told_apart_by_their_ids() -> None:
    with LocalNode(7) as node:
        renamed = Target(7, "chief:0", node.uri)
        assert Feeder(order([renamed]), 0).feed(batches(10, 10)).rows == {7: 10}
