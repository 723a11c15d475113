"""sparkdl: `cluster.feed` of a DataFrame or of files, `ctx.batches` in two nodes.

`nodes` is the DataFrame of the files, which the nodes read themselves.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict
from functools import partial
from typing import Any

from feeding import BATCH_ROWS, Touch, cpu_s, drain, feed_session, options, write_epochs
from harness import NODES, claim_stdout, mark, wait_for_marks, write
from processes import MemoryWatch

READERS = {"dataframe": "spark", "nodes": "nodes", "parquet": "auto"}
_DEADLINE_S = 60.0


def train(args: argparse.Namespace, ctx: Any) -> list[dict[str, Any]]:
    """Be the user's function on a node."""
    touch = Touch()
    records = []
    mark(args.folder)
    if args.has_cold:
        for batch in ctx.batches(BATCH_ROWS, feed="cold"):
            touch(batch)
        records.append(touch.record())
    for _ in range(args.epochs):
        for batch in ctx.batches(BATCH_ROWS):
            touch(batch)
        records.append(touch.record())
    return records


def moment() -> dict[str, float]:
    """Return the time and the CPU time so far."""
    return {"at": time.time(), "cpu_s": cpu_s()}


def main() -> None:
    """Feed, and write a line for each epoch."""
    parser = options(__doc__)
    parser.add_argument("--source", choices=["dataframe", "nodes", "parquet"], default="dataframe")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="let a node hold a tenth of what it receives in all epochs, and watch its memory",
    )
    parsed = parser.parse_args()
    budget = parsed.nbytes * parsed.epochs // NODES // 10 if parsed.memory else None
    lines = claim_stdout()
    import sparkdl

    with (
        feed_session(slots=2, partitions=parsed.files) as spark,
        tempfile.TemporaryDirectory(prefix="bench-feed-") as folder,
    ):
        data = spark.read.parquet(parsed.path)
        drain(data)
        args = argparse.Namespace(folder=folder, epochs=parsed.epochs, has_cold=not parsed.memory)
        with sparkdl.launch(
            spark,
            train,
            args,
            nodes=NODES,
            framework="plain",
            feeding=sparkdl.Feeding(memory_nbytes=budget),
        ) as cluster:
            wait_for_marks(folder, _DEADLINE_S)
            source = f"{parsed.path}/*.parquet" if parsed.source == "parquet" else data
            feed = partial(cluster.feed, source, reader=READERS[parsed.source])
            if parsed.memory:
                with MemoryWatch() as watch:
                    feed(epochs=parsed.epochs)
                seen = {key: list(value.values()) for key, value in asdict(watch.memory).items()}
                write(lines, {"event": "memory", "budget": budget} | seen)
            else:
                starts = [moment()]
                feed(feed="cold")
                starts.append(moment())
                feed(epochs=parsed.epochs)
                results = cluster.results(_DEADLINE_S)
                colds, warms = [r[:1] for r in results], [r[1:] for r in results]
                write_epochs(lines, parsed, starts[0], colds, "cold")
                write_epochs(lines, parsed, starts[1], warms)


if __name__ == "__main__":
    main()
