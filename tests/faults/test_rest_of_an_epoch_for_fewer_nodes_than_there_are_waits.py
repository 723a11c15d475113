"""Nodes die behind a checkpoint that leaves fewer rows of an epoch than there are nodes.

A synchronous step needs a row on each of them: so the rows wait for the next epoch.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.control.rows import EpochRows, FeedCoverage
from sparkdl.node.context import NodeContext
from tests.doubles.ledger import Plan, lost_and_doubled, table, train
from tests.doubles.nodes import SOON_S, launch

NODES, STEPS = 3, 4
ROWS = NODES * 8 * STEPS + 1


def test_after_deaths_at_each_epochs_end_rows_of_the_last_are_unused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 dies when the checkpoint of the last full step of an epoch is complete."""
    faults = ((0, 0, STEPS + 1, "SIGKILL"), (1, 0, 2 * STEPS + 1, "os._exit"))
    options: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "max_restarts": 2}
    with launch(train, Plan(every=STEPS, faults=faults), NODES, **options) as cluster:
        report = cluster.feed(table(ROWS, 2), epochs=2)
        results = cluster.results(3 * SOON_S)
        assert cluster.world.generation == len(faults)
    assert report.rows_fed == 2 * ROWS
    assert lost_and_doubled(results, ROWS, epochs=2) == (2, 0)
    # The call may have returned before the second death: then there is nobody else to tell.
    assert report.rows_unused == 2 or "2 rows of an earlier call" in caplog.text


def weights(batch: Any) -> Any:
    return batch.get("sample_weight", np.ones(len(batch["row"])))


def iterations(args: Any, ctx: NodeContext) -> dict[str, list[list[int]]]:
    """Read feeds one after the other; return what each iteration has brought."""
    read: dict[str, list[list[int]]] = {}
    for feed, tail in args:
        batches = ctx.batches(2, feed=feed, even=True, tail=tail)
        read[feed] = []
        while batches.reader.peek_batch() is not None:
            rows: list[int] = []
            for batch in batches:
                rows += batch["row"][weights(batch) > 0].tolist()
            read[feed].append(rows)
    return read


def test_rest_comes_first_in_the_next_epoch_with_every_tail() -> None:
    """A later run finds the checkpoint: of the first epoch, or of the last, it leaves this."""
    rows, left = 12, {"one": (7,), "two": (3, 8)}
    feeds = [
        (f"{number} of {which} {tail}", tail)
        for tail in ("short", "pad", "drop")
        for number in left
        for which in ("first", "last")
    ]
    coverage, told, wanted = {}, {}, {}
    for feed, _ in feeds:
        rest = left[feed.split()[0]]
        cuts = [-1, *rest, rows]
        ranges = tuple((a + 1, b) for a, b in pairwise(cuts) if a + 1 < b)
        epochs: EpochRows = {0: {0: ranges}}
        if "last" in feed:
            epochs = {0: {0: ((0, rows),)}, 1: {0: ranges}}
        coverage[feed] = FeedCoverage(0, {0: epochs})
        wanted[feed] = rest
    with launch(iterations, feeds, NODES) as cluster:
        cluster._controller.checkpoints.coverage.restore(coverage)
        for feed, _ in feeds:
            told[feed] = cluster.feed(table(rows), epochs=2, feed=feed)
            cluster.end_feeds(feed)
        results = cluster.results(3 * SOON_S)
    for feed, tail in feeds:
        parts = [row for result in results for each in result[feed] for row in each[:1]]
        read = Counter(row for result in results for each in result[feed] for row in each)
        report, rest = told[feed], wanted[feed]
        assert report.rows_fed == 2 * rows
        assert report.rows_used + report.rows_unused + report.rows_dropped == 2 * rows
        assert report.rows_used == report.rows_covered + read.total()
        if "last" in feed:
            assert (read.total(), report.rows_unused) == (0, len(rest))
            continue
        assert all(len(result[feed]) == 1 for result in results), "both are one iteration"
        both = Counter([*range(rows), *rest])
        if tail in ("short", "pad"):
            assert read == both
        else:  # but for rows that fill no step of 2 on every node
            assert (read - both, read.total()) == (Counter(), 6)
        if tail != "drop":
            assert set(rest) <= set(parts), "they come first"
