"""Does a feed slow down, or take more memory, when there is more to feed than memory?

Spark makes rows as it feeds them, to two nodes that may hold `--memory` megabytes each; nothing is
read from files. `README.md` says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from pyspark.sql import SparkSession
from runner import ROOT, markdown, thousands

import sparkdl

NODES = 2
ROW = 3072
"""Bytes of a row, an image of 32 by 32 pixels: Spark hands on bytes faster than arrays."""
BATCH = 1024
"""Rows of a record batch."""


def train(feeds: int, ctx: Any) -> int:
    """Be the user's function on a node: take all batches of each feed."""
    return sum(len(batch["x"]) for _ in range(feeds) for batch in ctx.batches(256))


def rows_of(batches: int, _: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield a partition's rows, for `DataFrame.mapInArrow`."""
    batch = pa.record_batch({"x": pa.array([np.random.default_rng(0).bytes(ROW)] * BATCH)})
    for _number in range(batches):
        yield batch


def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Take a partition's rows as a feeder does, and do nothing with them."""
    yield pa.record_batch({"rows": [sum(len(batch) for batch in batches)]})


BEFORE = psutil.virtual_memory().shared


class Shared:
    """The most shared memory of this machine while it runs, in bytes above what there was before.

    Segments of rows are shared memory: those that agents hold, and those on their way.
    """

    def __init__(self) -> None:
        self.most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Shared:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            self.most = max(self.most, psutil.virtual_memory().shared - BEFORE)


def main() -> None:
    """Feed volumes in turn, and print their throughput and the most memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", default="1,3,30", help="with commas")
    parser.add_argument("--memory", type=int, default=256, help="MB of rows that a node may hold")
    parser.add_argument("--partitions-gb", type=int, default=8, help="partitions of a gigabyte")
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "volume.json")
    parsed = parser.parse_args()
    volumes = [float(each) for each in parsed.gigabytes.split(",")]
    spark = (
        SparkSession.builder.master("local-cluster[2,2,1024]")
        .appName("bench-volume")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    each = int(1e9 / parsed.partitions_gb) // (BATCH * ROW)

    def made(volume: float) -> tuple[Any, int]:
        """Return a DataFrame of so many gigabytes, and its rows."""
        partitions = max(1, round(volume * parsed.partitions_gb))
        ids = spark.range(partitions, numPartitions=partitions)
        return ids.mapInArrow(partial(rows_of, each), "x binary"), partitions * each * BATCH

    def drained(volume: float) -> float:
        """Return the MB/s at which Spark brings these rows to its workers."""
        rows, number = made(volume)
        start = time.monotonic()
        counted = rows.mapInArrow(count, "rows long").collect()
        assert sum(row["rows"] for row in counted) == number
        return number * ROW / 1e6 / (time.monotonic() - start)

    drained(volumes[0])  # warms up
    limit, found, lines = drained(volumes[0]), [], []
    with sparkdl.launch(
        *(spark, train, len(volumes) + 1, NODES),
        framework="plain",
        feeding=sparkdl.Feeding(memory_nbytes=parsed.memory << 20),
    ) as cluster:
        for number, volume in enumerate([volumes[0], *volumes]):
            rows, fed = made(volume)
            start = time.monotonic()
            with Shared() as shared:
                report = cluster.feed(rows)
            took = time.monotonic() - start
            assert report.rows_used == fed
            speed = fed * ROW / 1e6 / took
            if number:  # the first one connects, and warms up
                found.append({"gigabytes": volume, "seconds": took, "shared": shared.most})
                row = [f"{volume:g}", thousands(fed), f"{took:.1f}", thousands(speed)]
                lines.append([*row, f"{speed / limit:.2f}", thousands(shared.most / (1 << 20))])
        head = ["GB", "rows", "s", "MB/s", "of drain", "shared memory at most, MB"]
        print(markdown(head, lines))
    spark.stop()
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    document = {"cores": os.cpu_count(), "memory": parsed.memory, "drain": limit, "feeds": found}
    parsed.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
