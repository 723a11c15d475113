"""One process's share of a converter's rows: batches of columns, epoch after epoch.

Without an agent, so it works in any process: a node's, Horovod's, a notebook's.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import ConfigError
from sparkdl.feed.reader.batches import GatheredRows
from sparkdl.node.context import current
from sparkdl.petastorm.transform import TransformSpec
from sparkdl.storage.parquet.read import read_share
from sparkdl.storage.parquet.source import ParquetSource, shuffled
from sparkdl.values.columns import Columns, to_columns

_LAUNCHERS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
)


@dataclass(frozen=True)
class Reading:
    """The rows that a process reads, and their order.

    Attributes:
        epochs: `None` for no end.
        shuffles: whether row groups come in random order, another one in each epoch.
        window: shuffle within so many rows; 0 for the order in which they are read.
        threads: how many apply `transform`.
    """

    source: ParquetSource
    shard: int
    shards: int
    batch_size: int
    epochs: int | None
    shuffles: bool
    window: int
    seed: int
    shard_seed: int | None
    transform: TransformSpec | None
    threads: int

    def batches(self) -> Generator[Columns, None, None]:
        """Yield all batches: of `batch_size` rows over the ends of epochs, the last one smaller.

        Raises:
            ConfigError: if there are no rows, or the storage cannot be opened.
            ReadError: if a file cannot be read.
        """
        rows = GatheredRows()
        if self.window:
            rows.shuffle(np.random.default_rng(self.seed), self.window)
        for epoch in count() if self.epochs is None else range(self.epochs):
            num_rows = 0
            # A loop that is left early also ends the threads that read and transform.
            with closing(self._epoch(epoch)) as parts:
                for columns in parts:
                    num_rows += (added := len(next(iter(columns.values()), ())))
                    rows.add(columns, added)
                    while rows.count >= self.batch_size:
                        yield rows.cut(self.batch_size)[0]
            # Without an end of epochs, a loop over no rows would never yield.
            if not num_rows:
                raise ConfigError(
                    f"shard {self.shard} of {self.shards} has no rows in epoch {epoch}: "
                    f"{self.source.num_rows} rows are in the files, before a transform_spec. Take "
                    "fewer shards, or make the DataFrame larger"
                )
        # Until then the last rows wait in the window, to be mixed with more.
        rows.flush()
        while rows.count:
            yield rows.cut(min(self.batch_size, rows.count))[0]

    def _epoch(self, epoch: int) -> Generator[Columns, None, None]:
        share = self.source.shares(self.shards, self.shard_seed)[self.shard]
        batches = read_share(shuffled(share, self.seed if self.shuffles else None, epoch))
        with closing(batches):
            if self.transform is None:
                yield from map(to_columns, batches)
            else:
                yield from _transformed(batches, self.transform, self.threads)


def _transformed(
    batches: Iterator[pa.RecordBatch], transform: TransformSpec, threads: int
) -> Generator[Columns, None, None]:
    pool = ThreadPoolExecutor(threads, "sparkdl-transform")
    ahead: deque[Future[Columns]] = deque()
    try:
        for batch in batches:
            ahead.append(pool.submit(transform.columns, batch))
            # As many batches as threads are under way, and they come out in order.
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class Streams:
    """Iterations over the same rows, each from their beginning, until the `with` block ends."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._open: list[_Stream] = []
        self._is_closed = False

    def __iter__(self) -> Iterator[Columns]:
        if self._is_closed:
            raise ConfigError(
                "the rows of make_…() are read after the end of the `with` block that opened "
                "them: iterate inside `with converter.make_…() as data:`"
            )
        stream = _Stream(self._reading.batches())
        self._open.append(stream)
        return stream

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        for stream in self._open:
            stream.close()


class _Stream:
    """An iterator that one thread reads and another closes."""

    def __init__(self, batches: Generator[Columns, None, None]) -> None:
        self._batches = batches
        self._lock = threading.Lock()

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> Columns:
        # A generator cannot be closed while another thread runs it.
        with self._lock:
            return next(self._batches)

    def close(self) -> None:
        """End it, after the batch that is being read; threads end with it."""
        with self._lock:
            self._batches.close()


def place() -> tuple[int, int]:
    """Return rank and size of this process, by its node, or by variables of its launcher.

    The launcher may be Horovod, OpenMPI, MPICH or torchrun; without one they are (0, 1). A node
    that does not train, an evaluator for example, is alone.
    """
    ctx = current()
    if ctx is not None:
        trainers = ctx.world.trainers
        return (trainers.index(ctx.member), len(trainers)) if ctx.member in trainers else (0, 1)
    for rank, size in _LAUNCHERS:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1
