"""What does a timeline cost? Rows/s of a feed with one and without, and the time of a span.

Two local nodes read Parquet files in small batches and do nothing else, so that there are as many
spans as there can be. `README.md` says how to read it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import sparkdl
from sparkdl.core import trace


def read(args: int, ctx: Any) -> tuple[int, float]:
    """Read all epochs but the first, which comes as fast as it is received; return rows and s."""
    rows, since_s = 0, 0.0
    while ctx.has_epoch():
        if not rows:
            since_s = time.perf_counter()
        for step, batch in enumerate(ctx.batches(args)):
            rows += len(batch["x"]) * bool(since_s)
            ctx.report(step)
    return rows, time.perf_counter() - since_s


def rows_per_s(files: str, batch: int, epochs: int, timeline: str | None) -> float:
    """Return how many rows a second a node reads, the mean of two."""
    cluster = sparkdl.launch(
        *(None, read, batch, 2),
        framework="plain",
        executor="local",
        observe=sparkdl.Observe(timeline=timeline),
    )
    with cluster:
        cluster.feed(sparkdl.parquet(files), epochs=epochs)
        return sum(rows / took_s for rows, took_s in cluster.results()) / 2


def span_us(count: int = 200_000) -> float:
    """Return how long it takes to enter and leave a span, in microseconds."""
    since_s = time.perf_counter()
    for number in range(count):
        with trace.span("user", "step", None, step=number):
            pass
    return (time.perf_counter() - since_s) / count * 1e6


def main() -> None:
    """Measure in turn, and print medians with the smallest and largest value."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batches", default="64,1024")
    given = parser.parse_args()
    off_us = span_us()
    pump = trace.start(lambda spans, dropped, threads: None, 0.5)
    print(f"a span: {off_us:.2f} µs without a timeline, {span_us():.2f} µs with one")
    trace.stop(pump)
    with tempfile.TemporaryDirectory() as folder:
        table = pa.table({"x": np.arange(given.rows, dtype=np.float32)})
        files = f"{folder}/rows.parquet"
        pq.write_table(table, files, row_group_size=10_000)
        for batch in map(int, given.batches.split(",")):
            found: dict[str, list[float]] = {"without": [], "with": []}
            for _ in range(given.rounds):
                for name, path in (("without", None), ("with", str(Path(folder, "trace.json.gz")))):
                    found[name].append(rows_per_s(files, batch, given.epochs, path))
            print(f"batches of {batch}:")
            for name, each in found.items():
                spread = f"{min(each):,.0f}-{max(each):,.0f}"
                print(f"  {name:<8}{median(each):>12,.0f} rows/s ({spread})")
            without, traced = (median(each) for each in found.values())
            more_us = batch * 1e6 * (1 / traced - 1 / without)
            print(f"  ratio {traced / without:.3f}, a step takes {more_us:.1f} µs more", flush=True)


if __name__ == "__main__":
    main()
