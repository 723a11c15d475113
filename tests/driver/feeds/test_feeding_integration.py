"""Rows on their way through a whole cluster without Spark."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import (
    ConfigError,
    EndOfFeedError,
    FeedClosedError,
    FeedTimeoutError,
    NodeFailedError,
)
from sparkdl.driver.handle import Cluster
from sparkdl.node.context import NodeContext
from tests.doubles.gates import Gate
from tests.doubles.labs import Lab
from tests.doubles.map_funs import count_rows
from tests.doubles.nodes import SOON_S, launch

STILL_S = 1.0
"""After which a feed that stands still times out."""


def count(feed: str, ctx: NodeContext) -> list[int]:
    """Read a feed to its end; return how many rows there were, and their sum."""
    data, rows = ctx.get_data_feed(qname_in=feed), []
    while not data.should_stop():
        rows += data.next_batch(100)
    return [len(rows), sum(rows)]


def column(result: Any, i: int) -> int:
    """Return the sum over all nodes of one of the numbers that each returned."""
    return sum(values[i] for values in result)


# all rows, once an epoch


def test_every_row_is_read_once_an_epoch_however_often_it_is_fed(roomy: Lab, feed: str) -> None:
    roomy.begin(count, feed)
    first = roomy.cluster.feed(range(1000), epochs=3, feed=feed)
    assert first.epochs == 3
    assert first.rows_fed == 3000
    assert first.rows_unused == 0
    assert first.rows == {"worker:0": 1500, "worker:1": 1500}
    assert roomy.cluster.feed(range(501), feed=feed).rows_fed == 501
    results = roomy.ended(feed)
    assert column(results, 0) == 3501
    assert column(results, 1) == 3 * sum(range(1000)) + sum(range(501))


def test_data_far_beyond_the_memory_streams_through(little: Lab, feed: str) -> None:
    rows = 200

    def norm(feed: str, ctx: NodeContext) -> list[float]:
        total = [0.0, 0.0]
        for _epoch in range(2):
            for batch in ctx.batches(16, feed=feed, even=False):
                total[0] += len(batch["x"])
                total[1] += float(batch["x"].sum())
        return total

    x = np.repeat(np.arange(rows, dtype=np.float32)[:, None], 4096, axis=1)  # 3.2 MB
    column_x = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4096)
    table = pa.table({"x": column_x})
    parts = [table.slice(i, 8) for i in range(0, rows, 8)]
    little.begin(norm, feed)
    assert little.cluster.feed(parts, epochs=2, feed=feed).rows_fed == 2 * rows
    results = little.ended(feed)
    assert column(results, 0) == 2 * rows
    assert column(results, 1) == 2 * 4096 * sum(range(rows))


def test_fewer_rows_than_nodes_are_fed_all_the_same(roomy: Lab, feed: str) -> None:
    roomy.begin(count, feed)
    assert roomy.cluster.feed([7], epochs=2, feed=feed).rows_fed == 2
    assert column(roomy.ended(feed), 1) == 14


def test_data_without_rows_are_an_error_of_the_driver(
    roomy: Lab, feed: str, tmp_path: Path
) -> None:
    roomy.begin(count, feed)
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "part.parquet")
    nothing: list[Any] = [[], iter([]), pa.table({"x": pa.array([], pa.int64())}), str(tmp_path)]
    for data in nothing:
        with pytest.raises(ConfigError, match="the data have no rows, so there is nothing to"):
            roomy.cluster.feed(data, feed=feed)
    assert roomy.cluster.feed([7], feed=feed).rows_used == 1, "it can be fed again"
    assert column(roomy.ended(feed), 1) == 7


def test_end_of_one_feed_does_not_cut_another(disk: Lab, feed: str, tmp_path: Path) -> None:
    def leave_one(args: list[Any], ctx: NodeContext) -> int:
        name, other, *gates = args
        ctx.get_data_feed(qname_in=other).terminate()
        feed, rows = ctx.get_data_feed(qname_in=name), 0
        gates[ctx.rank].wait()
        while not feed.should_stop():
            rows += len(feed.next_batch(10))
        return rows

    gates = [Gate.at(tmp_path / str(rank)) for rank in range(2)]
    rows, other = [bytes(1000)] * 500, f"{feed} eval"
    disk.begin(leave_one, [feed, other, *gates])
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(disk.cluster.feed, iter(rows), 1, feed)
        disk.cluster.feed(itertools.repeat(1), feed=other)  # endless: returns as nobody wants it
        for gate in gates:
            gate.open()
        assert training.result(SOON_S).rows_fed == 500
    assert sum(disk.ended(feed)) == 500


# rows that nobody wants


# what ends a feed, and what it refuses


def test_what_cannot_be_fed_is_refused_before_a_row_is_sent(roomy: Lab, feed: str) -> None:
    roomy.begin(count, feed)
    for data, epochs, text in (
        ([1], 0, "epochs=0"),
        (1, 1, "not int"),
        (b"text", 1, "not bytes"),
        ("text", 1, "text: no Parquet file found"),
        ({"x": [1]}, 1, "not dict"),
        (iter([1]), 2, "a list_iterator can be read once"),
    ):
        with pytest.raises(ConfigError, match=text):
            roomy.cluster.feed(data, epochs, feed)
    with pytest.raises(ConfigError, match="timeout_s=0"):
        roomy.cluster.feed([1], feed=feed, timeout_s=0)
    assert roomy.ended(feed) == [[0, 0]] * 2


def test_shutdown_ends_a_running_feed_and_later_ones() -> None:
    has_begun = threading.Event()

    def rows() -> Iterator[int]:
        has_begun.set()
        yield from itertools.repeat(1)

    with launch(count_rows, nodes=1) as cluster, ThreadPoolExecutor(1) as pool:
        feeding = pool.submit(cluster.feed, rows())
        assert has_begun.wait(SOON_S)
        cluster.abort()
        with pytest.raises(FeedClosedError, match="shut down while it was being fed"):
            feeding.result(SOON_S)
        with pytest.raises(FeedClosedError, match="has been shut down"):
            cluster.feed([1])
        with pytest.raises(FeedClosedError, match="has been shut down"):
            cluster.infer([1])


# inference


def test_results_of_inference_are_in_order_and_come_as_they_are_asked_for(
    roomy: Lab, feed: str
) -> None:
    def double_named(name: str, ctx: NodeContext) -> None:
        feed = ctx.get_data_feed(train_mode=False, qname_in=name)
        while not feed.should_stop():
            feed.batch_results([2 * row for row in feed.next_batch(100)])

    infer = partial(roomy.cluster.infer, feed=feed)
    roomy.begin(double_named, feed)
    assert list(infer(range(1000))) == [2 * i for i in range(1000)]
    tables = [pa.table({"x": [1, 2]}), pa.table({"x": [3]}), pa.table({"x": [4, 5]})]
    few = infer(range(5), timeout_s=5)
    assert list(itertools.islice(few, 3)) == [0, 2, 4]
    few.close()
    with pytest.raises(ConfigError, match="schema"):
        list(infer(tables, schema="y long"))
    assert roomy.cluster.status() == "Running"
    roomy.ended(feed)


def test_inference_raises_the_failure_of_whichever_node_there_then_and_later() -> None:
    def fail(args: None, ctx: NodeContext) -> None:
        feed = ctx.get_data_feed(train_mode=False)
        feed.next_batch(1)
        if ctx.rank == 0:
            raise RuntimeError("out of luck")
        threading.Event().wait()  # the other one is asked instead, and does not answer

    cluster = launch(fail, nodes=2)
    try:
        with pytest.raises(NodeFailedError, match="out of luck") as caught:
            list(cluster.infer(range(10)))
        assert caught.value.root_cause.node == "worker:0"
        with pytest.raises(NodeFailedError, match="out of luck"):
            cluster.wait(SOON_S)
        with pytest.raises(NodeFailedError, match="out of luck"):
            cluster.infer(range(10))
    finally:
        cluster.abort()


# feeds that nobody reads, or feeds


def test_warning_names_the_nodes_that_have_returned_and_left_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While they are fed, and afterwards."""

    def read_one_batch(args: None, ctx: NodeContext) -> int:
        return len(next(iter(ctx.batches(10)))["value"])

    pq.write_table(pa.table({"x": range(100)}), tmp_path / "part.parquet")
    with launch(read_one_batch) as cluster:
        report = cluster.feed(range(1000))
        assert report.rows_used == 20
        cluster.wait(SOON_S)
        report = cluster.feed(range(1000))
        assert (report.rows_used, report.epochs) == (0, 0)
        for epochs in (1, 3):
            assert cluster.feed(str(tmp_path), epochs=epochs).rows_unused == 100 * epochs, (
                "of files"
            )
    assert caplog.text.count("rows were not used: map_fun has returned") == 4
    assert "terminate() on worker:0, worker:1" in caplog.text


def misspells(feed: str, ctx: NodeContext) -> int:
    """Read a feed that nobody feeds."""
    return len(list(ctx.batches(10, feed=feed)))


def wait_until_read(cluster: Cluster, feed: str, nodes: Sequence[int] = (0,)) -> None:
    """Wait until each node of `nodes` has asked for rows of `feed`: short timeouts begin then."""
    assert cluster._controller.wait_for(
        lambda view: all((node_id, feed) in view.feeds for node_id in nodes), Deadline.after(SOON_S)
    )


def test_misspelt_name_of_a_feed_is_told_after_seconds_with_both_names(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkdl.driver.feeds.runner.STALL_S", 0.5)
    with launch(misspells, "validation", nodes=1) as cluster:
        wait_until_read(cluster, "validation")
        with pytest.raises(FeedTimeoutError, match="did you mean 'validations'"):
            cluster.feed(range(10), feed="validations", timeout_s=2 * STILL_S)
        cluster.abort()
    told = "'validation' on worker:0. It has fed 'validations' to worker:0; did you mean"
    assert caplog.text.count(told) == 1


def test_feed_that_was_never_fed_is_an_error_when_the_feeds_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with launch(misspells, "input", nodes=1) as cluster:
        with pytest.raises(
            NodeFailedError, match=r"UnfedError: feed 'input' received no data on worker:0 bef"
        ):
            cluster.results(SOON_S)
        cluster.abort()
    assert "has gone on to another epoch" not in caplog.text


@pytest.mark.parametrize("loops", [3, 5])
def test_loop_that_goes_on_beyond_the_end_is_told_of_and_then_fails(
    roomy: Lab, feed: str, caplog: pytest.LogCaptureFixture, loops: int
) -> None:
    def epochs(args: tuple[str, int], ctx: NodeContext) -> list[int]:
        batches = ctx.batches(10, feed=args[0])
        return [sum(len(batch["value"]) for batch in batches) for _ in range(args[1])]

    roomy.begin(epochs, (feed, loops))
    roomy.cluster.feed(range(20), epochs=2, feed=feed)
    if loops == 3:
        assert roomy.ended(feed) == [[10, 10, 0]] * 2
    else:
        with pytest.raises(
            EndOfFeedError, match=r"ended after 2 epochs.*as another feed: cluster\.feed_async"
        ):
            roomy.ended(feed)
    assert roomy.cluster._controller.wait_for(
        lambda view: any(
            count.given.extra_epochs for (_, name), count in view.feeds.items() if name == feed
        ),
        Deadline.after(SOON_S),
    )
    assert f"feed {feed!r} has ended, and map_fun on worker:" in caplog.text
