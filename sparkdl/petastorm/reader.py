"""One process's share of a converter's rows: batches of columns, epoch after epoch.

Without an agent, so it works in any process: a node's, Horovod's, a notebook's.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import ConfigError
from sparkdl.feed.reader.batches import GatheredRows
from sparkdl.node.context import current
from sparkdl.storage.parquet.read import read_share
from sparkdl.storage.parquet.source import ParquetSource, shuffled
from sparkdl.values.columns import Columns, objects, to_columns

_LAUNCHERS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
)


@dataclass(frozen=True)
class TransformSpec:
    """A function on frames of pandas, and the columns of its result.

    Attributes:
        func: takes and returns a `pandas.DataFrame`; it may return fewer rows or more. Called on
            several threads at once.
        edit_fields: of columns that it changes or adds: `(name, numpy dtype, shape, is nullable)`,
            or objects with `name`, `numpy_dtype` and `shape`.
        removed_fields: columns to leave out afterwards.
        selected_fields: columns to keep, in this order; `None` for all.
    """

    func: Callable[[Any], Any] | None = None
    edit_fields: Sequence[Any] | None = None
    removed_fields: Sequence[str] | None = None
    selected_fields: Sequence[str] | None = None

    def columns(self, batch: pa.RecordBatch) -> Columns:
        """Return what becomes of a batch's rows: arrays `[rows, …]` by name."""
        frame = batch.to_pandas()
        if self.func is not None:
            frame = self.func(frame)
        names = self.selected_fields
        if names is None:
            names = [name for name in frame.columns if name not in (self.removed_fields or ())]
        edits = {name: (dtype, shape) for name, dtype, shape in map(_edit, self.edit_fields or ())}
        if missing := [name for name in names if name not in frame.columns]:
            raise ConfigError(
                f"TransformSpec: the function's frame has no column {missing[0]!r}, but must have "
                f"all columns that are kept; its columns are {', '.join(map(repr, frame.columns))}"
            )
        return {str(name): _array(name, frame[name], *edits.get(name, ())) for name in names}


def _edit(field: Any) -> tuple[str, Any, Any]:
    if isinstance(field, (tuple, list)):
        return field[0], field[1], field[2]
    return field.name, field.numpy_dtype, field.shape


def _array(name: str, series: Any, dtype: Any = None, shape: Any = ()) -> np.ndarray[Any, Any]:
    values = list(series) if series.dtype == object else series.to_numpy()
    if isinstance(values, list):
        is_nested = all(isinstance(value, (np.ndarray, list)) for value in values)
        # pandas has arrays as objects, one a row.
        parts = list(map(np.asarray, values)) if is_nested else []
        is_even = len({part.shape for part in parts}) == 1
        values = np.stack(parts) if is_even else objects(parts or values)
    if values.dtype == object or dtype is None:
        return values
    wanted = tuple(shape or ())
    if all(wanted) and values.shape[1:] != wanted and len(values):
        if values.size != len(values) * int(np.prod(wanted)):
            raise ConfigError(
                f"TransformSpec: column {name!r} has values of shape {values.shape[1:]}, and must "
                f"have {wanted}, as edit_fields says"
            )
        values = values.reshape(len(values), *wanted)
    return values.astype(np.str_ if dtype is str else dtype, copy=False)


def read_batches(
    source: ParquetSource,
    place: tuple[int, int],
    batch_size: int,
    epochs: int | None,
    window: int,
    threads: int,
    options: Mapping[str, Any],
) -> Generator[Columns, None, None]:
    """Yield all batches: of `batch_size` rows over the ends of epochs, the last one smaller.

    Args:
        place: which shard this is, of how many.
        window: shuffle within this many rows; 0 for the order in which they are read.
    """
    shard, shards = place
    share, seed = source.shares(shards)[shard], options["seed"] or 0
    rows = GatheredRows()
    if window:
        rows.shuffle(np.random.default_rng(seed), window)
    for epoch in count() if epochs is None else range(epochs):
        num_rows = 0
        order = shuffled(share, seed if options["shuffle_row_groups"] else None, epoch)
        # A loop that is left early also ends the threads that read and transform.
        with (
            closing(read_share(order)) as batches,
            closing(_columns(batches, options["transform_spec"], threads)) as parts,
        ):
            for columns in parts:
                num_rows += (added := len(next(iter(columns.values()), ())))
                rows.add(columns, added)
                while rows.count >= batch_size:
                    yield rows.cut(batch_size)[0]
        # Without an end of epochs, a loop over no rows would never yield.
        if not num_rows:
            raise ConfigError(
                f"shard {shard} of {shards} has no rows in epoch {epoch}: {source.num_rows} rows "
                "are in the files, before a transform_spec. Take fewer shards, or make the "
                "DataFrame larger"
            )
    # Until then the last rows wait in the window, to be mixed with more.
    rows.flush()
    while rows.count:
        yield rows.cut(min(batch_size, rows.count))[0]


def _columns(
    batches: Iterator[pa.RecordBatch], transform: TransformSpec | None, threads: int
) -> Generator[Columns, None, None]:
    if transform is None:
        yield from (to_columns(batch, packs=True) for batch in batches)
        return
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


def rank_and_size() -> tuple[int, int]:
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
