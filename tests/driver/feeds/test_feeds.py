"""Streams of micro-batches, fed by hand to a whole cluster without Spark; what names files."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.control.counts import FeedCount
from sparkdl.control.messages import ReadShare
from sparkdl.control.rows import DataFile, Share, Storage
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, NodeFailedError
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.driver.executors.executor import trigger_options
from sparkdl.driver.feeds import feeds
from sparkdl.driver.feeds.feeds import listed
from sparkdl.driver.feeds.report import check_size
from sparkdl.feed.reader.batches import Tail
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Lab
from tests.doubles.meetings import STEP_S, Meetings, meet, parts, train
from tests.doubles.nodes import SOON_S, launch
from tests.doubles.until import until

MICRO_BATCHES = (1, 0, 1, 3, 40, 2, 1, 1, 1, 18)
"""Rows of each: fewer than nodes, none at all, no multiple of a step."""


class Query:
    """What a stream asks of Spark's query."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    @property
    def isActive(self) -> bool:  # noqa: N802
        return not self.stopped.is_set()

    def stop(self) -> None:
        self.stopped.set()


def received_by(feeds: Mapping[tuple[int, str], FeedCount], name: str) -> list[int]:
    return [count.rows_received for (_, feed), count in feeds.items() if feed == name]


def thread(run: Any, name: str) -> threading.Thread:
    return threading.Thread(target=run, name=name, daemon=True)


@pytest.mark.parametrize("tail", ["short", "carry"])
def test_nodes_in_step_read_uneven_micro_batches_as_one_epoch(
    roomy: Lab, feed: str, tail: Tail
) -> None:
    with Meetings() as meetings:
        roomy.begin(train, {"port": meetings.port, "feed": feed, "tail": tail})
        stream = roomy.cluster.open_stream(feed, STEP_S)
        for table in parts(*MICRO_BATCHES):
            assert stream.feed(table)
        stream.end()
        roomy.cluster.feed(parts(50, 7), 1, feed, STEP_S)
        roomy.cluster.end_feeds(feed)
        first, second = results = roomy.results()
    assert [len(epoch) for epoch in first] == [len(epoch) for epoch in second]
    streamed = [x for node in results for step in node[0] for x in step]
    assert len(first) == 2
    if tail == "short":
        assert sorted(streamed) == list(range(sum(MICRO_BATCHES))), "each row once, none again"
    else:
        assert len(streamed) == len(set(streamed)) == 64, "4 of 68 fill no step"


def leave_early(_args: Any, ctx: NodeContext) -> list[list[int]]:
    """Read two batches of an epoch, three times."""
    loops = []
    for _ in range(3):
        batches = zip(range(2), ctx.batches(8, ["x"], shuffle=True), strict=False)
        loops.append([x for _, batch in batches for x in batch["x"].tolist()])
    return loops


def test_report_counts_all_rows_of_loops_that_were_left_early() -> None:
    with launch(leave_early, nodes=1) as cluster:
        report = cluster.feed(parts(100), 1, "input", STEP_S)
        (loops,) = cluster.results(SOON_S)
    assert [len(loop) for loop in loops] == [16, 16, 16]
    assert len({str(loop) for loop in loops}) == 3
    assert (report.rows_used, report.rows_again, report.rows_unused) == (16, 32, 84)


def wait_then(args: dict[str, Any], ctx: NodeContext) -> int:
    """Read a batch; when the test says so, one node ends or fails. Read on until the feed ends."""
    batches = ctx.batches(4, ["x"], args["feed"], even=True)
    rows = len(next(iter(batches))["x"])
    if ctx.rank == 1:
        meet(args["held"])
        if args["how"] == "raise":
            raise ValueError("no such layer")
        batches.reader.terminate()
    while batches.reader.peek_batch() is not None:
        rows += sum(len(batch["x"]) for batch in batches)
    return rows


def test_query_ends_without_an_error_when_a_node_terminates_while_the_stream_is_idle(
    roomy: Lab, feed: str
) -> None:
    query, cluster = Query(), roomy.cluster
    with Meetings() as held:
        roomy.begin(wait_then, {"feed": feed, "held": held.port, "how": "terminate"})
        stream = cluster.open_stream(feed, STEP_S)
        stream.watch(query, thread)
        assert stream.feed(parts(8))
        meet(held.port)
        assert query.stopped.wait(SOON_S)
        assert not stream.feed(parts(8))
        stream.stop()
        assert stream.failure() is None
        assert cluster.feed(parts(20), 1, feed, STEP_S).rows_used == 20, "the next feed is read"
        cluster.end_feeds(feed)
        roomy.results()


def test_query_ends_when_a_node_fails_while_the_stream_is_idle_and_the_cause_is_told() -> None:
    query, feed = Query(), "input"
    args = {"feed": feed, "how": "raise"}
    with Meetings() as held, launch(wait_then, {**args, "held": held.port}) as cluster:
        stream = cluster.open_stream(feed, STEP_S)
        stream.watch(query, thread)
        assert stream.feed(parts(8))
        meet(held.port)
        assert query.stopped.wait(SOON_S)
        assert not stream.is_wanted()
        assert isinstance(stream.failure(), NodeFailedError)
        assert "no such layer" in str(stream.failure())
        stream.stop()
        with pytest.raises(NodeFailedError, match="no such layer"):
            cluster.shutdown()


@pytest.mark.parametrize("how", ["the query ends", "the feed ends"])
def test_micro_batch_that_is_fed_is_cut_short_and_not_counted(
    roomy: Lab, feed: str, how: str
) -> None:
    """A node stands still, so that the feeding waits for it."""
    query, cluster = Query(), roomy.cluster
    with Meetings() as meetings, Meetings() as held:
        ports = {"port": meetings.port, "held": held.port}
        roomy.begin(train, {**ports, "feed": feed, "tail": "short", "pause": [0, 1]})
        stream = cluster.open_stream(feed, STEP_S)
        stream.watch(query, thread)
        answers: list[bool] = []
        feeding = thread(lambda: answers.append(stream.feed(parts(64))), "feeding")
        feeding.start()
        assert cluster._controller.wait_for(
            lambda view: sum(received_by(view.feeds, feed)) == 64, Deadline.after(SOON_S)
        )
        if how == "the feed ends":
            cluster.end_feeds(feed)
        else:
            query.stop()
        feeding.join(SOON_S)
        assert answers == [False]
        assert query.stopped.is_set()
        meet(held.port)
        cluster.end_feeds(feed)
        first, second = roomy.results()
    assert [len(epoch) for epoch in first] == [len(epoch) for epoch in second] == [4]


def test_micro_batch_that_the_cluster_has_had_is_not_fed_again(roomy: Lab, feed: str) -> None:
    def count(feed: str, ctx: NodeContext) -> int:
        return sum(len(batch["x"]) for batch in ctx.batches(4, ["x"], feed))

    cluster = roomy.cluster
    roomy.begin(count, feed)
    stream = cluster.open_stream(feed, STEP_S)
    assert [stream.feed_batch(parts(10), "q", batch) for batch in (0, 1, 1, 0)] == [True] * 4
    assert stream.feed_batch(parts(10), "another", 0)
    with pytest.raises(ConfigError, match="belongs to a stream"):
        cluster.feed(parts(1), feed=feed)
    with pytest.raises(ConfigError, match="belongs to a stream"):
        cluster.open_stream(feed)
    cluster.end_feeds(feed)
    assert sum(roomy.results()) == 30
    assert not stream.feed(parts(1)), "the end of the feed has ended the stream"
    with pytest.raises(ConfigError, match="needs Spark"):
        cluster.train_stream(parts(1))  # type: ignore[arg-type]


def test_triggers_are_those_with_micro_batches() -> None:
    assert trigger_options(None) == {}
    assert trigger_options("2 seconds") == {"processingTime": "2 seconds"}
    assert trigger_options({"availableNow": True}) == {"availableNow": True}
    for wrong in ({"continuous": "1 second"}, {}, {"once": True, "availableNow": True}):
        with pytest.raises(ConfigError, match="micro-batches"):
            trigger_options(wrong)


SPEC = ClusterSpec("c", plan_nodes(1))


def order_of(files: int) -> ReadShare:
    """Return an order to read so many files, whose names take 1 kB each."""
    named = tuple(DataFile("x" * 1000, 1) for _ in range(files))
    return ReadShare("input", 0, Share(Storage("file://"), b"", (), named, ()))


def test_share_that_is_too_large_for_a_message_says_what_to_do() -> None:
    check_size(order_of(10_000))
    with pytest.raises(
        ConfigError, match=r"17000 files, needs a message of .* Write fewer and larger files"
    ):
        check_size(order_of(17_000))


@pytest.mark.parametrize("data", [[1, 2], range(3), object(), iter(["a"])])
def test_what_names_no_files_is_left_as_it_is(data: Any) -> None:
    assert listed(data, SPEC) is data


def test_look_at_files_ends_with_the_call_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feeds, "_SILENT_S", 0.1)
    over, caller = threading.Event(), threading.get_ident()

    def look(is_wanted: Callable[[], bool]) -> None:
        assert until(lambda: "still reading the footers" in caplog.text)
        signal.pthread_kill(caller, signal.SIGINT)
        assert until(lambda: not is_wanted())
        over.set()

    own: Any = SimpleNamespace(_executor=SimpleNamespace(thread=thread))
    with pytest.raises(KeyboardInterrupt):
        feeds.Feeds._looked_up(own, "x", look)
    assert over.wait(SOON_S)
