"""Rows on their way through a whole cluster without Spark."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FeedClosedError, FeedTimeoutError, NodeFailedError
from sparkdl.driver.lifecycle.state import is_empty
from sparkdl.node.context import NodeContext
from tests.doubles.frameworks import LOSES_PORTS
from tests.doubles.gates import Gate
from tests.doubles.map_funs import count_rows, double, hang
from tests.doubles.nodes import SOON_S, Lines, launch

LITTLE = 1 << 16
"""Bytes of feed memory that make feeders wait."""


def column(result: Any, i: int) -> int:
    """Return the sum over all nodes of one of the numbers that each returned."""
    return sum(values[i] for values in result)


# all rows, once an epoch


def test_every_row_is_read_once_an_epoch_however_often_it_is_fed() -> None:
    with launch(count_rows) as cluster:
        first = cluster.feed(range(1000), epochs=3)
        assert first.epochs == 3
        assert first.rows_fed == 3000
        assert first.rows_unused == 0
        assert first.rows == {"worker:0": 1500, "worker:1": 1500}
        assert cluster.feed(range(501)).rows_fed == 501
        results = cluster.results(SOON_S)
    assert column(results, 0) == 3501
    assert column(results, 1) == 3 * sum(range(1000)) + sum(range(501))


def test_data_far_beyond_the_memory_streams_through() -> None:
    rows = 200

    def norm(args: None, ctx: NodeContext) -> list[float]:
        total = [0.0, 0.0]
        for _epoch in range(2):
            for batch in ctx.batches(16, even=False):
                total[0] += len(batch["x"])
                total[1] += float(batch["x"].sum())
        return total

    x = np.repeat(np.arange(rows, dtype=np.float32)[:, None], 4096, axis=1)  # 3.2 MB
    column_x = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4096)
    table = pa.table({"x": column_x})
    parts = [table.slice(i, 8) for i in range(0, rows, 8)]
    with launch(norm, feed_memory=LITTLE) as cluster:
        assert cluster.feed(parts, epochs=2).rows_fed == 2 * rows
        results = cluster.results(SOON_S)
    assert column(results, 0) == 2 * rows
    assert column(results, 1) == 2 * 4096 * sum(range(rows))


def test_fewer_rows_than_nodes_are_fed_all_the_same() -> None:
    with launch(count_rows) as cluster:
        assert cluster.feed([7], epochs=2).rows_fed == 2
        assert cluster.feed([]).rows_fed == 0
        assert column(cluster.results(SOON_S), 1) == 14


def test_feeds_of_different_names_go_side_by_side() -> None:
    def two_feeds(args: None, ctx: NodeContext) -> list[int]:
        rows = []
        for name in ("images", "labels"):
            feed, count = ctx.get_data_feed(qname_in=name), 0
            while not feed.should_stop():
                count += len(feed.next_batch(10))
            rows.append(count)
        return rows

    with launch(two_feeds, feed_memory=1 << 20) as cluster, ThreadPoolExecutor(2) as pool:
        labels = pool.submit(cluster.feed, range(30), 1, "labels")  # read last
        images = pool.submit(cluster.feed, range(1000), 2, "images")
        assert images.result(SOON_S).rows_fed == 2000
        cluster.end_feeds("images")
        assert labels.result(SOON_S).rows_fed == 30
        results = cluster.results(SOON_S)
    assert (column(results, 0), column(results, 1)) == (2000, 30)


def test_end_of_one_feed_does_not_cut_another(tmp_path: Path) -> None:
    def leave_one(args: list[Gate], ctx: NodeContext) -> int:
        ctx.get_data_feed(qname_in="eval").terminate()
        feed, count = ctx.get_data_feed(), 0
        args[ctx.rank].wait()
        while not feed.should_stop():
            count += len(feed.next_batch(10))
        return count

    gates = [Gate.at(tmp_path / str(rank)) for rank in range(2)]
    rows = [bytes(1000)] * 500
    with launch(leave_one, gates, feed_memory=LITTLE) as cluster, ThreadPoolExecutor(1) as pool:
        training = pool.submit(cluster.feed, iter(rows))
        cluster.feed(itertools.repeat(1), name="eval")  # endless: returns as nobody wants it
        for gate in gates:
            gate.open()
        assert training.result(SOON_S).rows_fed == 500
        assert sum(cluster.results(SOON_S)) == 500


# rows that nobody wants


def test_rows_for_a_node_that_returned_early_are_counted_as_unused() -> None:
    def some(args: None, ctx: NodeContext) -> int:
        feed, rows = ctx.get_data_feed(), 0
        while not feed.should_stop() and not (ctx.rank == 1 and rows):
            rows += len(feed.next_batch(10))
        return rows

    with launch(some) as cluster:
        report = cluster.feed(range(1000))
        kept, left = cluster.results(SOON_S)
    assert left == 10
    assert report.rows_unused == report.rows["worker:1"] - 10 > 0
    assert kept + left + report.rows_unused == 1000


def test_feed_ends_early_once_no_node_wants_more() -> None:
    def first_rows(args: None, ctx: NodeContext) -> int:
        feed = ctx.get_data_feed()
        rows = len(feed.next_batch(10))
        feed.terminate()
        return rows

    with launch(first_rows) as cluster:
        report = cluster.feed(itertools.count())
        assert report.epochs == 0
        assert report.rows_unused > 0
        assert cluster.results(SOON_S) == [10, 10]


# what ends a feed, and what it refuses


def test_feed_that_nobody_reads_times_out_and_names_the_node_and_its_last_words() -> None:
    def stall_in_one(args: None, ctx: NodeContext) -> None:
        if ctx.rank == 1:
            print("waiting for a lock")
            hang(args, ctx)
        print("reading")
        count_rows(args, ctx)

    lines = Lines()
    with launch(stall_in_one, on_log=lines) as cluster:
        lines.wait_for("reading")
        lines.wait_for("waiting for a lock")
        with pytest.raises(FeedTimeoutError) as caught:
            cluster.feed(range(100), timeout_s=2)
        cluster.abort()
    story = str(caught.value)
    assert "no progress for 2 s: worker:1 has read 0 rows in 0 steps, and received 50" in story
    assert "feed_timeout" in story
    assert story.endswith("  | waiting for a lock")


def test_timeout_of_a_feed_is_its_own_also_where_a_node_is_full(tmp_path: Path) -> None:
    """The cluster's feed_timeout is what feeds have that name none."""
    gate = Gate.at(tmp_path / "gate")

    def late(args: Gate, ctx: NodeContext) -> list[int]:
        args.wait()
        return [len(ctx.get_data_feed().next_batch(300))]

    with (
        launch(late, gate, nodes=1, feed_memory=LITTLE, feed_timeout=0.3) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        feeding = pool.submit(
            cluster.feed, [pa.table({"x": [bytes(LITTLE)]})] * 3, timeout_s=SOON_S
        )
        with gate.wait_until_reached(), pytest.raises(FutureTimeoutError):
            feeding.result(timeout=1.0)
        assert feeding.result(SOON_S).rows_fed == 3


def test_problem_in_the_data_is_raised_and_harms_no_node() -> None:
    def rows() -> Iterator[int]:
        yield from range(10)
        raise ValueError("a bad row")

    with launch(count_rows, nodes=1) as cluster:
        with pytest.raises(ValueError, match="a bad row"):
            cluster.feed(rows())
        assert cluster.feed([1]).rows_fed == 1


def test_cluster_that_reads_its_own_data_is_not_fed() -> None:
    with (
        launch(lambda args, ctx: None, nodes=1, input_mode="own") as cluster,
        pytest.raises(ConfigError, match="input_mode='spark'"),
    ):
        cluster.feed([1])


def test_what_cannot_be_fed_is_refused_before_a_row_is_sent() -> None:
    with launch(count_rows, nodes=1) as cluster:
        for data, epochs, text in (
            ([1], 0, "epochs=0"),
            (1, 1, "not int"),
            (b"text", 1, "not bytes"),
            ("text", 1, "text: no Parquet file found"),
            ({"x": [1]}, 1, "not dict"),
            (iter([1]), 2, "a list_iterator can be read once"),
        ):
            with pytest.raises(ConfigError, match=text):
                cluster.feed(data, epochs)
        with pytest.raises(ConfigError, match="timeout_s=0"):
            cluster.feed([1], timeout_s=0)
        assert cluster.results(SOON_S) == [[0, 0]]


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


# lost ports


def lose_port_once(args: list[Any], ctx: NodeContext) -> list[int]:
    """In the first round lose the port, having met the test at a gate; in the second, train."""
    gate, rows_before = args
    if ctx.generation == 0 and ctx.rank == 1:
        if rows_before:
            ctx.get_data_feed().next_batch(rows_before)
        gate.wait()
        raise OSError("address already in use")
    return [*count_rows(args, ctx), ctx.generation, ctx.member.port]


@pytest.mark.parametrize("rows_before", [0, 10])
def test_feed_begins_anew_when_a_node_loses_its_port(tmp_path: Path, rows_before: int) -> None:
    gate = Gate.at(tmp_path / "gate")
    with (
        launch(lose_port_once, [gate, rows_before], framework=LOSES_PORTS) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        ports = [member.port for member in cluster.world.members]
        feeding = pool.submit(cluster.feed, range(1000), 2)
        gate.open()
        report = feeding.result(2 * SOON_S)
        assert (report.rows_fed, report.rows_unused) == (2000, 0)
        assert cluster.feed(range(100)).rows_fed == 100
        results = cluster.results(SOON_S)
        now = [member.port for member in cluster.world.members]
    assert column(results, 0) == 2100
    assert [result[2] for result in results] == [1, 1]
    assert [result[3] for result in results] == now
    assert not set(now) & set(ports)


def test_end_of_the_feed_reaches_the_children_of_a_later_round(tmp_path: Path) -> None:
    gate = Gate.at(tmp_path / "gate")
    with (
        launch(lose_port_once, [gate, 0], framework=LOSES_PORTS) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        results = pool.submit(cluster.results)
        with gate.wait_until_reached():
            cluster.end_feeds()
        assert [result[:3] for result in results.result(2 * SOON_S)] == [[0, 0, 1]] * 2


# inference


def test_results_of_inference_are_in_order_and_come_as_they_are_asked_for() -> None:
    with launch(double) as cluster:
        assert list(cluster.infer(range(1000))) == [2 * i for i in range(1000)]
        tables = [pa.table({"x": [1, 2]}), pa.table({"x": [3]}), pa.table({"x": [4, 5]})]
        few = cluster.infer(range(5), timeout_s=5)
        assert list(itertools.islice(few, 3)) == [0, 2, 4]
        few.close()
        with pytest.raises(ConfigError, match="schema"):
            list(cluster.infer(tables, schema="y long"))
        assert cluster.status() == "Running"


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


def test_results_that_are_asked_for_after_the_shutdown_say_that_nobody_answers() -> None:
    with launch(double) as cluster:
        answers = cluster.infer(range(10), timeout_s=1)
    with pytest.raises(FeedClosedError, match="run the action on them before the shutdown"):
        list(answers)


# feeds that nobody reads, or feeds


def returns(args: None, ctx: NodeContext) -> None:
    """Read nothing."""


def misspells(args: None, ctx: NodeContext) -> int:
    """Read a feed that nobody feeds."""
    return len(list(ctx.batches(10, feed="inputs")))


def test_rows_that_nobody_reads_are_counted_and_the_warning_names_the_nodes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with launch(returns) as cluster:
        cluster.wait(SOON_S)
        report = cluster.feed(range(1000))
        assert (report.rows_unused, report.rows_used, report.epochs) == (1000, 0, 0)
    assert "1000 rows were not used: map_fun has returned on worker:0; map_fun" in caplog.text
    assert "has returned on worker:1" in caplog.text


def test_rows_left_by_nodes_that_return_while_they_are_fed_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def reads_one_batch(args: None, ctx: NodeContext) -> int:
        return len(next(iter(ctx.batches(10)))["value"])

    with launch(reads_one_batch) as cluster:
        report = cluster.feed(range(1000))
        assert (report.rows_used, report.rows_unused) == (20, 980)
    assert "980 rows were not used" in caplog.text


@pytest.mark.parametrize("epochs", [1, 3])
def test_rows_of_files_that_nobody_reads_are_counted(tmp_path: Path, epochs: int) -> None:
    pq.write_table(pa.table({"x": range(100)}), tmp_path / "part.parquet")
    with launch(returns) as cluster:
        cluster.wait(SOON_S)
        assert cluster.feed(str(tmp_path), epochs=epochs).rows_unused == 100


def test_own_data_is_no_feed_and_reading_one_fails_at_once() -> None:
    with pytest.raises(NodeFailedError, match=r"ConfigError: feed 'input' cannot be read.*'own'"):
        sparkdl.run(None, count_rows, nodes=2, framework="plain", executor="local")


def test_feed_of_another_name_than_is_fed_is_told_with_both_names() -> None:
    with (
        pytest.raises(NodeFailedError, match=r"nobody has fed 'inputs' .* being fed is 'input'"),
        launch(misspells, feed_timeout=1.0) as cluster,
    ):
        cluster.feed(range(10), timeout_s=SOON_S)


def test_driver_that_gives_up_a_feed_first_says_which_one_is_read() -> None:
    waits = r"nobody has fed what is read: 'inputs' \(worker:0, worker:1\); being fed is 'input'"
    with launch(misspells) as cluster, pytest.raises(FeedTimeoutError, match=waits):
        cluster.feed(range(10), timeout_s=2.0)


def test_cluster_that_is_never_fed_ends_by_itself() -> None:
    with launch(count_rows, feed_timeout=0.5) as cluster:
        with pytest.raises(NodeFailedError, match=r"UnfedError: .* nothing is being fed"):
            cluster.wait(SOON_S)
        cluster.abort()


def test_loop_that_goes_on_beyond_the_end_is_told_of_and_then_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def epochs(args: int, ctx: NodeContext) -> list[int]:
        batches = ctx.batches(10)
        return [sum(len(batch["value"]) for batch in batches) for _ in range(args)]

    with launch(epochs, 3) as cluster:
        cluster.feed(range(20), epochs=2)
        assert cluster.results(SOON_S) == [[10, 10, 0]] * 2
    assert "feed 'input' has ended, and map_fun on worker:" in caplog.text
    with (
        pytest.raises(NodeFailedError, match="EndOfFeedError: feed 'input' ended after 2 epochs"),
        launch(epochs, 5) as cluster,
    ):
        cluster.feed(range(20), epochs=2)


def test_loop_need_not_count_epochs(caplog: pytest.LogCaptureFixture) -> None:
    def all_epochs(args: None, ctx: NodeContext) -> list[int]:
        batches, found = ctx.batches(10), []
        while ctx.has_epoch():
            found.append(sum(len(batch["value"]) for batch in batches))
        return found

    with launch(all_epochs) as cluster:
        cluster.feed(range(20), epochs=2)
        cluster.feed(range(40))
        assert cluster.results(SOON_S) == [[10, 10, 20]] * 2
    assert "has ended" not in caplog.text


def test_rows_for_a_cluster_that_has_finished_and_whose_nodes_have_gone_are_counted() -> None:
    def return_at_once(args: None, ctx: NodeContext) -> None:
        pass

    with launch(return_at_once) as cluster:
        cluster.wait(SOON_S)
        assert cluster._controller.wait_for(lambda v: is_empty(v.state), Deadline.after(SOON_S))
        report = cluster.feed(range(100), epochs=2)
    assert (report.rows_used, report.rows_unused) == (0, 100)
