"""A partition is answered by one living node; what cannot be is an error."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from sparkdl.control.channel import Results
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import FeedClosedError, LaunchError
from sparkdl.core.failure import Code
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.datasets.tfos import DataFeed
from sparkdl.driver.controller import Controller
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.lifecycle.state import LaunchFailed, has_ended
from sparkdl.feed.store.segment import write_segment
from sparkdl.feed.store.session import Exchange
from sparkdl.feed.transfer import infer_task as task
from sparkdl.feed.transfer.infer_task import decode_results, exchange
from sparkdl.feed.transfer.messages import FeederError
from sparkdl.values.rows import encode_rows
from tests.doubles.feeds import SOON_S, TOKEN, LocalNode, NodeProxy, Running, order
from tests.doubles.programs import output_of

ROWS = list(range(50))


def negative(rows: list[Any]) -> list[Any]:
    return [-row for row in rows]


def serve(node: LocalNode, answer: Callable[[list[Any]], list[Any]] = negative) -> Running[None]:
    """Do what `map_fun` does for inference."""

    def map_fun() -> None:
        feed = DataFeed(node.reader(), node.link.send, train_mode=False)
        while not feed.should_stop():
            if batch := list(feed.next_batch(7)):
                feed.batch_results(answer(batch))

    return Running(map_fun)


def infer(
    first: LocalNode,
    *others: LocalNode,
    wait_s: float = 0.0,
    rows: Iterable[Any] = ROWS,
    timeout_s: float = SOON_S,
) -> list[Any]:
    """Do what a Spark task does for inference."""
    asked = order([node.target for node in (first, *others)], timeout_s=timeout_s)
    sent = encode_rows(rows, max_rows=10)
    answers = exchange(replace(asked, patience_s=wait_s), "0.a", first.target, sent)
    return [row for data in answers for row in decode_results(data)]


def test_node_that_is_lost_with_rows_fails_the_task() -> None:
    """Spark repeats it, and a living node answers all of its rows."""
    with LocalNode(0) as lost, LocalNode(1) as living:

        def answer_some_and_die() -> None:
            feed = DataFeed(lost.reader(), lost.link.send, train_mode=False)
            feed.batch_results([-row for row in feed.next_batch(7)])
            lost.call(lambda: lost.feeds.close("the child has died"))

        dying, serving = Running(answer_some_and_die), serve(living)
        with pytest.raises(FeederError, match=r"worker:0 failed: .*the child has died"):
            infer(lost, living)
        assert infer(lost, living) == [-row for row in ROWS]
        dying.result()
        living.end_feed()
        serving.result()


def test_node_whose_host_is_silent_fails_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its link is cut: no connection ends, and nobody is told."""
    monkeypatch.setattr(task, "_LOOK_S", 0.1)
    with LocalNode(0) as lost, NodeProxy(lost.target) as link:

        def answer_some() -> None:
            feed = DataFeed(lost.reader(), lost.link.send, train_mode=False)
            feed.batch_results([-row for row in feed.next_batch(7)])
            link.stall()
            feed.batch_results([-row for row in feed.next_batch(7)])

        answering = Running(answer_some)
        asked = replace(order([link.target]), host_timeout_s=0.2)
        answers = exchange(asked, "0.a", link.target, encode_rows(ROWS, max_rows=10))
        with pytest.raises(FeederError, match="no message for"):
            list(answers)
        answering.result()


def test_nobody_is_waited_for_once_the_cluster_has_failed_and_the_cause_is_told() -> None:
    cause = "worker:1 (rank 1, pid 7) on b raised ValueError: no such layer"
    with LocalNode(0) as one, LocalNode(1) as other:
        one.call(lambda: one.feeds.close("map_fun has ended"))
        one.call(lambda: one.feeds.close(f"{Code.CLUSTER_FAILED} {cause}"))
        one.call(lambda: one.feeds.close("the node ends"))
        other.call(lambda: other.feeds.close("the node ends"))
        with pytest.raises(FeederError, match=re.escape(f"failed: {Code.CLUSTER_FAILED} {cause}")):
            infer(other, one, wait_s=SOON_S * 100)


def test_nodes_that_have_gone_are_no_riddle_the_coordinator_tells_the_cause() -> None:
    """A cluster that has failed ends its nodes after seconds: they cannot say why any more."""
    with LocalNode(0) as gone:
        target = gone.target
    controller = Controller(ClusterSpec("test", plan_nodes(1)), TOKEN, Mock(spec_set=Executor))
    try:
        coordinator = controller.start("127.0.0.1", (0,)).url
        asked = replace(order([target]), patience_s=0.0, coordinator=coordinator)

        def act() -> None:
            list(exchange(asked, "0.a", target, encode_rows(ROWS)))

        with pytest.raises(FeederError, match=r"\] inference at worker:0 failed: .*refused"):
            act()  # it has not failed, as far as is known
        controller.submit(LaunchFailed(LaunchError("no such layer")))
        assert controller.wait_for(lambda view: has_ended(view.state), Deadline.after(SOON_S))
        with pytest.raises(FeederError, match=r"has failed: no such layer .*refused"):
            act()
    finally:
        controller.close()
    with pytest.raises(FeederError, match=r"\] the cluster has been shut down, .* before the shut"):
        act()


def test_node_on_its_way_to_another_round_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalNode() as node:
        is_refused, store = threading.Event(), node.feeds.store
        open_exchange = store.open_exchange

        def open_or_refuse(name: str) -> Exchange:
            try:
                return open_exchange(name)
            except FeedClosedError:
                is_refused.set()
                raise

        monkeypatch.setattr(store, "open_exchange", open_or_refuse)
        node.call(lambda: node.feeds.close("the child has died"))
        asking = Running(lambda: infer(node, wait_s=SOON_S))
        assert is_refused.wait(SOON_S)
        node.call(lambda: node.feeds.reopen(1))
        serving = serve(node)
        assert asking.result() == [-row for row in ROWS]
        node.end_feed()
        serving.result()


def test_too_few_results_are_an_error_after_the_timeout() -> None:
    with LocalNode() as node:
        serving = serve(node, lambda rows: rows[:1])
        with pytest.raises(FeederError, match=r"1 of 5 rows of inference partition 0\.a"):
            infer(node, rows=range(5), timeout_s=0.2)
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
            infer(node, rows=rows())
        child.result()
        serving = serve(node, lambda rows: ["again"] * len(rows))
        assert set(infer(node)) == {"again"}
        node.end_feed()
        serving.result()


def test_who_stops_asking_does_not_leave_the_node_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert infer(node, rows=[1, 2]) == [1, 2]
        node.end_feed()
        serving.result()


def test_results_travel_without_an_import_of_pandas() -> None:
    code = """
import sys
from sparkdl.feed.transfer.messages import result_batch

batch = result_batch(b"results")
assert batch.column(0)[0].as_py() == b"results"
print(batch.schema, *sorted({"pandas"} & sys.modules.keys()))
"""
    assert output_of(sys.executable, "-c", code).split() == ["ipc:", "binary"]
