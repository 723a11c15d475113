"""The limit of later epochs: a plain loop over the same record batches, in memory, in each node.

They are Arrow streams in anonymous memory files, mapped anew in each epoch and cut into the same
batches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from feeding import BATCH_ROWS, Touch, be_node, options, side_by_side, write_epochs
from harness import NODES, claim_stdout


def segments(path: str, node: int, rows: int) -> list[int]:
    """Return descriptors of memory files with a node's share, so many rows in each."""
    descriptors = []
    for file in sorted(Path(path).glob("*.parquet"))[node::NODES]:
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
    """Map each memory file anew, and return its record batch."""
    for descriptor in descriptors:
        with (
            pa.memory_map(f"/dev/fd/{descriptor}", "r") as source,
            pa.ipc.open_stream(source) as reader,
        ):
            yield reader.read_next_batch()


def cut(record_batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, np.ndarray]]:
    """Return all rows in batches of arrays: views, but where a batch spans two record batches."""
    rest: dict[str, np.ndarray] = {}
    for batch in record_batches:
        arrays = {
            name: to_numpy(column)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }
        start, there = 0, batch.num_rows
        if rest:
            start = min(there, BATCH_ROWS - rows_of(rest))
            rest = {name: np.concatenate([rest[name], arrays[name][:start]]) for name in arrays}
            if rows_of(rest) < BATCH_ROWS:
                continue
            yield rest
            rest = {}
        while there - start >= BATCH_ROWS:
            yield {name: array[start : start + BATCH_ROWS] for name, array in arrays.items()}
            start += BATCH_ROWS
        if start < there:
            rest = {name: array[start:] for name, array in arrays.items()}
    if rest:
        yield rest


def to_numpy(column: pa.Array) -> np.ndarray:
    """Return a column as an array: a view, but of bytes."""
    if pa.types.is_list(column.type):
        return column.flatten().to_numpy().reshape(len(column), -1)
    return column.to_numpy(zero_copy_only=False)


def rows_of(arrays: dict[str, np.ndarray]) -> int:
    """Return how many rows the arrays have."""
    return len(next(iter(arrays.values())))


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--segment-rows", type=int, default=10_000 // NODES)
    parser.add_argument("--node", type=int)
    parsed = parser.parse_args()
    if parsed.node is None:
        lines = claim_stdout()
        write_epochs(lines, parsed, *side_by_side(__file__, sys.argv[1:]))
    else:
        descriptors = segments(parsed.path, parsed.node, parsed.segment_rows)
        touch = Touch()

        def epoch() -> dict[str, Any]:
            """Touch everything once."""
            for batch in cut(stored(descriptors)):
                touch(batch)
            return touch.record()

        be_node(epoch, parsed.epochs)
