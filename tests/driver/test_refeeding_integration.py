"""Nodes begin anew in the middle of their feeds, in whole clusters without Spark."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.errors import FeedClosedError
from sparkdl.node.context import NodeContext
from tests.doubles.gates import Gate
from tests.doubles.nodes import SOON_S, launch, processes


def read_all(args: dict[str, Any], ctx: NodeContext) -> list[int]:
    """Read the feed to its end; die in generation 0 after some rows, or meet the test in 1."""
    rows: list[int] = []
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        rows += feed.next_batch(10)
        if ctx.generation == 0 and ctx.rank == 1 and len(rows) >= args.get("dies_after", 1000):
            os.kill(os.getpid(), signal.SIGKILL)
    if ctx.generation == 1 and ctx.rank == 1 and "gate" in args:
        args["gate"].wait()
    return rows


def all_rows(results: list[Any]) -> list[int]:
    return sorted(row for rows in results for row in rows)


def kill(node: str) -> None:
    processes()[node].child.kill()


def test_call_under_way_goes_on_in_the_next_generation_behind_the_calls_before_it() -> None:
    with launch(read_all, {"dies_after": 90}, max_restarts=1) as cluster:
        assert cluster.feed(range(100)).rows_fed == 100
        report = cluster.feed(range(100, 300), epochs=2)
        assert (report.rows_fed, report.rows_used, report.epochs) == (400, 400, 2)
        assert report.rows_unused == 0
        assert cluster.feed(range(300, 310)).rows_fed == 10
        results = cluster.results(3 * SOON_S)
    assert all_rows(results) == sorted([*range(310), *range(100, 300)])


def test_rows_are_fed_again_when_no_call_is_under_way_and_the_end_waits_for_them(
    tmp_path: Path,
) -> None:
    """Also once nodes have been told of the end."""
    gate = Gate.at(tmp_path / "gate")
    with launch(read_all, {"gate": gate}, max_restarts=2) as cluster, ThreadPoolExecutor(1) as pool:
        for start in range(0, 100, 20):
            cluster.feed(range(start, start + 20))
        kill("worker:1")
        cluster.feed(range(100, 110))
        results = pool.submit(cluster.results)
        with gate.wait_until_reached():
            kill("worker:1")
        assert all_rows(results.result(3 * SOON_S)) == list(range(110))


def test_an_iterator_whose_rows_are_missing_is_told_of() -> None:
    with launch(read_all, {"dies_after": 30}, max_restarts=1) as cluster:
        with pytest.raises(FeedClosedError, match=r"a range_iterator, whose rows .* cannot be fed"):
            cluster.feed(iter(range(100)))
        assert cluster.feed(range(10)).rows_fed == 10, "the others go on"
        assert all_rows(cluster.results(3 * SOON_S)) == list(range(10))
