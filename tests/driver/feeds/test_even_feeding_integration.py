"""Nodes that train in step, on a whole cluster: steps that do not agree would hang it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from sparkdl.core.errors import FeedTimeoutError, NodeFailedError
from sparkdl.driver.feeds.report import FeedReport
from sparkdl.feed.reader.batches import Tail
from sparkdl.node.context import NodeContext
from tests.doubles.map_funs import count_rows
from tests.doubles.meetings import STEP_S, WIDE, Meetings, meet, parts, train
from tests.doubles.nodes import SOON_S, launch

LITTLE = 1 << 16
"""Bytes of feed memory that make feeders wait."""


def used_once(epochs: list[list[list[int]]], rows: int) -> bool:
    """Whether the steps of one epoch on all nodes used each of the first rows once.

    A node that had fewer rows than steps has used its last one again.
    """
    own = [[x for step in node for x in step] for node in epochs]
    return sorted(x for node in own for x in dict.fromkeys(node)) == list(range(rows))


def steps_of(results: list[Any]) -> list[list[int]]:
    return [[len(epoch) for epoch in node] for node in results]


BUDGETS = {
    "roomy": {"feed_memory": 1 << 26},
    "little": {"feed_memory": LITTLE, "feed_disk": 0},
    "disk": {"feed_memory": LITTLE, "feed_disk": 1 << 28},
}
SIZES = {
    "skewed": (1, 1000, 0),
    "one": (300,),
    "many": (5,) * 200,
}


@pytest.mark.parametrize("tail", ["short", "pad", "drop", "carry"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("sizes", SIZES)
def test_nodes_that_meet_at_every_step_use_each_row_once_an_epoch(
    tail: Tail, budget: str, sizes: str
) -> None:
    count = sum(SIZES[sizes])
    with Meetings() as meetings:
        args = {"port": meetings.port, "tail": tail}
        with launch(train, args, **BUDGETS[budget]) as cluster:
            report = cluster.feed(parts(*SIZES[sizes]), epochs=3, timeout_s=STEP_S)
            results = cluster.results(SOON_S)
    assert report.epochs == 3
    assert report.rows_unused == 0 or tail == "carry"
    assert report.rows_fed == 3 * count
    assert report.passes == (3 if budget == "little" and count > 300 else report.passes)
    assert budget == "little" or report.passes == 1
    first, second = steps_of(results)
    assert first == second
    assert list(report.steps.values()) == [sum(first), sum(second)]
    if tail in ("short", "pad"):
        assert len(first) == 3
        for epoch in range(3):
            assert used_once([node[epoch] for node in results], count)
    _check_full_batches(tail, results, report, count)


def _check_full_batches(tail: Tail, results: list[Any], report: FeedReport, count: int) -> None:
    if tail in ("short", "pad"):
        return
    every = [x for node in results for epoch in node for step in epoch for x in step]
    assert all(len(step) == 8 for node in results for epoch in node for step in epoch)
    assert max(Counter(every).values()) <= 3
    if tail == "drop":
        assert len(every) + report.rows_dropped == 3 * count
        assert all(
            len({x for node in results for step in node[epoch] for x in step})
            == sum(len(step) for node in results for step in node[epoch])
            for epoch in range(3)
        )
    else:
        assert len(every) + report.rows_unused == 3 * count


@pytest.mark.parametrize("stop", [[0, 3], [2, 1]], ids=["first epoch", "from the log"])
@pytest.mark.parametrize("tail", ["short", "carry"])
def test_terminate_of_all_ends_the_feed_and_the_cluster_is_fed_again(
    stop: list[int], tail: Tail
) -> None:
    with Meetings() as meetings:
        args = {"port": meetings.port, "tail": tail, "stop_all": stop}
        with launch(train, args, feed_memory=1 << 26) as cluster:
            cluster.feed(parts(100, 100), epochs=1000, timeout_s=STEP_S)
            report = cluster.feed(parts(50, 7), epochs=2, timeout_s=STEP_S)
            results = cluster.results(SOON_S)
    assert report.rows_unused == 0 or tail == "carry"
    first, second = steps_of(results)
    assert first == second
    if tail == "short":
        for epoch in (-2, -1):
            assert used_once([node[epoch] for node in results], 57)


def alone(args: dict[str, Any], ctx: NodeContext) -> list[list[list[int]]]:
    """As `train`, but meeting nobody; `stop` is a node, an epoch and a step."""
    epochs: list[list[list[int]]] = []
    batches = ctx.batches(8, ["x"], even=True, tail=args["tail"])
    for epoch in itertools.count():
        steps, has_left = [], False
        for step, batch in enumerate(batches):
            steps.append(batch["x"].tolist())
            if [ctx.rank, epoch, step] == args.get("stop"):
                batches.reader.terminate()
                has_left = True
        if not steps and not has_left and batches.reader.peek_batch() is None:
            return epochs
        epochs.append(steps)
    return epochs


def endless() -> Iterator[dict[str, int]]:
    for x in itertools.count():
        yield {"x": x}


@pytest.mark.parametrize("tail", ["short", "carry", "drop"])
def test_terminate_of_one_worker_ends_an_endless_feed_and_all_take_part_in_the_next(
    tail: Tail,
) -> None:
    with launch(alone, {"tail": tail, "stop": [1, 0, 2]}, feed_memory=LITTLE) as cluster:
        report = cluster.feed(endless(), timeout_s=STEP_S)
        assert report.epochs == 0
        again = cluster.feed(parts(50, 7, 39), epochs=2, timeout_s=STEP_S)
        results = cluster.results(SOON_S)
    assert again.rows_unused == 0 or tail == "carry"
    stayed, left = results
    assert [len(steps) for steps in stayed[-2:]] == [len(steps) for steps in left[-2:]]
    if tail == "short":
        for epoch in (-2, -1):
            assert used_once([node[epoch] for node in results], 96)


@pytest.mark.parametrize("tail", ["short", "pad", "drop", "carry"])
def test_feed_that_broke_within_an_epoch_leaves_nodes_in_step(tail: Tail) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        for x in range(2000):
            yield {"x": x, "f": bytes(8 * WIDE)}
        raise ValueError("in the data")

    with Meetings() as meetings:
        args = {"port": meetings.port, "tail": tail}
        with launch(train, args, feed_memory=LITTLE) as cluster:
            with pytest.raises(ValueError, match="in the data"):
                cluster.feed(rows(), timeout_s=STEP_S)
            report = cluster.feed(parts(50, 7, 40), epochs=2, timeout_s=STEP_S)
            results = cluster.results(SOON_S)
    assert report.rows_unused == 0 or tail == "carry"
    first, second = steps_of(results)
    assert first == second
    if tail in ("short", "pad"):
        assert used_once([node[-1] for node in results], 97)


def slow_once(args: dict[str, Any], ctx: NodeContext) -> list[list[list[int]]]:
    """Wait in the first step until the test lets go, then train."""
    batches = ctx.batches(8, ["x"], even=True, tail=args["tail"])
    first = next(iter(batches))["x"]
    print(f"holding {len(first)} rows")
    if ctx.rank == 1:
        meet(args["held"])
    return train(args, ctx)


def test_feed_that_timed_out_names_node_and_step_and_the_cluster_is_fed_again() -> None:
    with Meetings() as meetings, Meetings(2) as held:
        args = {"port": meetings.port, "held": held.port, "tail": "short"}
        with launch(slow_once, args) as cluster:
            with pytest.raises(FeedTimeoutError) as caught:
                cluster.feed(parts(100, 33), epochs=3, timeout_s=2.0)
            meet(held.port)
            report = cluster.feed(parts(60, 5), epochs=2, timeout_s=STEP_S)
            results = cluster.results(SOON_S)
    story = str(caught.value)
    assert "made no progress for 2 s: worker:" in story
    assert "steps, and received" in story
    assert "| holding 8 rows" in story
    assert report.rows_unused == 0
    first, second = steps_of(results)
    assert first == second
    assert used_once([node[-1] for node in results], 65)


def test_feed_that_timed_out_between_two_epochs_from_the_log_leaves_nodes_in_step() -> None:
    """One node has not left an epoch yet when the other has begun the next one."""
    with Meetings() as meetings, Meetings(2) as held:
        args = {"port": meetings.port, "held": held.port, "tail": "short", "pause": [2, 8]}
        with launch(train, args) as cluster:
            with pytest.raises(FeedTimeoutError):
                cluster.feed(parts(100, 33), epochs=50, timeout_s=2.0)
            meet(held.port)
            cluster.feed(parts(60, 5), epochs=2, timeout_s=STEP_S)
            results = cluster.results(SOON_S)
    first, second = steps_of(results)
    assert first == second
    assert len(first) == 4 + 2
    assert used_once([node[-1] for node in results], 65)


def late_and_slow(args: dict[str, Any], ctx: NodeContext) -> list[list[list[int]]]:
    """As `train`, but one node begins when its memory has long been full, and idles at steps."""
    if ctx.rank == 1:
        meet(args["held"])
    return train(args, ctx)


@pytest.mark.parametrize("tail", ["short", "carry"])
def test_worker_that_begins_late_and_a_straggling_partition_leave_nodes_in_step(
    tail: Tail,
) -> None:
    with Meetings() as meetings, Meetings(2) as held:

        def rows() -> Iterator[dict[str, Any]]:
            for x in range(3000):
                if x == 2000:  # others are read meanwhile
                    meet(held.port)
                yield {"x": x, "f": bytes(8 * WIDE)}

        args = {"port": meetings.port, "held": held.port, "tail": tail}
        with launch(late_and_slow, args, feed_memory=1 << 24) as cluster:
            report = cluster.feed(rows(), timeout_s=STEP_S)
            results = cluster.results(SOON_S)
    assert report.rows_fed == 3000
    first, second = steps_of(results)
    assert first == second
    assert used_once([node[0] for node in results], 3000) or tail == "carry"


@pytest.mark.parametrize("budget", BUDGETS)
def test_plain_feed_has_every_row_once_an_epoch_whatever_the_budget(budget: str) -> None:
    def read(args: None, ctx: NodeContext) -> list[int]:
        feed, rows = ctx.get_data_feed(), []
        while not feed.should_stop():
            rows += [row["x"] for row in feed.next_batch(10)]
        return rows

    with launch(read, **BUDGETS[budget]) as cluster:
        report = cluster.feed(parts(1, 1000, 0), epochs=3, timeout_s=STEP_S)
        results = cluster.results(SOON_S)
    assert (report.rows_fed, report.rows_used) == (3003, 3003)
    assert report.passes == 1 or budget == "little"
    assert Counter(x for rows in results for x in rows) == Counter(dict.fromkeys(range(1001), 3))


def two_feeds(args: dict[str, Any], ctx: NodeContext) -> list[list[int]]:
    """Train and evaluate by turns."""
    training = ctx.batches(8, ["x"], even=True)
    evaluation = ctx.batches(8, ["x"], feed="eval", even=True)
    return [
        [sum(len(batch["x"]) for batch in each) for each in (training, evaluation)]
        for _ in range(3)
    ]


@pytest.mark.parametrize("budget", BUDGETS)
def test_evaluation_is_fed_beside_training_whatever_the_budget(budget: str) -> None:
    with launch(two_feeds, {}, **BUDGETS[budget]) as cluster:
        evaluating = cluster.feed_async(parts(301, 3), epochs=3, name="eval", timeout_s=STEP_S)
        training = cluster.feed(parts(1, 700), epochs=3, timeout_s=STEP_S)
        evaluated = evaluating.result(SOON_S)
        results = cluster.results(SOON_S)
    assert (training.rows_fed, evaluated.rows_fed) == (2103, 912)
    # A node that has room when the other has none gets more rows; the other repeats one of its own.
    for k, rows, report in ((0, 701, training), (1, 304, evaluated)):
        counts = [sum(node[epoch][k] for node in results) for epoch in range(3)]
        assert min(counts) >= rows
        assert sum(counts) == 3 * rows + report.rows_padded


def test_evaluator_is_fed_beside_the_workers() -> None:
    def read(args: None, ctx: NodeContext) -> list[int]:
        counts = count_rows(args, ctx)
        print(f"{ctx.job_name} read {counts[0]} rows")
        return counts

    with launch(read, nodes=3, eval_node=True) as cluster:
        evaluating = cluster.feed_async(range(10), to="evaluator", name="input", timeout_s=STEP_S)
        assert evaluating.result(SOON_S).rows == {"evaluator:0": 10}
        assert set(cluster.feed(range(100), timeout_s=STEP_S).rows.values()) == {50}
        assert [r[0] for r in cluster.results(SOON_S)[:2]] == [50, 50]


def test_error_of_map_fun_within_a_feed_is_what_the_feed_raises() -> None:
    def fail(args: None, ctx: NodeContext) -> None:
        for step, _ in enumerate(ctx.batches(8, even=True)):
            if ctx.rank == 1 and step == 3:
                raise RuntimeError("out of luck")

    cluster = launch(fail, feed_memory=LITTLE)
    try:
        with pytest.raises(NodeFailedError, match="out of luck"):
            cluster.feed(endless(), timeout_s=STEP_S)
    finally:
        cluster.abort()
