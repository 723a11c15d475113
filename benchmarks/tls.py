"""What does TLS cost a feed? The same rows to the same nodes, with and without, in one run.

Two clusters of two local nodes are up at the same time, one with TLS and one without, and are fed
in turn. Rows go through sockets: feeders would hand over descriptors on one machine, which no
network and so no TLS has a part in, so that is turned off here. `README.md` says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from runner import ROOT, Figure, markdown, ratio, thousands

import sparkdl
from sparkdl.control.descriptors import FdSender

NODES = 2
WIDTH = 784
NAMES = {False: "without TLS", True: "with TLS"}


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


def main() -> None:
    """Feed in turn, print medians and their ratio, and write every value."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9, help="feeds of each that count")
    parser.add_argument("--megabytes", type=int, default=512, help="of the rows of one feed")
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "tls.json")
    parsed = parser.parse_args()
    data = partitions(parsed.megabytes, 4)
    nbytes = sum(table.nbytes for table in data)
    FdSender.connect = classmethod(lambda *_: None)  # type: ignore[assignment, method-assign]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with ExitStack() as stack:
        clusters = {
            has_tls: stack.enter_context(
                sparkdl.launch(
                    *(None, train, parsed.repeats + 1, NODES),
                    framework="plain",
                    executor="local",
                    show_progress=False,
                    feed_memory=2 * nbytes,
                    tls=has_tls,
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
