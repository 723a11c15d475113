"""Nodes begin anew in the middle of their feeds: each row once an epoch, none lost or twice.

The model is the rows themselves: a checkpoint saves which ones each node has used.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparkdl
from sparkdl.control.rows import CallShape, EpochRows, FeedCoverage
from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding
from sparkdl.driver.feeds.report import FeedReport
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import SOON_S, launch

ROWS = 400


def table(start: int, stop: int) -> pa.Table:
    return pa.table({"value": range(start, stop)})


def train(args: dict[str, Any], ctx: NodeContext) -> dict[str, Any]:
    """Use rows, save after every so manieth step, and die where the test says."""
    last, name = ctx.last_checkpoint, f"rows-{ctx.rank}"
    step = last.step if last else 0
    model: list[int] = json.loads(Path(last, name).read_text()) if last else []
    restored = len(model)
    own = args.get("own")
    source = sparkdl.parquet(own) if own else "input"
    batches = ctx.batches(feed=source, even=True, **args["options"])
    is_over = False
    while not is_over:
        is_over = True
        for batch in batches:
            is_over = False
            weights = batch.get("sample_weight", np.ones(len(batch["value"])))
            model += batch["value"][weights > 0].tolist()
            step += 1
            if step % args["every"] == 0:
                with ctx.checkpoint(step) as folder:
                    (folder / name).write_text(json.dumps(model))
            if args["deaths"].get(ctx.generation) == (ctx.rank, step):
                os.kill(os.getpid(), signal.SIGKILL)
        if own:  # files have no last epoch
            is_over = sum(ctx.all_gather(len(model))) == 2 * ROWS
    return {"model": model, "restored": restored, "generation": ctx.generation}


@pytest.mark.deep  # of rows that are not shuffled: tests/faults/test_processes.py
@pytest.mark.parametrize("source", ["rows", "files", "own"])
def test_final_model_has_each_row_once_an_epoch_if_nodes_die(source: str, tmp_path: Path) -> None:
    """A node dies in the first epoch, another one in the second, which reads its log again."""
    data: Any = list(range(ROWS))
    if source != "rows":
        (tmp_path / "data").mkdir()
        files = tmp_path / "data" / "all.parquet"
        pq.write_table(table(0, ROWS), files, row_group_size=64)
        data = sparkdl.parquet(str(files))
    args = {
        "options": {"batch_size": 9, "tail": "pad", "shuffle": True if source == "files" else 50},
        "every": 3,
        "deaths": {0: (1, 8), 1: (0, 32)},
        "own": source == "own" and str(files),
    }
    folder = str(tmp_path / "checkpoints")
    fed = Feeding(fed=source != "own")
    with launch(train, args, max_restarts=2, checkpoint_dir=folder, feeding=fed) as cluster:
        if source != "own":
            report = cluster.feed(data, epochs=2)
            assert (report.rows_fed, report.rows_used) == (2 * ROWS, 2 * ROWS)
            assert report.rows_covered > 0
        results = cluster.results(3 * SOON_S)
    learnt = Counter(row for result in results for row in result["model"])
    assert learnt == dict.fromkeys(range(ROWS), 2)
    assert all(result["restored"] and result["generation"] == 2 for result in results)


def test_micro_batches_since_the_checkpoint_are_told_of_and_the_one_under_way_comes_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = {"options": {"batch_size": 2}, "every": 4, "deaths": {0: (0, 10)}}
    with launch(train, args, 1, checkpoint_dir=str(tmp_path), max_restarts=1) as cluster:
        for start in range(0, 24, 6):  # the last is fed again
            cluster._feeds.feed_micro_batch("input", table(start, start + 6))
        (result,) = cluster.results(3 * SOON_S)
    assert result["model"] == [*range(16), *range(18, 24)], (
        "the checkpoint of step 8 covers two and two steps"
    )
    (told,) = [r.message for r in caplog.records if "The model loses" in r.message]
    assert "loses the 2 rows in 1 micro-batches" in told


def iterations(args: list[str], ctx: NodeContext) -> dict[str, list[list[int]]]:
    """Read feeds one after the other; return what each iteration has brought."""
    read: dict[str, list[list[int]]] = {}
    for feed in args:
        batches = ctx.batches(2, ["value"], feed=feed, even=True)
        read[feed] = []
        while batches.reader.peek_batch() is not None:
            read[feed].append([x for batch in batches for x in batch["value"].tolist()])
    return read


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
