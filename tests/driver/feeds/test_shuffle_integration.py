"""Rows that each epoch deals anew over all nodes: a training that needs it, and exact rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparkdl
from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Lab
from tests.doubles.nodes import SOON_S, launch
from tests.driver.feeds.test_parquet_integration import each_once, read_epochs, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CLASSES, DIMENSIONS, ROWS = 20, 16, 4000
EPOCHS = 3
Array = np.ndarray[Any, Any]


def samples(seed: int, rows: int) -> tuple[Array, Array]:
    """Return points around the centers of their classes, float64, and those, sorted by class."""
    centers = np.random.default_rng(0).normal(size=(CLASSES, DIMENSIONS))
    y = np.sort(np.arange(rows) % CLASSES)
    return centers[y] + np.random.default_rng(seed).normal(size=(rows, DIMENSIONS)), y


def softmax_regression(args: Any, ctx: NodeContext) -> float:
    """Train for an epoch, in step with the other node; return the accuracy on all classes."""
    weights, known, steps = np.zeros((DIMENSIONS + 1, CLASSES)), np.eye(CLASSES), list[Array]()

    def logits(x: Array) -> Array:
        return np.column_stack([x, np.ones(len(x))]) @ weights

    columns = [*(f"x{i}" for i in range(DIMENSIONS)), "y"]
    for batch in ctx.batches(50, columns, even=True, shuffle=400, seed=1):
        x = np.column_stack([batch[f"x{i}"] for i in range(DIMENSIONS)])
        scores = np.exp(logits(x) - logits(x).max(axis=1, keepdims=True))
        error = scores / scores.sum(axis=1, keepdims=True) - known[batch["y"]]
        gradient = np.column_stack([x, np.ones(len(x))]).T @ error / len(x)
        weights -= np.mean(ctx.all_gather(gradient), axis=0)
        steps.append(weights.copy())
    weights = np.mean(steps[len(steps) // 2 :], axis=0)  # the last batches do not decide alone
    x, y = samples(2, 1000)
    return float(np.mean(np.argmax(logits(x), axis=1) == y))


def test_training_on_rows_sorted_by_label_needs_them_dealt_over_all_nodes(tmp_path: Path) -> None:
    """By itself a node mixes rows that come one after the other: of two classes or three."""
    x, y = samples(1, ROWS)
    for file in range(40):
        rows = slice(100 * file, 100 * file + 100)
        columns = {f"x{i}": x[rows, i] for i in range(DIMENSIONS)} | {"y": y[rows]}
        columns["filler"] = pa.array([bytes(1000)] * 100)  # some 500 rows are read at a time
        pq.write_table(pa.table(columns), tmp_path / f"{file:02}.parquet")

    def accuracy(shuffle: str | None) -> float:
        with launch(softmax_regression, feeding=Feeding(memory_nbytes=8 << 20)) as cluster:
            cluster.feed(str(tmp_path), shuffle=shuffle)
            return float(min(cluster.results(SOON_S)))

    sorted_by_label, dealt = accuracy(None), accuracy("global")
    assert dealt > sorted_by_label + 0.03


@pytest.mark.parametrize(
    ("nodes", "passes"), [("roomy", 1), ("disk", 1), ("little", 3)], indirect=["nodes"]
)
def test_each_epoch_deals_each_row_once_and_reads_files_as_often_as_it_must(
    nodes: Lab, feed: str, tmp_path: Path, passes: int
) -> None:
    folder = write(tmp_path / "data", rows=300, width=200)  # 1 MB
    nodes.begin(read_epochs, (feed, EPOCHS))
    report = nodes.cluster.feed(folder, EPOCHS, feed, shuffle="global")
    assert (report.epochs, report.passes) == (EPOCHS, passes)
    assert report.rows_used == EPOCHS * 1200
    assert report.rows == {"worker:0": EPOCHS * 600, "worker:1": EPOCHS * 600}
    results = nodes.ended(feed)
    assert each_once(results, 1200)
    first, *others = ({*epoch} for epoch in results[0])
    for other in others:
        assert 30 < len(first & other) < 570, "half of the rows, in 32 blocks or more"


def test_rows_that_cross_spark_are_dealt_anew_without_crossing_it_again(
    spark_local: SparkSession,
) -> None:
    def read(args: Any, ctx: NodeContext) -> list[list[int]]:
        return [[x for b in ctx.batches(16) for x in b["id"].tolist()] for _ in range(EPOCHS)]

    data = spark_local.range(0, 1000, 1, 7)
    with sparkdl.launch(spark_local, read, nodes=2, framework="plain") as cluster:
        report = cluster.feed(data, EPOCHS, shuffle="global")
        results = cluster.results(60)
    assert (report.epochs, report.passes) == (EPOCHS, 1)
    assert each_once(results, 1000)
    orders = Counter(tuple(epoch) for epoch in results[0])
    assert max(orders.values()) == 1


def test_shuffle_that_there_is_not_says_which_there_are(roomy: Lab, feed: str) -> None:
    with pytest.raises(ConfigError, match=r"shuffle=True must be 'global' or None.*ctx.batches"):
        roomy.cluster.feed([1], 1, feed, shuffle=True)  # type: ignore[arg-type]
