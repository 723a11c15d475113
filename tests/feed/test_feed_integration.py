"""From a partition to user code and back: feeders, Flight, agents' feeds, children's readers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.control.channel import Reclaim, Results
from sparkdl.core.deadline import Deadline
from sparkdl.datasets.tfos import DataFeed
from sparkdl.feed.reader.batches import EpochBatches
from sparkdl.feed.store.segment import write_segment
from sparkdl.feed.transfer.feeder import Feeder
from sparkdl.feed.transfer.infer_task import decode_results, exchange
from sparkdl.feed.transfer.messages import FeederError
from sparkdl.values.rows import encode_rows
from tests.doubles.feeds import SOON_S, LevelDriver, LocalNode, Running, numbers, order, values


def batches(start: int, sizes: list[int]) -> Iterator[pa.RecordBatch]:
    for size in sizes:
        yield numbers(start, start + size)
        start += size


# training


@settings(max_examples=8)  # with every profile: each has real nodes
@given(
    partitions=st.lists(st.lists(st.integers(0, 300), max_size=5), min_size=1, max_size=5),
    num_nodes=st.integers(1, 4),
    num_feeders=st.integers(1, 3),
)
def test_every_row_arrives_once_and_the_nodes_are_level(
    partitions: list[list[int]], num_nodes: int, num_feeders: int
) -> None:
    starts = [sum(map(sum, partitions[:number])) for number in range(len(partitions))]
    total = sum(map(sum, partitions))
    with ExitStack() as stack:
        nodes = [stack.enter_context(LocalNode(number)) for number in range(num_nodes)]
        driver = LevelDriver(nodes)
        todo = list(enumerate(partitions))

        def feed() -> None:
            while todo:
                number, sizes = todo.pop()
                fed = Feeder(order([node.target for node in nodes]), number).feed(
                    batches(starts[number], sizes)
                )
                assert fed.num_rows == sum(sizes)

        for feeding in [Running(feed) for _ in range(num_feeders)]:
            feeding.result()
        counts = driver.wait_assigned(total)
        for node in nodes:
            node.end_epoch(0, counts)
        assert sorted(v for node in nodes for v in values(node.reader(), 64)) == list(range(total))


@pytest.mark.parametrize("is_even", [False, True])
def test_epochs_larger_than_the_budget_follow_each_other(is_even: bool) -> None:
    """Where an epoch ends with padding, the next one's feeders wait for room meanwhile."""
    with LocalNode(0, limit_nbytes=10_000) as node:

        def feed() -> None:
            for epoch in range(3):
                feed = Feeder(order([node.target], f"run {epoch}", epoch), 0)
                feed.feed(batches(epoch * 10_000, [500] * 20))
                node.wait_received(10_000 * (epoch + 1))
                node.end_epoch(epoch, {0: 10_000, 1: 12_000})

        feeding = Running(feed)
        for epoch in range(3):
            node.grant(epoch=epoch)
        epochs = EpochBatches(node.reader(), 1_000, is_even=is_even)
        for epoch in range(3):
            found = []
            for step, batch in enumerate(epochs):
                found += batch["x"].tolist()
                if epoch < 2 and step == 10:
                    node.wait_sent(lambda sent: isinstance(sent[-1], Reclaim))
            assert step == (11 if is_even else 9)
            assert found == list(range(epoch * 10_000, (epoch + 1) * 10_000))
        feeding.result()


def test_nodes_in_step_with_little_memory_get_rows_that_one_agent_holds() -> None:
    with LocalNode(0, limit_nbytes=20_000) as a, LocalNode(1, limit_nbytes=20_000) as b:
        in_step, driver = threading.Barrier(2), LevelDriver([a, b])

        def train(node: LocalNode) -> list[int]:
            found = []
            for batch in EpochBatches(node.reader(), 700, is_even=True):
                in_step.wait(SOON_S)
                found += batch["x"].tolist()
            return found

        training = [Running(lambda node=node: train(node)) for node in (a, b)]  # type: ignore[misc]
        for node in (a, b):
            node.grant()
        Feeder(order([a.target]), 0).feed(batches(0, [1000] * 32))
        rows = driver.wait_assigned(32_000)
        for node in (a, b):
            node.end_epoch(0, rows)
        found = [each.result() for each in training]
        assert sorted(found[0] + found[1]) == [*range(32_000)]


# inference


def serve(
    node: LocalNode, answer: Callable[[list[Any]], list[Any]], batch_size: int = 7
) -> Running[None]:
    """Do what `map_fun` does for inference."""

    def map_fun() -> None:
        feed = DataFeed(node.reader(), node.link.send, train_mode=False)
        while not feed.should_stop():
            batch = feed.next_batch(batch_size)
            assert isinstance(batch, list)
            if batch:
                feed.batch_results(answer(batch))

    return Running(map_fun)


def infer(
    node: LocalNode, name: str, rows: Iterator[Any] | list[Any], timeout_s: float = SOON_S
) -> list[Any]:
    """Do what a Spark task does for inference."""
    sent = encode_rows(rows, max_rows=10)
    asked = replace(order([node.target], timeout_s=timeout_s), patience_s=0.0)
    answers = exchange(asked, name, node.target, sent)
    return [row for data in answers for row in decode_results(data)]


def test_each_row_gets_its_result_in_order() -> None:
    with LocalNode() as node:
        serving = serve(node, lambda rows: [-row for row in rows])
        for name, count in (("0.a", 95), ("1.b", 1), ("2.c", 40)):
            assert infer(node, name, list(range(count))) == [-row for row in range(count)]
        assert node.rows_received == 0
        node.end_feed()
        serving.result()


def test_too_few_results_are_an_error_when_the_child_ends() -> None:
    with LocalNode() as node:

        def map_fun() -> None:
            feed = DataFeed(node.reader(), node.link.send, train_mode=False)
            feed.batch_results(list(feed.next_batch(5))[:3])
            node.call(lambda: node.feeds.close("map_fun has returned"))

        child = Running(map_fun)
        with pytest.raises(FeederError, match=r"worker:0 failed: .*map_fun has returned"):
            infer(node, "0.a", list(range(5)))
        child.result()


def test_too_few_results_are_an_error_after_the_timeout() -> None:
    with LocalNode() as node:
        serving = serve(node, lambda rows: rows[:1])
        with pytest.raises(FeederError, match=r"1 of 5 rows of inference partition 0\.a"):
            infer(node, "0.a", list(range(5)), timeout_s=0.2)
        node.end_feed()
        serving.result()


def test_too_many_results_are_an_error_and_the_node_lives_on() -> None:
    """The partition is still on its way when the call ends."""
    with LocalNode() as node:
        is_wrong = threading.Event()

        def map_fun() -> None:
            feed = DataFeed(node.reader(), node.link.send, train_mode=False)
            feed.next_batch(5)
            (encoded,) = encode_rows(range(100))
            fd, _ = write_segment(encoded)
            node.link.send(Results("0.a", 100), fd)
            os.close(fd)
            is_wrong.set()

        def rows() -> Iterator[int]:
            yield from range(20)
            assert is_wrong.wait(SOON_S)
            asked = node.feeds.store.exchange("0.a")
            assert asked is not None
            deadline, never = Deadline.after(SOON_S), threading.Event()
            while not asked.failure and not deadline.has_passed:
                never.wait(0.005)  # with more rows in, the results would not be too many
            yield from range(200_000)

        child = Running(map_fun)
        with pytest.raises(FeederError, match="exactly one result per row"):
            infer(node, "0.a", rows())
        child.result()
        serving = serve(node, lambda rows: ["again"] * len(rows))
        assert set(infer(node, "0.b", list(range(30)))) == {"again"}
        node.end_feed()
        serving.result()


def test_whoever_stops_asking_does_not_leave_the_node_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The partition has stopped as well: nothing more comes from it, and it does not end."""
    with LocalNode() as node:
        is_forgotten, is_over = threading.Event(), threading.Event()
        store = node.feeds.store
        close = store.close_exchange

        def close_exchange(name: str) -> None:
            close(name)
            is_forgotten.set()

        def stuck() -> Iterator[pa.RecordBatch]:
            yield from encode_rows(range(10))
            is_over.wait(SOON_S)

        monkeypatch.setattr(store, "close_exchange", close_exchange)
        serving = serve(node, lambda rows: rows)
        answers = exchange(order([node.target]), "0.a", node.target, stuck())
        assert isinstance(answers, Generator)
        next(answers)
        answers.close()
        assert is_forgotten.wait(SOON_S), "the node still waits for the partition"
        is_over.set()
        assert infer(node, "0.b", [1, 2]) == [1, 2]
        node.end_feed()
        serving.result()
