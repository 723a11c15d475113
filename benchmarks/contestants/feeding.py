"""The contestants of `feed.py`: paths from rows to batches of numpy arrays, and their limits.

Nodes import this module: only numpy is imported at the top, not Spark or pyarrow.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from harness import (
    NODES,
    arguments,
    claim_stdout,
    cpu_s,
    mark,
    session,
    tf_cluster,
    wait_for_marks,
    write,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

BATCH_ROWS = 256
READERS = {"dataframe": "spark", "nodes": "nodes", "parquet": "auto"}
_DEADLINE_S = 60.0
_MEMORY_MIB = 1536

Records = list[dict[str, Any]]


class Touch:
    """Reads every byte of every batch: copies numbers to memory that is already allocated."""

    def __init__(self) -> None:
        self.rows = self.lengths = 0
        self.first_at = 0.0
        self._room: dict[str, np.ndarray] = {}

    def __call__(self, batch: Mapping[str, np.ndarray]) -> None:
        """Touch one batch; for objects, add up the lengths."""
        if not self.rows:
            self.first_at = time.time()
        for name, array in batch.items():
            if array.dtype == object:
                self.lengths += sum(map(len, array))
                continue
            room = self._room.get(name)
            if room is None or room.dtype != array.dtype or room.shape[1:] != array.shape[1:]:
                room = np.empty((BATCH_ROWS, *array.shape[1:]), array.dtype)
                self._room[name] = room
            np.copyto(room[: len(array)], array)
        self.rows += len(array)

    def record(self) -> dict[str, Any]:
        """Return the rows since the last record, the times, and the CPU time so far."""
        record = {**moment(), "rows": self.rows, "first_at": self.first_at}
        self.rows = 0
        return record


def moment() -> dict[str, Any]:
    return {"at": time.time(), "cpu_s": cpu_s()}


@contextmanager
def feed_session(slots: int, partitions: int) -> Iterator[SparkSession]:
    """Start a warm session that reads a folder of as many files as `partitions`, and stop it."""
    settings = {
        "spark.sql.files.minPartitionNum": str(partitions),  # otherwise the number of slots decides
        "spark.python.unix.domain.socket.enabled": "true",
    }
    with session("bench-feed", slots, settings, _MEMORY_MIB) as spark:
        yield spark


def drain(data: DataFrame) -> list[Any]:
    """Pass all rows from Spark to Python, and drop them; return the counts of each partition."""
    return list(data.mapInArrow(count, "rows long, most long, first_at double").collect())


def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Drop the rows; count them and those of the largest batch; record the first batch's time."""
    import pyarrow as pa

    rows, first_at = [], 0.0
    for batch in batches:
        first_at = first_at or time.time()
        rows.append(batch.num_rows)
    found = {"rows": [sum(rows)], "most": [max(rows, default=0)], "first_at": [first_at]}
    yield pa.RecordBatch.from_pydict(found)


def write_epochs(
    lines: TextIO,
    args: argparse.Namespace,
    start: dict[str, Any],
    nodes: list[Records],
    event: str = "epoch",
) -> None:
    """Write a line for each epoch, from the end of the previous one to the end of the last node.

    Args:
        start: When the first epoch began: a `moment`.
        nodes: What `Touch.record` returned, for each node and epoch.

    Raises:
        ValueError: if rows of an epoch are missing or additional.
    """
    before = start
    for number, records in enumerate(zip(*nodes, strict=True)):
        last = max(records, key=lambda record: record["at"])
        rows = sum(record["rows"] for record in records)
        if rows != args.rows:
            raise ValueError(f"epoch {number} has {rows} rows, not {args.rows}")
        took = {key: last[name] - before[name] for key, name in (("seconds", "at"), ("cpu_s",) * 2)}
        first_s = min(record.get("first_at", 0.0) for record in records) - before["at"]
        write(lines, event, rows=rows, first_s=first_s, **took)
        before = last


def spark_drain(args: argparse.Namespace, lines: TextIO) -> None:
    """The limit of a first epoch: Spark passes all rows to Python tasks, which drop them.

    It has one task slot on each executor, as many as the nodes of sparkdl leave to feeding.
    """
    with feed_session(slots=1, partitions=args.files) as spark:
        data = spark.read.parquet(args.path)
        drain(data)
        start = moment()
        parts = drain(data)
        first_at = min(part.first_at for part in parts)
        end = {**moment(), "rows": sum(part.rows for part in parts), "first_at": first_at}
        write_epochs(lines, args, start, [[end]])
        write(lines, "batches", rows=max(part.most for part in parts))


def map_fun(args: argparse.Namespace, ctx: Any) -> Records:
    touch, records = Touch(), []
    mark(args.folder)
    for feed in ["cold"] + ["input"] * args.epochs:
        for batch in ctx.batches(None if args.in_order else BATCH_ROWS, feed=feed):
            touch(batch)
        records.append(touch.record())
    return records


def by_sparkdl(args: argparse.Namespace, lines: TextIO) -> None:
    """`cluster.feed` of a DataFrame or of files, `ctx.batches` in two nodes."""
    import sparkdl

    with (
        feed_session(slots=2, partitions=args.files) as spark,
        tempfile.TemporaryDirectory(prefix="bench-feed-") as args.folder,
    ):
        data = spark.read.parquet(args.path)
        drain(data)
        size = BATCH_ROWS * NODES if args.in_order else None
        feeding = sparkdl.Feeding(global_batch_size=size)
        with sparkdl.launch(
            spark, map_fun, args, nodes=NODES, framework="plain", feeding=feeding
        ) as cluster:
            wait_for_marks(args.folder, _DEADLINE_S)
            source = f"{args.path}/*.parquet" if args.source == "parquet" else data
            order = {"reader": READERS[args.source], "shuffle": args.shuffle or None}
            feed = partial(cluster.feed, source, **order)
            starts = [moment()]
            feed(feed="cold")
            starts.append(moment())
            feed(epochs=args.epochs)
            results = cluster.results(_DEADLINE_S)
            write_epochs(lines, args, starts[0], [of[:1] for of in results], "cold")
            write_epochs(lines, args, starts[1], [of[1:] for of in results])


def tfos_map_fun(args: argparse.Namespace, ctx: Any) -> None:
    """Convert the rows of a batch to arrays, as training needs them."""
    touch, records = Touch(), []
    feed = ctx.get_data_feed(train_mode=True)
    mark(args.folder)
    while not feed.should_stop():
        if rows := feed.next_batch(BATCH_ROWS):
            columns = zip(args.dtypes.items(), zip(*rows, strict=True), strict=True)
            touch({name: np.array(column, dtype) for (name, dtype), column in columns})
            records.append({"at": time.time(), "rows": len(rows)})
    Path(args.records, uuid.uuid4().hex).write_text(json.dumps(records))


def by_tfos(args: argparse.Namespace, lines: TextIO) -> None:
    """`TFCluster.train` from a DataFrame's RDD, `DataFeed.next_batch` in two nodes."""
    names = {"bigint": "int64", "int": "int32", "float": "float32", "double": "float64"}
    with (
        feed_session(slots=1, partitions=args.files) as spark,
        tempfile.TemporaryDirectory(prefix="bench-feed-") as args.folder,
        tempfile.TemporaryDirectory(prefix="bench-feed-") as args.records,
    ):
        data = spark.read.parquet(args.path)
        rdd = data.rdd.map(list)
        rdd.count()
        kinds = {name: kind.removeprefix("array<").removesuffix(">") for name, kind in data.dtypes}
        args.dtypes = {name: names.get(kind, "object") for name, kind in kinds.items()}
        cluster = tf_cluster(spark, tfos_map_fun, args)
        wait_for_marks(args.folder, _DEADLINE_S)
        cluster.train(rdd, num_epochs=1)  # its tasks import TensorFlow: seconds for few rows
        start = moment()
        cluster.train(rdd, num_epochs=1)
        used_s = cpu_s()
        cluster.shutdown()
        epochs = []
        for path in Path(args.records).iterdir():
            mine = [one for one in json.loads(path.read_text()) if one["at"] > start["at"]]
            at = max((one["at"] for one in mine), default=start["at"])  # nodes record no end
            epochs.append([{"at": at, "rows": sum(one["rows"] for one in mine), "cpu_s": used_s}])
        write_epochs(lines, args, start, epochs)


def side_by_side(args: argparse.Namespace, lines: TextIO) -> None:
    """Run this program with `--node` once for each node, in parallel; write the epochs."""
    nodes = []
    for number in range(NODES):
        command = [sys.executable, __file__, json.dumps(vars(args) | {"node": number})]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        nodes.append(subprocess.Popen(command, text=True, **pipes))
    for node in nodes:
        if not node.stdout.readline():
            raise RuntimeError("a process ended before it was ready")
    start = moment()
    for node in nodes:
        node.stdin.write("\n")
        node.stdin.flush()
    records = [json.loads(node.stdout.readline() or "[]") for node in nodes]
    for node in nodes:
        node.stdin.close()  # if one exited earlier, its CPU time would be lost
        node.wait()
    write_epochs(lines, args, start, records)


def be_node(args: argparse.Namespace) -> None:
    """Run one of the processes: report that it is ready, wait for the start, report the epochs."""
    import pyarrow.dataset as ds

    files = sorted(map(str, Path(args.path).glob("*.parquet")))[args.node :: NODES]
    held = segments(files, args.segment_rows) if args.way == "bare" else []
    touch = Touch()

    def epoch() -> dict[str, Any]:
        batches = stored(held) if held else ds.dataset(files).to_batches()
        if held or args.touch:
            for batch in cut(batches):
                touch(batch)
            return touch.record()
        return {"rows": sum(batch.num_rows for batch in batches), **moment()}

    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps([epoch() for _ in range(args.epochs)]), flush=True)
    sys.stdin.readline()


def segments(files: list[str], rows: int) -> list[int]:
    """Return descriptors of memory files with a node's share, `segment_rows` in each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    descriptors = []
    for file in files:
        table = pq.read_table(file)
        for start in range(0, table.num_rows, rows):
            (batch,) = table.slice(start, rows).combine_chunks().to_batches()
            descriptor = os.memfd_create("bench-segment")
            with (
                pa.OSFile(f"/dev/fd/{descriptor}", "wb") as sink,
                pa.ipc.new_stream(sink, batch.schema) as out,
            ):
                out.write_batch(batch)
            descriptors.append(descriptor)
    return descriptors


def stored(descriptors: list[int]) -> Iterator[pa.RecordBatch]:
    """Map each memory file again, and return its record batch."""
    import pyarrow as pa

    for descriptor in descriptors:
        with (
            pa.memory_map(f"/dev/fd/{descriptor}", "r") as source,
            pa.ipc.open_stream(source) as reader,
        ):
            yield reader.read_next_batch()


def cut(record_batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, np.ndarray]]:
    """Return all rows in batches of arrays: views, unless a batch spans two record batches."""
    rest: dict[str, np.ndarray] = {}
    left = 0  # rows in `rest`
    for batch in record_batches:
        columns = zip(batch.schema.names, batch.columns, strict=True)
        arrays = {name: to_numpy(column) for name, column in columns}
        start, there = 0, batch.num_rows
        if left:
            start = min(there, BATCH_ROWS - left)
            rest = {name: np.concatenate([rest[name], arrays[name][:start]]) for name in arrays}
            left += start
            if left < BATCH_ROWS:
                continue
            yield rest
            left = 0
        while there - start >= BATCH_ROWS:
            yield {name: array[start : start + BATCH_ROWS] for name, array in arrays.items()}
            start += BATCH_ROWS
        if start < there:
            rest = {name: array[start:] for name, array in arrays.items()}
            left = there - start
    if left:
        yield rest


def to_numpy(column: pa.Array) -> np.ndarray:
    """Return a column as an array: a view, except for bytes."""
    import pyarrow as pa

    if pa.types.is_list(column.type):
        return column.flatten().to_numpy().reshape(len(column), -1)
    return column.to_numpy(zero_copy_only=False)


WAYS = {
    "drain": spark_drain,
    "sparkdl": by_sparkdl,
    "tfos": by_tfos,
    "bare": side_by_side,  # the limit of later epochs: a loop over the same batches in memory
    "scan": side_by_side,  # the limits of Parquet: each process scans its share of the files
}


def main() -> None:
    args = arguments(source="dataframe", touch=False, in_order=False, shuffle="")
    if "node" in args:
        be_node(args)
    else:
        WAYS[args.way](args, claim_stdout())


if __name__ == "__main__":
    main()
