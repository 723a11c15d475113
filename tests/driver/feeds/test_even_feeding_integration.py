"""Nodes that train in step, on a whole cluster: steps that do not agree would hang it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from sparkdl.core.errors import FeedTimeoutError
from sparkdl.core.options import Roles
from sparkdl.driver.feeds.report import FeedReport
from sparkdl.feed.reader.batches import Tail
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Lab
from tests.doubles.map_funs import count_rows
from tests.doubles.meetings import STEP_S, Meetings, meet, parts, train
from tests.doubles.nodes import SOON_S, launch

TAILS: tuple[Tail, ...] = ("short", "pad", "drop")
STILL_S = 1.0
DEEP = pytest.mark.deep
"""After which a feed that stands still times out."""
SIZES = {"skewed": (1, 1000, 0), "one": (300,), "many": (5,) * 50}
whatever_the_budget = pytest.mark.parametrize("nodes", ["roomy", "little", "disk"], indirect=True)


def used_once(epochs: list[list[list[int]]], rows: int) -> bool:
    """Whether the steps of one epoch on all nodes used each of the first rows once.

    A node that had fewer rows than steps has used its last one again.
    """
    own = [[x for step in node for x in step] for node in epochs]
    return sorted(x for node in own for x in dict.fromkeys(node)) == list(range(rows))


def steps_of(results: list[Any]) -> list[list[int]]:
    return [[len(epoch) for epoch in node] for node in results]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    "sizes", ["skewed", *(pytest.param(n, marks=DEEP) for n in ("one", "many"))]
)
@whatever_the_budget
def test_nodes_that_meet_at_every_step_use_each_row_once_an_epoch(
    nodes: Lab, feed: str, tail: Tail, sizes: str
) -> None:
    count = sum(SIZES[sizes])
    with Meetings() as meetings:
        nodes.begin(train, {"port": meetings.port, "feed": feed, "tail": tail})
        report = nodes.cluster.feed(parts(*SIZES[sizes]), 3, feed, STEP_S)
        results = nodes.ended(feed)
    has_room = nodes.cluster.spec.settings.feeding.disk_nbytes != 0
    assert report.epochs == 3
    assert report.rows_unused == 0
    assert report.rows_fed == 3 * count
    assert report.passes == 1 if has_room else report.passes == 3 or count <= 300
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
    assert len(every) + report.rows_dropped == 3 * count
    assert all(
        len({x for node in results for step in node[epoch] for x in step})
        == sum(len(step) for node in results for step in node[epoch])
        for epoch in range(3)
    )


@pytest.mark.parametrize("stop", [[0, 3], [2, 1]], ids=["first epoch", "from the log"])
@pytest.mark.parametrize("tail", ["short", "drop"])
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
    epochs: list[list[list[int]]] = []
    batches = ctx.batches(8, ["x"], args["feed"], even=True, tail=args["tail"])
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


@pytest.mark.parametrize("tail", ["short", "drop"])
def test_terminate_of_one_worker_ends_an_endless_feed_and_all_take_part_in_the_next(
    disk: Lab, feed: str, tail: Tail
) -> None:
    disk.begin(alone, {"feed": feed, "tail": tail, "stop": [1, 0, 2]})
    report = disk.cluster.feed(endless(), 1, feed, STEP_S)
    assert report.epochs == 0
    again = disk.cluster.feed(parts(50, 7, 39), 2, feed, STEP_S)
    results = disk.ended(feed)
    assert again.rows_unused == 0
    stayed, left = results
    assert [len(steps) for steps in stayed[-2:]] == [len(steps) for steps in left[-2:]]
    if tail == "short":
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


def test_feed_that_timed_out_names_node_and_step_and_the_cluster_is_fed_again(
    roomy: Lab, feed: str
) -> None:
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


def test_evaluator_is_fed_beside_the_workers() -> None:
    with launch(count_rows, roles=Roles(evaluator=True)) as cluster:
        evaluating = cluster.feed_async(range(10), role="evaluator", timeout_s=STEP_S)
        assert evaluating.result(SOON_S).rows == {"evaluator:0": 10}
        assert cluster.feed(range(100), timeout_s=STEP_S).rows == {"worker:0": 100}
        assert cluster.results(SOON_S)[0] == [100, sum(range(100))]
