"""Rows and files on their way through whole clusters without Spark: each row once an epoch."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparkdl
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FeedClosedError, FeedTimeoutError, NodeFailedError
from sparkdl.core.options import Feeding
from sparkdl.feed.reader.batches import Tail
from sparkdl.node.context import NodeContext
from sparkdl.storage.parquet.source import list_files
from tests.doubles.gates import Gate
from tests.doubles.labs import Lab, lab_of
from tests.doubles.map_funs import count_rows
from tests.doubles.meetings import STEP_S, Meetings, meet, parts, steps_by_epoch, train
from tests.doubles.nodes import SOON_S, launch

STILL_S = 1.0
"""After which a feed that stands still times out."""
LITTLE = 1 << 16
"""Bytes of feed memory that make feeders wait."""


little = lab_of("plain", 2, feeding=Feeding(memory_nbytes=LITTLE, disk_nbytes=0))
"""Two nodes that hold 64 KiB; the rest has to wait."""
roomy = lab_of("plain", 2, feeding=Feeding(memory_nbytes=LITTLE, disk_nbytes=1 << 28))
"""Two nodes that hold whatever they are fed: 64 KiB in memory, and the rest on disk."""


@pytest.fixture(scope="module")
def nodes(request: pytest.FixtureRequest) -> Lab:
    """One of the labs, which the test chooses by `indirect` parameters."""
    made: Lab = request.getfixturevalue(request.param)
    return made


def count(feed: str, ctx: NodeContext) -> list[int]:
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


def test_data_without_rows_are_the_drivers_error(roomy: Lab, feed: str, tmp_path: Path) -> None:
    roomy.begin(count, feed)
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "part.parquet")
    nothing: list[Any] = [[], iter([]), pa.table({"x": pa.array([], pa.int64())}), str(tmp_path)]
    for data in nothing:
        with pytest.raises(ConfigError, match="the data have no rows, so there is nothing to"):
            roomy.cluster.feed(data, feed=feed)
    assert roomy.cluster.feed([7], feed=feed).rows_used == 1, "it can be fed again"
    assert column(roomy.ended(feed), 1) == 7


def test_report_counts_all_rows_of_loops_that_were_left_early() -> None:
    def leave_early(args: None, ctx: NodeContext) -> list[list[int]]:
        loops = []
        for _ in range(3):
            batches = zip(range(2), ctx.batches(8, ["x"], shuffle=True), strict=False)
            loops.append([x for _, batch in batches for x in batch["x"].tolist()])
        return loops

    with launch(leave_early, nodes=1) as cluster:
        report = cluster.feed(parts(100), 1, "input", STEP_S)
        (loops,) = cluster.results(SOON_S)
    assert [len(loop) for loop in loops] == [16, 16, 16]
    assert len({str(loop) for loop in loops}) == 3
    assert (report.rows_used, report.rows_again, report.rows_unused) == (16, 32, 84)


def test_end_of_one_feed_does_not_cut_another(roomy: Lab, feed: str, tmp_path: Path) -> None:
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
    roomy.begin(leave_one, [feed, other, *gates])
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(roomy.cluster.feed, iter(rows), 1, feed)
        roomy.cluster.feed(itertools.repeat(1), feed=other)  # endless: returns as nobody wants it
        for gate in gates:
            gate.open()
        assert training.result(SOON_S).rows_fed == 500
    assert sum(roomy.ended(feed)) == 500


def test_what_cannot_be_fed_is_refused_before_a_row_is_sent(roomy: Lab, feed: str) -> None:
    roomy.begin(count, feed)
    for data, epochs, text in (
        ([1], 0, "epochs=0"),
        (1, 1, "not int"),
        (b"text", 1, "not bytes"),
        ("text", 1, "text: no Parquet file found"),
        ({"x": [1]}, 1, "not dict"),
        (iter([1]), 2, "a list_iterator can be read only once"),
    ):
        with pytest.raises(ConfigError, match=text):
            roomy.cluster.feed(data, epochs, feed)
    with pytest.raises(ConfigError, match="timeout_s=0"):
        roomy.cluster.feed([1], feed=feed, timeout_s=0)
    with pytest.raises(ConfigError, match=r"shuffle=True must be 'global' or None.*ctx.batches"):
        roomy.cluster.feed([1], 1, feed, shuffle=True)  # type: ignore[arg-type]
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


def test_results_of_inference_are_in_order_and_come_when_asked_for(roomy: Lab, feed: str) -> None:
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
            unused = cluster.feed(str(tmp_path), epochs=epochs).rows_unused
            assert unused == 100 * epochs, "of files"
    assert caplog.text.count("rows were not used: map_fun has returned") == 4
    assert "terminate() on worker:0, worker:1" in caplog.text


def test_misspelt_name_of_a_feed_is_told_with_both_names_and_is_an_error_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misspells(feed: str, ctx: NodeContext) -> int:
        return len(list(ctx.batches(10, feed=feed)))

    monkeypatch.setattr("sparkdl.driver.feeds.runner.STALL_S", 0.5)
    with launch(misspells, "validation", nodes=1) as cluster:
        assert cluster._controller.wait_for(
            lambda view: (0, "validation") in view.feeds, Deadline.after(SOON_S)
        ), "short timeouts begin when it is read"
        with pytest.raises(FeedTimeoutError, match="did you mean 'validations'"):
            cluster.feed(range(10), feed="validations", timeout_s=2 * STILL_S)
        with pytest.raises(
            NodeFailedError, match=r"UnfedError: feed 'validation' received no data on worker:0 bef"
        ):
            cluster.results(SOON_S)
        cluster.abort()
    told = "'validation' on worker:0. The driver has fed 'validations' to worker:0; did you mean"
    assert caplog.text.count(told) == 1
    assert "loops over another epoch" not in caplog.text


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
            sparkdl.errors.EndOfFeedError,
            match=r"ended after 2 epochs.*as another feed: cluster\.feed_async",
        ):
            roomy.ended(feed)
    assert roomy.cluster._controller.wait_for(
        lambda view: any(
            count.given.extra_epochs for (_, name), count in view.feeds.items() if name == feed
        ),
        Deadline.after(SOON_S),
    )
    assert f"feed {feed!r} has ended, but map_fun on worker:" in caplog.text


# files


def write(folder: Path, files: int = 4, rows: int = 250, width: int = 1, start: int = 0) -> Path:
    """Write files whose column "x" counts, with float32 `[width]` beside it; three row groups."""
    folder.mkdir(exist_ok=True)
    for file in range(files):
        first = start + file * rows
        filler = pa.array(np.zeros(rows * width, np.float32))
        table = pa.table(
            {
                "x": np.arange(first, first + rows),
                "wide": pa.FixedSizeListArray.from_arrays(filler, width),
            }
        )
        pq.write_table(table, folder / f"part-{file}.parquet", row_group_size=rows // 3 + 1)
    return folder


def read_epochs(args: tuple[str, int], ctx: NodeContext) -> list[list[int]]:
    """Read so many epochs of a feed; return column "x" of each."""
    feed, epochs = args
    batches = ctx.batches(16, ["x"], feed, even=True)
    return [[x for batch in batches for x in batch["x"].tolist()] for _ in range(epochs)]


def read_all(feed: str, ctx: NodeContext) -> list[int]:
    data, found = ctx.get_data_feed(qname_in=feed, input_mapping={"x": "x"}), []
    while not data.should_stop():
        found += [int(x) for x in data.next_batch(16).get("x", [])]
    return found


def each_once(results: list[list[list[int]]], rows: int) -> bool:
    """Whether in each epoch each row came to one node, once."""
    return all(
        Counter(x for node in epoch for x in node) == Counter(range(rows))
        for epoch in zip(*results, strict=True)
    )


@pytest.mark.parametrize("shuffle", ["global", None])
@pytest.mark.parametrize(("nodes", "passes"), [("roomy", 1), ("little", 3)], indirect=["nodes"])
def test_files_are_read_once_or_for_each_epoch_if_they_do_not_fit_each_row_once_an_epoch(
    nodes: Lab, feed: str, tmp_path: Path, passes: int, shuffle: Any
) -> None:
    folder = write(tmp_path / "data", rows=300, width=200)  # 1 MB
    nodes.begin(read_epochs, (feed, 3))
    report = nodes.cluster.feed(f"{folder}/*.parquet", 3, feed, shuffle=shuffle)
    assert (report.epochs, report.passes, report.rows_unused) == (3, passes, 0)
    assert report.rows_used == sum(report.rows.values()) == 3 * 1200
    results = nodes.ended(feed)
    assert each_once(results, 1200)
    first, *others = ({*epoch} for epoch in results[0])
    for other in others if shuffle else ():
        assert 30 < len(first & other) < 570, "half of the rows, in 32 blocks or more"


def test_vanished_file_is_an_error_that_names_node_and_file_and_ends_only_this_feed(
    roomy: Lab, feed: str, tmp_path: Path
) -> None:
    good, bad = write(tmp_path / "good"), write(tmp_path / "bad", start=5000)
    source = list_files(str(bad))
    (bad / "part-3.parquet").unlink()
    roomy.begin(read_all, feed)
    with pytest.raises(
        sparkdl.errors.ReadError, match=r"worker:1 could not read its share: .*part-3.parquet"
    ):
        roomy.cluster.feed(source, 2, feed)
    assert roomy.cluster.feed(good, 2, feed).epochs == 2
    fed = Counter(x for node in roomy.ended(feed) for x in node if x < 5000)
    assert fed == Counter([*range(1000)] * 2)


def test_nodes_share_their_own_files_evenly(little: Lab, tmp_path: Path) -> None:
    def read(path: str, ctx: NodeContext) -> list[list[list[int]]]:
        batches = ctx.batches(16, ["x"], feed=sparkdl.parquet(path), even=True)
        return [[batch["x"].tolist() for batch in batches] for _ in range(2)]

    folder = write(tmp_path / "data", files=3, rows=301, width=200)
    little.begin(read, f"{folder}/*.parquet")
    results = little.results()
    steps = [[len(epoch) for epoch in read] for read in results]
    assert steps[0] == steps[1]
    rows = [[[x for b in epoch for x in b] for epoch in read] for read in results]
    assert each_once(rows, 903)


def test_training_and_validation_are_two_sources_side_by_side_with_a_feed(
    little: Lab, feed: str, tmp_path: Path
) -> None:
    def both(args: list[str], ctx: NodeContext) -> list[int]:
        train = ctx.batches(16, feed=sparkdl.parquet(args[0]), shuffle=True)
        validation = ctx.batches(16, feed=sparkdl.parquet(args[1], ["x"]))
        rows = [0, 0, 0]
        for _epoch in range(3):
            rows[0] += sum(int(batch["x"].sum()) for batch in train)
            rows[1] += sum(int(batch["x"].sum()) for batch in validation)
        rows[2] = len(read_all(args[2], ctx))
        return rows

    train = str(write(tmp_path / "train", rows=300, width=200))
    validation = str(write(tmp_path / "validation", files=1))
    little.begin(both, [train, validation, feed])
    results = little.ended(feed)  # which ends neither source
    assert sum(rows[0] for rows in results) == 3 * sum(range(1200))
    assert sum(rows[1] for rows in results) == 3 * sum(range(250))


def test_steps_that_all_nodes_take_are_known_with_no_driver(little: Lab, tmp_path: Path) -> None:
    def full_steps(args: str, ctx: NodeContext) -> list[int]:
        batches = ctx.batches(16, feed=sparkdl.parquet(args), even=True, tail="drop")
        return [len(batch["x"]) for _ in range(2) for batch in batches]

    little.begin(full_steps, str(write(tmp_path / "data", files=1, rows=95)))
    assert little.results() == [[16] * 4] * 2


# nodes that train in step: steps that do not agree would hang them


TAILS: tuple[Tail, ...] = ("short", "pad", "drop")
SIZES = (1, 1000, 0)


def used_once(epochs: list[list[list[int]]], rows: int) -> bool:
    """Whether the steps of one epoch on all nodes used each of the first rows once.

    A node that had fewer rows than steps has used its last one again.
    """
    own = [[x for step in node for x in step] for node in epochs]
    return sorted(x for node in own for x in dict.fromkeys(node)) == list(range(rows))


def steps_of(results: list[Any]) -> list[list[int]]:
    return [[len(epoch) for epoch in node] for node in results]


@pytest.mark.parametrize(
    ("nodes", "tail"),
    [*(("little", tail) for tail in TAILS), ("roomy", "drop")],
    indirect=["nodes"],
)
def test_nodes_in_lockstep_use_each_row_once_an_epoch(nodes: Lab, feed: str, tail: Tail) -> None:
    count = sum(SIZES)
    with Meetings() as meetings:
        nodes.begin(train, {"port": meetings.port, "feed": feed, "tail": tail})
        report = nodes.cluster.feed(parts(*SIZES), 3, feed, STEP_S)
        results = nodes.ended(feed)
    has_room = nodes.cluster.spec.settings.feeding.disk_nbytes != 0
    assert report.epochs == 3
    assert report.rows_unused == 0
    assert report.rows_fed == 3 * count
    assert report.passes == (1 if has_room else 3)
    first, second = steps_of(results)
    assert first == second
    assert list(report.steps.values()) == [sum(first), sum(second)]
    if tail in ("short", "pad"):
        assert len(first) == 3
        for epoch in range(3):
            assert used_once([node[epoch] for node in results], count)
    else:
        every = [step for node in results for epoch in node for step in epoch]
        assert {len(step) for step in every} == {8}
        assert 8 * len(every) + report.rows_dropped == 3 * count
        for epoch in range(3):
            rows = Counter(x for node in results for step in node[epoch] for x in step)
            assert max(rows.values()) == 1


@pytest.mark.parametrize(("tail", "stop"), [("drop", [0, 3]), ("short", [2, 1])])
def test_terminate_of_all_ends_the_feed_and_the_cluster_is_fed_again(
    roomy: Lab, feed: str, stop: list[int], tail: Tail
) -> None:
    with Meetings() as meetings:
        roomy.begin(train, {"port": meetings.port, "feed": feed, "tail": tail, "stop_all": stop})
        roomy.cluster.feed(parts(100, 100), 1000, feed, STEP_S)
        report = roomy.cluster.feed(parts(50, 7), 2, feed, STEP_S)
        results = roomy.ended(feed)
    assert report.rows_unused == 0
    first, second = steps_of(results)
    assert first == second
    if tail == "short":
        for epoch in (-2, -1):
            assert used_once([node[epoch] for node in results], 57)


def alone(args: dict[str, Any], ctx: NodeContext) -> list[list[list[int]]]:
    """As `train`, but meeting nobody; `stop` is a node, an epoch and a step."""
    batches = ctx.batches(8, ["x"], args["feed"], even=True)
    return steps_by_epoch(batches, lambda *at: [ctx.rank, *at] == args.get("stop"))


def endless() -> Iterator[dict[str, int]]:
    for x in itertools.count():
        yield {"x": x}


def test_terminate_of_one_worker_ends_an_endless_feed_and_all_get_the_next(
    roomy: Lab, feed: str
) -> None:
    roomy.begin(alone, {"feed": feed, "stop": [1, 0, 2]})
    report = roomy.cluster.feed(endless(), 1, feed, STEP_S)
    assert report.epochs == 0
    again = roomy.cluster.feed(parts(50, 7, 39), 2, feed, STEP_S)
    results = roomy.ended(feed)
    assert again.rows_unused == 0
    stayed, left = results
    assert [len(steps) for steps in stayed[-2:]] == [len(steps) for steps in left[-2:]]
    for epoch in (-2, -1):
        assert used_once([node[epoch] for node in results], 96)


def slow_once(args: dict[str, Any], ctx: NodeContext) -> list[list[list[int]]]:
    """Wait in the first step until the test lets go, then train."""
    batches = ctx.batches(8, ["x"], args["feed"], even=True, tail=args["tail"])
    first = next(iter(batches))["x"]
    print(f"holding {len(first)} rows")
    if ctx.rank == 1:
        meet(args["held"])
    return train(args, ctx)


def test_feed_that_timed_out_names_node_and_step_and_is_fed_again(roomy: Lab, feed: str) -> None:
    with Meetings() as meetings, Meetings(2) as held:
        ports = {"port": meetings.port, "held": held.port}
        roomy.begin(slow_once, {**ports, "feed": feed, "tail": "short"})
        with pytest.raises(FeedTimeoutError) as caught:
            roomy.cluster.feed(parts(100, 33), 3, feed, STILL_S)
        meet(held.port)
        report = roomy.cluster.feed(parts(60, 5), 2, feed, STEP_S)
        results = roomy.ended(feed)
    story = str(caught.value)
    assert "made no progress for 1 s: worker:" in story
    assert "steps, and received" in story
    assert report.rows_unused == 0
    first, second = steps_of(results)
    assert first == second
    assert used_once([node[-1] for node in results], 65)
