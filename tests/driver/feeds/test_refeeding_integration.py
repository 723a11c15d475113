"""Nodes begin anew in the middle of their feeds, in whole clusters without Spark."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkdl.control.rows import CallShape, EpochRows, FeedCoverage
from sparkdl.core.errors import ConfigError
from sparkdl.driver.feeds.report import FeedReport
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


def table(start: int, stop: int) -> pa.Table:
    return pa.table({"value": range(start, stop)})


def kill(node: str) -> None:
    processes()[node].child.kill()


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


def train(args: dict[str, Any], ctx: NodeContext) -> list[int]:
    """Read the feed to its end; the model is the rows that were used, and some die on the way."""
    last = ctx.last_checkpoint
    rows = json.loads(Path(last, f"rows-{ctx.rank}").read_text()) if last else []
    step = last.step if last else 0
    batches = ctx.batches(args["batch"], ["value"], **args["how"])
    while batches.reader.peek_batch() is not None:
        for batch in batches:
            rows += batch["value"].tolist()
            step += 1
            if step % args["every"] == 0:
                with ctx.checkpoint(step) as folder:
                    (folder / f"rows-{ctx.rank}").write_text(json.dumps(rows))
            if ctx.rank == ctx.num_workers - 1 and step == args["dies_at"].get(ctx.generation):
                os.kill(os.getpid(), signal.SIGKILL)
    return rows


def test_call_that_a_checkpoint_covers_as_nodes_begin_anew_tells_of_its_rows(
    tmp_path: Path,
) -> None:
    args = {"batch": 8, "how": {}, "every": 4, "dies_at": {0: 4}}
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "max_restarts": 1, "nodes": 1}
    with launch(train, args, **options) as cluster:
        report = cluster.feed(range(32))
        assert cluster.feed(range(32, 40)).rows_used == 8
        assert cluster.results(3 * SOON_S) == [list(range(40))]
    assert (report.rows_fed, report.rows_used, report.rows_covered) == (32, 32, 32)


def iterations(args: list[str], ctx: NodeContext) -> dict[str, list[list[int]]]:
    """Read feeds one after the other; return what each iteration has brought."""
    read: dict[str, list[list[int]]] = {}
    for feed in args:
        batches = ctx.batches(2, ["value"], feed=feed, even=True)
        read[feed] = []
        while batches.reader.peek_batch() is not None:
            read[feed].append([x for batch in batches for x in batch["value"].tolist()])
    return read


def test_micro_batches_since_the_checkpoint_are_told_of_and_the_one_under_way_comes_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = {"batch": 2, "how": {"even": True}, "every": 4, "dies_at": {0: 10}}
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "max_restarts": 1}
    with launch(train, args, **options) as cluster:
        for start in range(0, 48, 12):  # the last is fed again
            cluster._feeds.feed_micro_batch("input", table(start, start + 12))
        rows = all_rows(cluster.results(3 * SOON_S))
    lost = sorted(set(range(48)) - set(rows))
    assert len(rows) == len(set(rows)), "none is doubled"
    assert set(lost) <= set(range(24, 36)), "the checkpoint of step 8 covers two and a third"
    (told,) = [r.message for r in caplog.records if "lost to the model" in r.message]
    assert f"they have had {len(lost)} rows in 1 micro-batches" in told


def test_a_later_run_feeds_what_the_checkpoint_does_not_cover(tmp_path: Path) -> None:
    """An epoch of which no row is left is not seen; one with too few rows for a step waits."""
    pq.write_table(table(0, 10), tmp_path / "a.parquet", row_group_size=3)
    pq.write_table(table(10, 20), tmp_path / "b.parquet", row_group_size=4)
    covered: dict[str, EpochRows] = {
        "none": {0: {0: ((0, 16),)}, 1: {0: ((3, 8),)}},
        "few": {0: {0: ((0, 7), (8, 12))}},
        "files": {1: {0: ((1, 4), (9, 12), (14, 20))}},
        "other": {0: {0: ((0, 1),), 3: ((0, 1),)}},
        "known": {0: {0: ((0, 1),)}},
    }
    shapes = {"known": CallShape(3)}
    with launch(iterations, ["none", "few", "files"]) as cluster:
        coverage = {
            f: FeedCoverage(1, {1: rows}, {1: shapes[f]} if f in shapes else {})
            for f, rows in covered.items()
        }
        cluster._controller.checkpoints.coverage.restore(coverage)
        for feed in covered:
            assert cluster.feed([1], feed=feed) == FeedReport(1), "the first call is covered"
        none = cluster.feed(table(0, 16), 2, "none")
        cluster.end_feeds("none")
        few = cluster.feed(table(0, 12), 2, "few")
        cluster.end_feeds("few")
        files = cluster.feed(str(tmp_path), 3, "files")
        with pytest.raises(ConfigError, match="1 partitions, and 4 when rows"):
            cluster.feed(table(0, 12), feed="other")
        with pytest.raises(ConfigError, match="1 partitions, and 3 when rows"):
            cluster.feed(table(0, 12), feed="known")
        first, second = cluster.results(SOON_S)
    both = {
        feed: [sorted([*a, *b]) for a, b in zip(first[feed], second[feed], strict=True)]
        for feed in first
    }
    assert both["none"] == [[0, 1, 2, *range(8, 16)]]
    assert both["few"] == [sorted([7, *range(12)])]
    assert both["files"] == [[0, *range(4, 9), 12, 13], list(range(20))]
    assert (none.rows_fed, none.rows_covered, none.epochs) == (32, 21, 2)
    assert (few.rows_fed, few.rows_covered) == (24, 11)
    assert (files.rows_fed, files.rows_covered, files.rows_used) == (60, 32, 60)
