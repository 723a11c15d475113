"""What does TLS cost a feed? The same rows to the same nodes, with and without, in one run.

Two clusters of two local nodes are up at the same time, one with TLS and one without, and are fed
in turn. Rows go through sockets: feeders would hand over descriptors on one machine, which no
network and so no TLS has a part in, so that is turned off here. With `--hosts` both are fed by
Spark on three hosts made of Linux namespaces (root is needed). `README.md` says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from runner import ROOT, Figure, markdown, ratio, thousands

import sparkdl
from sparkdl.control.descriptors import FdSender

NODES = 2
WIDTH = 784
PARTITIONS = 4
SCHEMA = pa.schema([("x", pa.list_(pa.float32()))])
NAMES = {False: "without TLS", True: "with TLS"}
DEADLINE_S = 900.0


def train(rounds: int, ctx: Any) -> int:
    """Be the user's function on a node: take all batches of each feed."""
    rows = 0
    for _ in range(rounds):
        rows += sum(len(batch["x"]) for batch in ctx.batches(256))
    return rows


def partitions(megabytes: int, number: int) -> list[pa.Table]:
    """Return so many tables of rows of 784 floats."""
    rows = megabytes * 1_000_000 // number // (4 * WIDTH)
    values = np.random.default_rng(0).random((rows, WIDTH), np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), WIDTH)
    return [pa.table({"x": column})] * number


def rows_of(megabytes: int, _: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield a partition's rows, for `DataFrame.mapInArrow`: nothing is read from files."""
    (table,) = partitions(megabytes, 1)
    yield from table.cast(SCHEMA).to_batches(max_chunksize=1024)


def on_hosts(arguments: Sequence[str], json_at: Path) -> None:
    """Run this program on the first of three hosts, with Spark's workers on the others."""
    from tests.hosts.bed import SHARED, hosts, why_not

    if reason := why_not():
        raise SystemExit(f"no hosts can be made here: {reason}")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    with (
        tempfile.TemporaryDirectory(prefix="bench-tls-", ignore_cleanup_errors=True) as scratch,
        hosts(Path(scratch), "h0", "h1", "h2") as bed,
    ):
        master = bed.start_spark("h0", {"h1": 4, "h2": 4})
        shared = ("--master", master, "--json", str(SHARED / "tls.json"))
        mine = (sys.executable, __file__, *arguments, *shared)
        driver = bed["h0"].run(*mine)
        driver.process.wait(DEADLINE_S)
        print(driver.output.read_text())
        if driver.process.returncode:
            raise SystemExit(driver.process.returncode)
        json_at.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(bed.folder / "shared" / "tls.json", json_at)


def main() -> None:
    """Feed in turn, print medians and their ratio, and write every value."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9, help="feeds of each that count")
    parser.add_argument("--megabytes", type=int, default=512, help="of the rows of one feed")
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "tls.json")
    parser.add_argument("--hosts", action="store_true", help="feed by Spark on three hosts")
    parser.add_argument("--master", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.hosts and not parsed.master:
        on_hosts(sys.argv[1:], parsed.json)
        return
    data: Any
    if parsed.master:
        from pyspark.sql import SparkSession

        spark = (
            SparkSession.builder.master(parsed.master)
            .appName("bench-tls")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )
        make = partial(rows_of, parsed.megabytes // PARTITIONS)
        data = spark.range(PARTITIONS, numPartitions=PARTITIONS).mapInArrow(make, "x array<float>")
        nbytes = parsed.megabytes * 1_000_000
    else:
        spark, data = None, partitions(parsed.megabytes, PARTITIONS)
        nbytes = sum(table.nbytes for table in data)
        FdSender.connect = classmethod(lambda *_: None)  # type: ignore[assignment, method-assign]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with ExitStack() as stack:
        clusters = {
            has_tls: stack.enter_context(
                sparkdl.launch(
                    *(spark, train, parsed.repeats + 1, NODES),
                    framework="plain",
                    executor="spark" if spark else "local",
                    feeding=sparkdl.Feeding(memory_nbytes=2 * nbytes),
                    startup=sparkdl.Startup(placement="detached" if spark else "auto", tls=has_tls),
                )
            )
            for has_tls in NAMES
        }
        for number in range(parsed.repeats + 1):
            for has_tls in sorted(NAMES, reverse=bool(number % 2)):
                start = time.monotonic()
                clusters[has_tls].feed(data)
                took = time.monotonic() - start
                print(f"round {number}: {NAMES[has_tls]}: {took:.2f} s", file=sys.stderr)
                if number:  # round 0 connects, and warms up
                    seconds[has_tls].append(took)
    speeds = {
        NAMES[has_tls]: Figure.of(nbytes / 1e6 / took for took in took_s)
        for has_tls, took_s in seconds.items()
    }
    lines = [[name, figure and figure.show(thousands)] for name, figure in speeds.items()]
    print(markdown(["feed through sockets: median (min-max)", "MB/s"], lines))
    share = ratio(speeds[NAMES[True]], speeds[NAMES[False]])
    print(f"\nwith TLS / without = {share:.2f}")
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    document = {"cores": os.cpu_count(), "nbytes": nbytes, "ratio": share}
    runs = {NAMES[has_tls]: took_s for has_tls, took_s in seconds.items()}
    parsed.json.write_text(json.dumps({**document, "seconds": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
