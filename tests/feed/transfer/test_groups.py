"""Many nodes: a feeder has few streams, and each row reaches one node once all the same."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.feed.transfer import groups
from sparkdl.feed.transfer.feeder import Feeder
from sparkdl.feed.transfer.groups import MAX_STREAMS, grouped
from sparkdl.feed.transfer.messages import FeederError, FeedSpec, Target
from tests.doubles.feeds import LocalNode, NodeProxy, Running, numbers, order, train_in_step, values


@pytest.fixture(autouse=True)
def _two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_STREAMS", 2)


@pytest.fixture
def nodes() -> Iterator[list[LocalNode]]:
    """Five nodes: groups of one, two and two."""
    with ExitStack() as stack:
        yield [stack.enter_context(LocalNode(n)) for n in range(5)]


def batches(start: int, stop: int, size: int = 10) -> Iterator[pa.RecordBatch]:
    for row in range(start, stop, size):
        yield numbers(row, min(stop, row + size))


def targets(nodes: list[LocalNode]) -> list[Target]:
    return [node.target for node in nodes]


def rows_at(nodes: list[LocalNode]) -> list[int]:
    """End the epoch; return the rows of all nodes, sorted."""
    for node in nodes:
        node.end_epoch(0, {})
    return sorted(row for node in nodes for row in values(node.reader()))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_groups_are_small_alike_and_keep_hosts_together(hosts: list[int]) -> None:
    nodes = [Target(n, f"worker:{n}", f"grpc://10.0.0.{h}:80") for n, h in enumerate(hosts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "MAX_STREAMS", MAX_STREAMS)
        found = grouped(nodes)
        assert grouped(nodes[::-1]) == found or len(found) == 1
    sizes = [len(group) for group in found]
    assert max(sizes) <= MAX_STREAMS
    assert max(sizes) - min(sizes) <= 1
    assert len(found) == -(-len(nodes) // MAX_STREAMS)
    assert {target for group in found for target in group} == set(nodes)
    if len(found) > 1:
        assert [t.host for g in found for t in g] == sorted(t.host for t in nodes)


def test_one_partition_reaches_all_nodes_by_few_streams_at_a_time(nodes: list[LocalNode]) -> None:
    most = 0

    def source() -> Iterator[pa.RecordBatch]:
        nonlocal most
        for batch in batches(0, 1000):
            yield batch
            streams = [t for t in threading.enumerate() if t.name.startswith("sparkdl-acks")]
            most = max(most, len(streams))

    fed = Feeder(order(targets(nodes)), 3).feed(source())
    assert most == 2
    assert fed.rows_refused == 0
    assert fed.rows == {node.node_id: node.rows_received for node in nodes}
    assert max(fed.rows.values()) - min(fed.rows.values()) <= 20, "two batches for each node"
    assert rows_at(nodes) == list(range(1000))


def test_many_partitions_at_once_leave_the_nodes_level(nodes: list[LocalNode]) -> None:
    spec = order(targets(nodes))
    sizes = [random.Random(5).randrange(400) for _ in range(12)]
    feeding = [
        Running(lambda n=n: Feeder(spec, n).feed(batches(n * 1000, n * 1000 + sizes[n])))  # type: ignore[misc]
        for n in range(len(sizes))
    ]
    fed = [each.result() for each in feeding]
    counts = [node.rows_received for node in nodes]
    assert counts == [sum(each.rows.get(node.node_id, 0) for each in fed) for node in nodes]
    assert max(counts) - min(counts) <= 10 * len(sizes)
    assert rows_at(nodes) == [n * 1000 + i for n in range(len(sizes)) for i in range(sizes[n])]


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.deep), 1, 2])
def test_attempts_that_begin_elsewhere_bring_no_row_twice(
    nodes: list[LocalNode], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark repeats tasks on other hosts, whose feeders begin with other nodes."""
    mix = random.Random(seed)
    first = {0: 0, 1: 1, 2: 2}
    monkeypatch.setattr(groups.Groups, "first", lambda self: first[self._header.attempt])
    for attempt, stop in enumerate((mix.randrange(600), mix.randrange(600))):
        with ExitStack() as stack:
            nets = [stack.enter_context(NodeProxy(node.target)) for node in nodes]
            cut_at = stop

            def source() -> Iterator[pa.RecordBatch]:
                for batch in batches(0, 600, mix.randrange(5, 40)):
                    if batch.column(0)[0].as_py() >= cut_at:  # noqa: B023
                        for net in nets:  # noqa: B023
                            net.cut()
                    yield batch

            broken = replace(order(targets(nodes)), targets=tuple(net.target for net in nets))
            with pytest.raises(FeederError):
                Feeder(broken, 7, attempt).feed(source())
                raise FeederError("the links were cut behind its last rows")
    fed = Feeder(order(targets(nodes)), 7, attempt=2).feed(batches(0, 600))
    assert sum(fed.rows.values()) == 600
    assert fed.rows == {node.node_id: node.rows_received for node in nodes}
    assert rows_at(nodes) == list(range(600))


def test_overtaken_attempt_goes_nowhere_else(nodes: list[LocalNode]) -> None:
    spec = order(targets(nodes))

    def source() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches(0, 500)):
            if number == 20:
                fed = Feeder(spec, 1, attempt=2).feed(batches(0, 500))
                assert sum(fed.rows.values()) == 500
            yield batch

    with pytest.raises(FeederError, match=r"attempt 1 at partition 1 .* a later one has begun"):
        Feeder(spec, 1, attempt=1).feed(source())
    assert rows_at(nodes) == list(range(500))


def test_closed_groups_are_left_and_what_nobody_wants_is_counted(nodes: list[LocalNode]) -> None:
    def source() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches(0, 500)):
            if number == 20:
                close(nodes[:4])
            if number == 40:
                close(nodes[4:])
            yield batch

    def close(some: list[LocalNode]) -> None:
        for node in some:
            node.call(lambda node=node: node.feeds.close("over"))  # type: ignore[misc]

    fed = Feeder(order(targets(nodes)), 0).feed(source())
    assert fed.rows[4] > 100
    assert fed.rows_refused >= 80
    assert sum(fed.rows.values()) + fed.rows_refused == 500


def test_nodes_in_step_of_other_groups_get_what_one_group_has_no_room_for() -> None:
    """Each node takes a batch only when all others have one too, and all are mostly full."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(LocalNode(n, limit_nbytes=1)) for n in range(3)]
        training = train_in_step(nodes)
        fed = Feeder(order(targets(nodes)), 0).feed(batches(0, 300, 30))
        for node in nodes:
            node.end_epoch(0, fed.rows)
        assert sorted(row for each in training for row in each.result()) == list(range(300))


def test_rows_that_nodes_hold_from_the_generation_before_are_not_fed_again(
    nodes: list[LocalNode],
) -> None:
    """The feeder of a new generation begins at one group; the driver says who holds what."""
    spec = order(targets(nodes))
    elsewhere = replace(spec, targets=(nodes[4].target,))
    held = Feeder(elsewhere, 0).feed(batches(0, 50)).rows
    assert held == {4: 50}
    again: FeedSpec = replace(spec, held={0: (4,)}, ahead={4: 50})
    fed = Feeder(again, 0, attempt=1).feed(batches(0, 500))
    assert sum(fed.rows.values()) == 500
    assert fed.rows[4] >= 50
    assert rows_at(nodes) == list(range(500))


def test_keeper_that_is_gone_is_named(nodes: list[LocalNode]) -> None:
    with NodeProxy(nodes[1].target) as proxy:
        proxy.cut()
        spec = order([nodes[0].target, proxy.target, *targets(nodes[2:])])
        feeding = Feeder(spec, 1)
        with pytest.raises(FeederError, match="worker:1: "):
            feeding.feed(batches(0, 10))
        assert [target.name for target in feeding.unreachable] == ["worker:1"]
