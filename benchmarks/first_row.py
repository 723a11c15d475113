"""How long after the call of `cluster.feed` has a node its first batch, on a warm session?

Feeds the same small data from each kind of source in turn, round after round, to two nodes that
run, and drains the DataFrame as plain Spark does. `README.md` says how to read it.
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

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS, PARTS = 4000, 4
_DEADLINE_S = 60.0


def first_batches(args: argparse.Namespace, ctx: Any) -> list[float]:
    """Be the user's function on a node: return when each epoch's first batch came."""
    return [min([time.time() for _ in ctx.batches(64)]) for _ in range(args.epochs)]


def drained(data: DataFrame) -> float:
    """Return the seconds until a Spark task has the first batch of a `mapInArrow`."""

    def first(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"at": [min([time.time() for _ in batches])]})

    called = time.time()
    return min(row.at for row in data.mapInArrow(first, "at double").collect()) - called


def measure(folder: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds until the first batch by source, one for each round."""
    table = pa.table({"x": np.random.default_rng(0).random(ROWS), "y": np.arange(ROWS)})
    step = ROWS // PARTS
    for part in range(PARTS):
        pq.write_table(table.slice(part * step, step), Path(folder) / f"{part}.parquet")
    spark = (
        SparkSession.builder.master("local-cluster[2,2,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    cached = spark.read.parquet(folder).repartition(PARTS).cache()
    cached.count()
    sources = {
        "table of the driver": [table.slice(0, ROWS // 2), table.slice(ROWS // 2)],
        "Parquet files": f"{folder}/*.parquet",
        "DataFrame that nodes read": spark.read.parquet(folder),
        "DataFrame through Spark": cached,
    }
    called: list[tuple[str, float]] = []
    drains: list[float] = []
    args = argparse.Namespace(epochs=(rounds + 1) * len(sources))
    with sparkdl.launch(spark, first_batches, args, nodes=2, framework="plain") as cluster:
        for _ in range(rounds + 1):
            for name, source in sources.items():
                called.append((name, time.time()))
                cluster.feed(source)
            drains.append(drained(cached))
        came = map(min, zip(*cluster.results(_DEADLINE_S), strict=True))
    spark.stop()
    found: dict[str, list[float]] = {}
    for (name, at), first in zip(called, came, strict=True):
        found.setdefault(name, []).append(first - at)
    found["mapInArrow of Spark alone"] = drains
    return {name: seconds[1:] for name, seconds in found.items()}  # the first round warms up


def main() -> None:
    """Print medians with the smallest and largest value."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-first-row-") as folder:
        found = measure(folder, parsed.rounds)
    print("| source | first row, s: median (min-max) |\n| --- | --- |")
    for name, seconds in found.items():
        print(f"| {name} | {median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f}) |")


if __name__ == "__main__":
    main()
