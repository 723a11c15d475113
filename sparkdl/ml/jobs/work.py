"""The tasks of a training as Spark jobs: they store rows, train on them, and add up gradients.

Runs in: feeder. Sums also in the driver.

A task may run on any executor, again, or twice, with the same result: it depends only on its
arguments. A worker process keeps models and mapped files between tasks only to save time.
"""

from __future__ import annotations

import gc
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import ConfigError, FeedTypeError, ReadError
from sparkdl.core.imports import quick_imports
from sparkdl.node.resources import work_root
from sparkdl.node.task import Problem
from sparkdl.values.batches import from_ipc, to_ipc
from sparkdl.values.columns import convert
from sparkdl.values.ndarrays import Array

if TYPE_CHECKING:
    from pyspark import Broadcast

    from sparkdl.ml.jobs.keras import KerasLearner

_DIRECT = 4
"""Up to so many partitions are added by the driver itself: a shuffle would cost more."""
STORED_SCHEMA = "part long, rows long, digest long, sample binary"
_CHECKED_ROWS = 64
"""Sparse vectors are made dense by so many rows."""
_EVALUATION_ROWS = 256
_MAX_LEARNERS = 4


def values_of(name: str, column: pa.Array) -> Array:
    """Return some rows of a column."""
    values = convert(column, None, f"column {name!r}")
    if values.dtype == object:
        raise FeedTypeError(
            f"column {name!r} holds {column.type}: training as Spark jobs takes numbers, and "
            "arrays of one shape. Encode text as numbers, or train on nodes (mode='nodes')"
        )
    return values


def num_steps(rows: Sequence[int], batch_rows: int) -> int:
    """Return the mini-batches of an epoch, so that none has more than `batch_rows` on average."""
    return max(1, -(-sum(rows) // batch_rows))


class Rows:
    """A partition's rows: the file by `store`, mapped into memory, which all processes share."""

    def __init__(self, path: Path) -> None:
        file = pa.ipc.open_file(pa.memory_map(str(path)))
        self._batches = [file.get_batch(n) for n in range(file.num_record_batches)]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self._order: tuple[tuple[int, int], Array] | None = None

    def batch(
        self, columns: Sequence[str], step: int, steps: int, order: tuple[int, int] | None
    ) -> dict[str, Array]:
        """Return the rows of one of `steps` mini-batches: every row is in one of them.

        Seed and epoch (`order`) decide the order; without them it is Spark's.
        """
        # By fractions: the batches differ by one row at most.
        start, stop = (at * int(self._starts[-1]) // steps for at in (step, step + 1))
        if start == stop:
            return {}
        indices = np.arange(start, stop)
        if order is not None:
            if self._order is None or self._order[0] != order:
                self._order = (order, np.random.default_rng(order).permutation(self._starts[-1]))
            # Ascending, as the mapped file has them: a gradient does not depend on their order.
            indices = np.sort(self._order[1][start:stop])
        cuts = np.searchsorted(indices, self._starts)
        parts = [
            batch.take(pa.array(indices[first:last] - number))
            for batch, number, first, last in zip(
                self._batches, self._starts, cuts, cuts[1:], strict=False
            )
            if first < last
        ]
        return {
            name: values_of(name, pa.concat_arrays([part.column(index) for part in parts]))
            for index, name in enumerate(columns)
        }


def folder_of(job: str) -> Path:
    return work_root() / f"sparkdl-jobs-{job}"


def path_of(folder: Path, role: str, part: int, digest: int) -> Path:
    """Return the file of a partition's rows; other rows would have another name."""
    return folder / f"{role}-{part}-{digest:08x}.arrow"


def store(
    folder: Path, role: str, part: int, columns: Sequence[str], batches: Iterable[pa.RecordBatch]
) -> tuple[int, int, bytes]:
    """Write a partition's rows into `folder`, batch by batch; the file appears when all are there.

    Returns:
        The number of rows; a digest of all values, which shows whether they are the same when Spark
        computes them again; and the first row for `read_sample`, empty if there is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"draft-{secrets.token_hex(6)}"
    rows, sample, digests, kinds = 0, b"", [0] * len(columns), [""] * len(columns)
    try:
        with ExitStack() as stack:
            for batch in batches:
                # By place: Spark does not find a name with a dot in it.
                for index, name in enumerate(columns):
                    for start in range(0, batch.num_rows, _CHECKED_ROWS):
                        values = values_of(name, batch.column(index)[start : start + _CHECKED_ROWS])
                        kind = f"{values.dtype} {list(values.shape[1:])}"
                        if kind != (kinds[index] or kind):
                            raise FeedTypeError(
                                f"column {name!r} holds rows of {kinds[index]} and of "
                                f"{kind}; make all rows the same shape"
                            )
                        kinds[index] = kind
                        # A checksum is enough: nobody has a reason to forge it.
                        digests[index] = zlib.crc32(
                            np.ascontiguousarray(values).data, digests[index]
                        )
                if batch.num_rows and not rows:
                    sample = to_ipc(batch.slice(0, 1))
                    writer = stack.enter_context(pa.ipc.new_file(str(draft), batch.schema))
                if batch.num_rows:
                    writer.write_batch(batch)
                rows += batch.num_rows
        digest = zlib.crc32(np.array(digests, ">u4").data)
        if rows:
            draft.rename(path_of(folder, role, part, digest))
        return rows, digest, sample
    finally:
        draft.unlink(missing_ok=True)


def read_sample(content: bytes, columns: Sequence[str]) -> dict[str, Array]:
    """Return the row that `store` has taken as a sample, by column `[1, …]`."""
    row = from_ipc(content)
    return {name: values_of(name, x) for name, x in zip(columns, row.columns, strict=True)}


@dataclass(frozen=True)
class Sum:
    """The sum of what some partitions found; addition in the order of partitions is exact.

    Attributes:
        first: the lowest of the partitions.
        weight: rows, by which the partitions' averages are weighted.
        learned: gradients and weights that are not trained, times the weight where they are
            floats. Whole numbers are alike on all partitions. Empty if there was no row.
        metrics: states of metrics, which add up.
        missing: partitions whose rows are not on the executor where their task ran.
    """

    first: int
    weight: float = 0.0
    learned: tuple[Array, ...] = ()
    metrics: tuple[Array, ...] = ()
    missing: tuple[int, ...] = ()

    def __add__(self, other: Sum) -> Sum:
        learned, metrics = self.learned or other.learned, self.metrics or other.metrics
        if self.learned and other.learned:
            pairs = zip(self.learned, other.learned, strict=True)
            learned = tuple(a + b if a.dtype.kind == "f" else a for a, b in pairs)
        if self.metrics and other.metrics:
            metrics = tuple(a + b for a, b in zip(self.metrics, other.metrics, strict=True))
        missing = (*self.missing, *other.missing)
        return Sum(self.first, self.weight + other.weight, learned, metrics, missing)

    def averages(self) -> list[Array]:
        """Return `learned` by the rows, of which partitions have different numbers."""
        found = (a / a.dtype.type(self.weight) if a.dtype.kind == "f" else a for a in self.learned)
        return list(map(np.asarray, found))  # numpy makes numbers of arrays without axes


def weighed(number: int, rows: int, learned: Iterable[Array], metrics: tuple[Array, ...]) -> Sum:
    """Return what a partition has learned from a batch, of which `learned` has averages."""
    found = []
    for array in learned:
        # At least float32; bfloat16 and float8 are floats that numpy itself does not know.
        dtype = np.promote_types(array.dtype, np.float32) if array.dtype.kind in "fV" else None
        found.append(array if dtype is None else array.astype(dtype) * dtype.type(rows))
    return Sum(number, rows, tuple(found), metrics)


def total(sums: Iterable[Sum]) -> Sum:
    """Return the sum, added in the order of partitions, whatever order they came in."""
    # Floating-point sums depend on the order, and the order of tasks' ends is a matter of chance.
    return reduce(lambda a, b: a + b, sorted(sums, key=lambda each: each.first))


def num_groups(partitions: int) -> int:
    """Return in how many groups executors add up; 0 if the driver does. A tree of depth 2."""
    return int(np.ceil(np.sqrt(partitions))) if partitions > _DIRECT else 0


def added(pairs: Iterable[tuple[int, Sum]]) -> Iterator[tuple[int, Sum]]:
    found = list(pairs)
    if found:
        yield found[0][0], total(each for _, each in found)


@dataclass(frozen=True)
class Plan:
    partitions: int
    batch_size: int
    epochs: int
    shuffle: bool
    seed: int


@dataclass(frozen=True)
class Parts:
    """Stored rows, of which each partition has a number and a digest."""

    role: str
    columns: tuple[str, ...]
    rows: tuple[int, ...]
    digests: tuple[int, ...]


def store_partition(
    job: str, role: str, columns: tuple[str, ...], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Store a partition's rows on its executor; yield one row that describes it."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    part = context.partitionId()
    rows, digest, sample = store(folder_of(job), role, part, columns, batches)
    found = {"part": part, "rows": rows, "digest": digest, "sample": sample}
    yield pa.RecordBatch.from_pylist([found])


@dataclass(frozen=True)
class Work:
    """What each partition's task does in a step; without one it evaluates all rows."""

    job: str
    plan: Plan
    parts: Parts
    learner: Callable[[], KerasLearner]
    state: Broadcast[Sequence[Array]] = field(repr=False)
    epoch: int
    step: int | None
    num_steps: int

    def __call__(self, number: int, records: Iterable[Any]) -> Iterator[tuple[int, Sum]]:
        """Yield what this partition adds, with its number; or that its rows are not here."""
        for record in records:  # all are to be read, or Spark gives this worker up
            if record.digest != self.parts.digests[number]:
                raise ReadError(
                    f"Spark computed partition {number} of the {self.parts.role} rows again, and "
                    "got other rows: make the DataFrame deterministic, or write it to Parquet and "
                    "read that"
                )
        path = path_of(folder_of(self.job), self.parts.role, number, self.parts.digests[number])
        found = Sum(number)
        if self.parts.rows[number] and not path.exists():
            found = Sum(number, missing=(number,))
        elif self.parts.rows[number]:
            try:
                found = (self._evaluate if self.step is None else self._learn)(number, _rows(path))
            except ConfigError as error:
                # Spark hands on the text alone; the driver makes the error again of it.
                raise Problem(ConfigError.__name__, str(error)).error() from error
        yield number, found

    def _learn(self, number: int, rows: Rows) -> Sum:
        assert self.step is not None
        # numpy takes no negative seeds.
        order = ((self.plan.seed + number) % 2**32, self.epoch) if self.plan.shuffle else None
        batch = rows.batch(self.parts.columns, self.step, self.num_steps, order)
        if not batch:
            return Sum(number)
        model = self._model()
        # Another seed for each partition and step, the same one in a repeated task.
        seeds = np.random.SeedSequence([self.plan.seed % 2**32, self.epoch, self.step, number])
        found = model.learn(batch, int(seeds.generate_state(1)[0]))
        _settle()
        return weighed(number, len(next(iter(batch.values()))), *found)

    def _evaluate(self, number: int, rows: Rows) -> Sum:
        model = self._model()
        steps = num_steps([self.parts.rows[number]], _EVALUATION_ROWS)
        batches = (rows.batch(self.parts.columns, step, steps, None) for step in range(steps))
        return total(Sum(number, metrics=model.evaluate(batch)) for batch in batches)

    def _model(self) -> KerasLearner:
        """Return this process's model, with the current weights; the oldest is dropped."""
        global _has_settled
        if self.job not in _learners:
            # A model that was frozen and is dropped below would never be collected.
            gc.unfreeze()
            while len(_learners) >= _MAX_LEARNERS:
                del _learners[next(iter(_learners))]
            with quick_imports():
                _learners[self.job] = self.learner()
            _has_settled = False
        model = _learners[self.job]
        model.load(self.state.value)
        return model


def forget(job: str, records: Iterable[Any]) -> Iterator[Any]:
    """Remove the rows of a job from the executor's disk, and its model from this worker."""
    list(records)  # all are read, or Spark ends this Python worker
    shutil.rmtree(folder_of(job), ignore_errors=True)
    _learners.pop(job, None)
    _rows.cache_clear()
    return iter(())


_learners: dict[str, KerasLearner] = {}
"""By job, retained for the next task: Spark gives its Python workers no other place."""
_has_settled = False
_rows = lru_cache(maxsize=16)(Rows)


def _settle() -> None:
    """Freeze a framework's objects, once the first step has made the last of them.

    Spark's workers collect garbage after each task, which would take long over them.
    """
    global _has_settled
    if not _has_settled:
        gc.collect()
        gc.freeze()
        _has_settled = True
