"""Sparse vectors of many columns on their way from Spark to two nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml.feature import CountVectorizerModel
from pyspark.sql import SparkSession

import sparkdl
from sparkdl.node.context import NodeContext

WIDTH, ROWS, BATCH, VALUES, APART = 84_224, 800, 32, 100, 841
DENSE = BATCH * WIDTH * 8  # bytes of a batch; all rows would take 540 MB


def peak_nbytes(starts: bool = False) -> int:
    """Return the most memory that this process has had since the call with `starts`."""
    if starts:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def read(_: None, ctx: NodeContext) -> list[tuple[int, int]]:
    """Read an epoch of arrays and one of sparse rows; return how many rows, and their memory."""
    found = []
    for kind, sparse in (("ndarray", ()), ("csr_array", ("words",))):
        rows, before = 0, peak_nbytes(starts=True)
        for batch in ctx.batches(BATCH, ["id", "words"], sparse=sparse):
            words: Any = batch["words"]
            assert (type(words).__name__, str(words.dtype)) == (kind, "float64")
            assert words.shape == (len(batch["id"]), WIDTH)
            assert words.sum() == VALUES * len(batch["id"])
            columns = words.indices if sparse else np.nonzero(words)[1]
            places = (batch["id"][:, None] * 7 + APART * np.arange(VALUES)) % WIDTH
            assert (columns.reshape(-1, VALUES) == np.sort(places)).all()
            rows += len(batch["id"])
        found.append((rows, peak_nbytes() - before))
    return found


@pytest.mark.smoke
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")
def test_wide_vectors_reach_two_nodes_within_the_memory_of_some_batches(
    spark_local: SparkSession,
) -> None:
    word = f"concat('w', (id * 7 + k * {APART}) % {WIDTH})"
    text = f"transform(sequence(0, {VALUES - 1}), k -> {word}) as text"
    vocabulary = [f"w{number}" for number in range(WIDTH)]
    counts = CountVectorizerModel.from_vocabulary(vocabulary, "text", "words")
    frame = counts.transform(spark_local.range(ROWS, numPartitions=2).selectExpr("id", text))
    with sparkdl.launch(spark_local, read, None, nodes=2) as cluster:
        cluster.feed(frame.select("id", "words"), epochs=2)
        results = cluster.results(100)
    for epoch, batches in enumerate((3, 0)):
        rows, peaks = zip(*(result[epoch] for result in results), strict=True)
        assert sum(rows) == ROWS
        # Besides the batches, what a process takes at its first ones.
        assert max(peaks) < batches * DENSE + (8 << 20), peaks
