"""What the contestants of the feed do alike: options, the session, touching bytes, epochs.

numpy is imported at the top, Spark and pyarrow are not: this is imported inside nodes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from harness import NODES, session, write
from processes import cpu_s

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

BATCH_ROWS = 256
_MEMORY_MIB = 1536


class Touch:
    """Has every byte of every batch read: numbers are copied to memory that is there already."""

    def __init__(self) -> None:
        self.rows = 0
        self.nbytes = 0
        self.first_at = 0.0
        self._room: dict[str, np.ndarray] = {}

    def __call__(self, batch: Mapping[str, np.ndarray]) -> None:
        """Touch one batch; of objects the lengths are added up."""
        if not self.rows:
            self.first_at = time.time()
        for name, array in batch.items():
            if array.dtype == object:
                self.nbytes += sum(map(len, array))
                continue
            room = self._room.get(name)
            if room is None or room.dtype != array.dtype or room.shape[1:] != array.shape[1:]:
                room = np.empty((BATCH_ROWS, *array.shape[1:]), array.dtype)
                self._room[name] = room
            np.copyto(room[: len(array)], array)
            self.nbytes += array.nbytes
        self.rows += len(array)

    def record(self) -> dict[str, Any]:
        """Return the rows and bytes since the last record, the times, and the CPU time so far."""
        record = {"at": time.time(), "rows": self.rows, "nbytes": self.nbytes, "cpu_s": cpu_s()}
        record["first_at"] = self.first_at
        self.rows = self.nbytes = 0
        return record


def options(description: str | None) -> argparse.ArgumentParser:
    """Return the parser with the options that every contestant of the feed has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", required=True, help="folder of Parquet files")
    parser.add_argument("--files", type=int, required=True, help="how many files")
    parser.add_argument("--rows", type=int, required=True, help="rows in all files")
    parser.add_argument("--nbytes", type=int, required=True, help="their size as Arrow arrays")
    parser.add_argument("--epochs", type=int, default=4)
    return parser


@contextmanager
def feed_session(slots: int, partitions: int, executors: int = NODES) -> Iterator[SparkSession]:
    """Start a warm session that reads a folder of as many files as `partitions`, and stop it."""
    settings = {
        "spark.sql.files.minPartitionNum": str(partitions),  # or the slots would decide
        "spark.python.unix.domain.socket.enabled": "true",
    }
    with session("bench-feed", slots, settings, executors, _MEMORY_MIB) as spark:
        yield spark


def drain(data: DataFrame) -> list[Any]:
    """Have Spark hand all rows to Python, and drop them there; return what each partition had."""
    return list(data.mapInArrow(count, "rows long, most long, first_at double").collect())


def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Count and drop: rows, rows of the largest batch, and when the first batch came."""
    import pyarrow as pa

    rows, first_at = [], 0.0
    for batch in batches:
        first_at = first_at or time.time()
        rows.append(batch.num_rows)
    found = {"rows": [sum(rows)], "most": [max(rows, default=0)], "first_at": [first_at]}
    yield pa.RecordBatch.from_pydict(found)


def write_epochs(
    lines: TextIO,
    parsed: argparse.Namespace,
    start: dict[str, Any],
    nodes: list[list[dict[str, Any]]],
    event: str = "epoch",
) -> None:
    """Write a line for each epoch: from the end of the one before to the end of the last node.

    Args:
        start: When the first epoch began: `at` and `cpu_s`.
        nodes: What `Touch.record` returned, for each node and epoch.

    Raises:
        ValueError: if an epoch had not all the rows.
    """
    before = start
    for number, records in enumerate(zip(*nodes, strict=True)):
        last = max(records, key=lambda record: record["at"])
        rows = sum(record["rows"] for record in records)
        if rows != parsed.rows:
            raise ValueError(f"epoch {number} has {rows} rows, not {parsed.rows}")
        epoch = {
            "event": event,
            "number": number,
            "seconds": last["at"] - before["at"],
            "cpu_s": last["cpu_s"] - before["cpu_s"],
            "rows": rows,
            "nbytes": sum(record["nbytes"] for record in records),
            "first_s": min(record.get("first_at", 0.0) for record in records) - before["at"],
        }
        write(lines, epoch)
        before = last


def side_by_side(program: str, arguments: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """Run `program` once for each node, all at once; return the start and the nodes' records.

    Each is given `--node`, and runs `be_node`.
    """
    nodes = [
        subprocess.Popen(
            [sys.executable, program, *arguments, "--node", str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(NODES)
    ]
    for node in nodes:
        assert node.stdout
        if not node.stdout.readline():
            raise RuntimeError("a process ended before it was ready")
    start = {"at": time.time(), "cpu_s": cpu_s()}
    for node in nodes:
        assert node.stdin
        node.stdin.write("\n")
        node.stdin.flush()
    records = []
    for node in nodes:
        assert node.stdout
        records.append(json.loads(node.stdout.readline() or "[]"))
    for node in nodes:
        assert node.stdin
        node.stdin.close()  # so that nobody's CPU time is lost with its process before that
        node.wait()
    return start, records


def be_node(epoch: Callable[[], dict[str, Any]], epochs: int) -> None:
    """Say that this process is ready, wait for the start, run the epochs, and say what came."""
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps([epoch() for _ in range(epochs)]), flush=True)
    sys.stdin.readline()
