"""The rows of one process of a training, read from Parquet files.

Runs in: child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/common/datamodule.py
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from sparkdl.control.rows import Share
from sparkdl.core.errors import FeedTypeError
from sparkdl.ml.scoring.inputs import check_weights
from sparkdl.storage.parquet.read import read_share
from sparkdl.storage.parquet.source import ParquetSource, shuffled
from sparkdl.values.columns import concat, to_columns
from sparkdl.values.ndarrays import Array

Columns = dict[str, Array]
CHUNK_NBYTES = 256 * 1024 * 1024
"""Rows are shuffled within so many bytes of them; fewer are kept in memory for all epochs."""


@dataclass
class ParquetDataModule:
    """Reads as many rows in each process, and in as many batches, whatever the files are.

    Rows are shared out one by one. Where they cannot be shared out evenly, some processes read one
    of theirs twice in an epoch. The batches of an epoch differ by one row at most. Each batch is
    the columns as arrays, by name.

    Attributes:
        cur_shard, shard_count: rank and number of the processes.
        transform_fn: function of a batch.
        inmemory_cache_all: whether to keep all rows in memory.
    """

    train_source: ParquetSource
    val_source: ParquetSource | None = None
    cur_shard: int = 0
    shard_count: int = 1
    train_batch_size: int = 32
    val_batch_size: int = 32
    shuffle: bool = True
    random_seed: int | None = None
    transform_fn: Callable[[Any], Any] | None = None
    inmemory_cache_all: bool = False
    sample_weight_col: str | None = None

    def __enter__(self) -> ParquetDataModule:
        self._is_closed = threading.Event()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()

    def train_data(self) -> Iterator[Columns]:
        """Return the batches to train on, epoch after epoch, without an end."""
        seed = self.random_seed or 0
        batch_size = self.train_batch_size
        return self._batches(self.train_source, batch_size, seed if self.shuffle else None)

    def val_data(self) -> Iterator[Columns]:
        """Return the batches to validate with, likewise."""
        assert self.val_source is not None
        return self._batches(self.val_source, self.val_batch_size, None)

    def _batches(
        self, source: ParquetSource, batch_size: int, seed: int | None
    ) -> Iterator[Columns]:
        # One chunk is then all rows, which `_stream` keeps.
        chunk_nbytes = sys.maxsize if self.inmemory_cache_all else CHUNK_NBYTES
        share = own_rows(source, self.cur_shard, self.shard_count)
        rows = rows_each(source.num_rows, self.shard_count)
        sizes = batch_sizes(rows, batch_size)
        for batch in _stream(share, sizes, seed, chunk_nbytes):
            # Threads of the framework may still read when the training has ended.
            if self._is_closed.is_set():
                return
            found = transformed(batch, self.transform_fn) if self.transform_fn else batch
            if (weight := self.sample_weight_col) in found:
                check_weights(found[weight], weight)
            yield found


def rows_each(num_rows: int, processes: int) -> int:
    """Return how many rows each process reads in an epoch."""
    return -(-num_rows // processes)


def batch_sizes(rows: int, batch_size: int) -> list[int]:
    """Return the rows of each batch of an epoch, `batch_size` at most; they differ by one at most.

    A rest of a single row would be a batch that batch normalization refuses.
    """
    steps = -(-rows // batch_size)
    ends = [rows * step // steps for step in range(steps + 1)]
    return [stop - start for start, stop in itertools.pairwise(ends)]


def own_rows(source: ParquetSource, rank: int, processes: int) -> Share:
    """Return a process's rows: its share, and one of them twice where others have one more."""
    share = source.shares(processes)[rank]
    if share.num_rows == rows_each(source.num_rows, processes):
        return share
    some = share if share.ranges else source.shares(1)[0]  # fewer rows than processes
    # All processes must take as many steps, or one would wait for the others' reductions.
    first = some.ranges[0]
    again = msgspec.structs.replace(first, stop=first.start + 1)
    return msgspec.structs.replace(some, ranges=(*share.ranges, again))


def _stream(
    share: Share,
    sizes: list[int],
    seed: int | None,
    chunk_nbytes: int,
) -> Iterator[Columns]:
    kept: Columns | None = None
    for epoch in itertools.count():
        # By epoch: each has another order, and the same one in a repeated run.
        numbers = None if seed is None else np.random.default_rng((seed, epoch))
        left = iter(sizes)
        size, rest, count = next(left), None, 0
        chunks = [kept] if kept else _chunks(read_share(shuffled(share, seed, epoch)), chunk_nbytes)
        for count, columns in enumerate(chunks, 1):
            chunk = concat([rest, columns]) if rest else columns
            rows = len(next(iter(chunk.values())))
            places = np.arange(rows) if numbers is None else numbers.permutation(rows)
            start = 0
            # `size` is 0 after the epoch's last batch.
            while start + size <= rows and size:
                yield {name: each[places[start : start + size]] for name, each in chunk.items()}
                start, size = start + size, next(left, 0)
            rest = {name: each[places[start:]] for name, each in chunk.items()}
            # One chunk was all of the rows: it stays in memory, and is not read again.
            if count == 1:
                first = columns
        kept = first if count == 1 else None


def _chunks(batches: Iterator[pa.RecordBatch], chunk_nbytes: int) -> Iterator[Columns]:
    parts: list[Columns] = []
    nbytes = 0
    for batch in batches:
        parts.append(_even(to_columns(batch)))
        nbytes += batch.nbytes
        if nbytes >= chunk_nbytes:
            yield concat(parts)
            parts, nbytes = [], 0
    if parts:
        yield concat(parts)


def _even(columns: Columns) -> Columns:
    for name, values in columns.items():
        if values.dtype == object and isinstance(values[0], np.ndarray):
            raise FeedTypeError(
                f"column {name!r} holds arrays of different shapes: make all rows the same shape, "
                "or leave the column out"
            )
    return columns


def transformed(batch: Columns, function: Callable[[Any], Any]) -> Columns:
    """Return what a function makes of a batch.

    Args:
        function: takes a DataFrame of pandas, arrays as its values, and returns one, or a mapping.
    """
    import pandas as pd

    # A column of pandas has one dimension.
    frame = pd.DataFrame({n: x if x.ndim == 1 else list(x) for n, x in batch.items()})
    found = function(frame)
    columns = {str(name): _stacked(name, found[name]) for name in found.keys()}  # noqa: SIM118
    sizes = {name: len(values) for name, values in columns.items()}
    if len(set(sizes.values())) > 1:
        raise FeedTypeError(
            f"transformation_fn returned columns of different lengths, {sizes}: all must have one "
            "value for each row"
        )
    return columns


def _stacked(name: Any, values: Any) -> Array:
    try:
        array = np.asarray(values)
        return np.stack(list(array)) if array.dtype == object else array
    except ValueError as error:
        raise FeedTypeError(
            f"transformation_fn returned a column {name!r} whose rows must have one shape: {error}"
        ) from error
