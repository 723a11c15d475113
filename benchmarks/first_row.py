"""How long after the call of `cluster.feed` has a node its first batch, and when does it return?

Feeds the same rows from each kind of source in turn, round after round, to two nodes that run, and
drains the DataFrame as plain Spark does, on one warm session. `README.md` says how to read it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import sparkdl
from sparkdl.core.jobs import feeding_jobs
from sparkdl.feed.transfer.feeder import BATCH_NBYTES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PARTS = 8
_DEADLINE_S = 60.0
Times = tuple[float, float]
"""Seconds from the call to the first batch, and to the return."""


def first_batches(args: argparse.Namespace, ctx: Any) -> list[float]:
    """Be the user's function on a node: return when each epoch's first batch came."""
    return [min([time.time() for _ in ctx.batches(64)]) for _ in range(args.epochs)]


def drained(data: DataFrame) -> Times:
    """Have Spark hand all rows to Python, and drop them there."""

    def first(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"at": [min([time.time() for _ in batches])]})

    called = time.time()
    rows = data.mapInArrow(first, "at double").collect()
    return min(row.at for row in rows) - called, time.time() - called


def measure(folder: str, given: argparse.Namespace) -> dict[str, list[Times]]:
    """Return the times by source, one for each round."""
    values = np.random.default_rng(0).random(given.rows * given.width, np.float32)
    x = pa.FixedSizeListArray.from_arrays(values, given.width).cast(pa.list_(pa.float32()))
    table, step = pa.table({"x": x}), given.rows // PARTS
    for part in range(PARTS):
        pq.write_table(table.slice(part * step, step), Path(folder) / f"{part}.parquet")
    spark = (
        SparkSession.builder.master("local-cluster[2,2,1536]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.sql.files.minPartitionNum", PARTS)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    frame = spark.read.parquet(folder)
    sources: dict[str, tuple[Any, str]] = {
        "table of the driver": ([table.slice(i * step, step) for i in range(PARTS)], "auto"),
        "Parquet files": (f"{folder}/*.parquet", "auto"),
        "DataFrame that nodes read": (frame, "nodes"),
        "DataFrame through Spark": (frame, "spark"),
    }
    called: list[tuple[str, float, float]] = []
    drains: dict[str, list[Times]] = {}
    args = argparse.Namespace(epochs=(given.rounds + 1) * len(sources))
    with sparkdl.launch(spark, first_batches, args, nodes=2, framework="plain") as cluster:
        for _ in range(given.rounds + 1):
            for name, (source, reader) in sources.items():
                at = time.time()
                cluster.feed(source, reader=reader)
                called.append((name, at, time.time() - at))
            drains.setdefault("mapInArrow of Spark alone", []).append(drained(frame))
            with feeding_jobs(spark, BATCH_NBYTES):
                drains.setdefault("the same in a feed's batches", []).append(drained(frame))
        came = map(min, zip(*cluster.results(_DEADLINE_S), strict=True))
    spark.stop()
    found: dict[str, list[Times]] = {}
    for (name, at, took_s), first in zip(called, came, strict=True):
        found.setdefault(name, []).append((first - at, took_s))
    return {name: times[1:] for name, times in {**found, **drains}.items()}  # without the first


def main() -> None:
    """Print medians with the smallest and largest value."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--width", type=int, default=1, help="float32 values of a row")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-first-row-") as folder:
        found = measure(folder, given)
    print("| source | first row, s: median (min-max) | whole call, s |\n| --- | --- | --- |")
    for name, times in found.items():
        columns = [f"{median(s):.3f} ({min(s):.3f}-{max(s):.3f})" for s in zip(*times, strict=True)]
        print(f"| {name} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
