"""The tasks of a training as Spark jobs: they store rows, train on them, and add up gradients.

Runs in: feeder. Sums also in the driver.

A task may run on any executor, again, or twice, with the same result: it depends only on its
arguments. A worker process keeps models and mapped files between tasks only to save time.
"""

from __future__ import annotations

import gc
import shutil
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import ConfigError, ReadError
from sparkdl.core.imports import quick_imports
from sparkdl.ml.jobs.rows import Column, Rows, folder_of, store
from sparkdl.node.resources import work_root
from sparkdl.node.task import Problem
from sparkdl.values.ndarrays import Array

if TYPE_CHECKING:
    from pyspark import Broadcast

_DIRECT = 4
"""Up to so many partitions are added by the driver itself: a shuffle would cost more."""
STORED_SCHEMA = "part int, rows long, digest long, sample binary"
_STORED = pa.schema(
    {"part": pa.int32(), "rows": pa.int64(), "digest": pa.int64(), "sample": pa.binary()}
)
_MAX_LEARNERS = 4
_EVALUATION_ROWS = 256
State = Sequence[Array]


@dataclass(frozen=True)
class Sum:
    """The sum of what some partitions found; addition in the order of partitions is exact.

    Attributes:
        first: the lowest of the partitions.
        weight: rows, by which the partitions' averages are weighted.
        vector: floats `[n]`: the sum of weight times average; None if there was no row.
        exact: whole numbers, which are alike on all partitions.
        metrics: states of metrics, which add up.
        missing: partitions whose rows are not on the executor where their task ran.
    """

    first: int
    weight: float = 0.0
    vector: Array | None = None
    exact: tuple[Array, ...] = ()
    metrics: tuple[Array, ...] = ()
    missing: tuple[int, ...] = ()

    def __add__(self, other: Sum) -> Sum:
        vectors = [v for v in (self.vector, other.vector) if v is not None]
        metrics = self.metrics or other.metrics
        if self.metrics and other.metrics:
            metrics = tuple(a + b for a, b in zip(self.metrics, other.metrics, strict=True))
        return Sum(
            self.first,
            self.weight + other.weight,
            reduce(np.add, vectors) if vectors else None,
            self.exact or other.exact,
            metrics,
            (*self.missing, *other.missing),
        )


def total(sums: Iterable[Sum]) -> Sum:
    """Return the sum, added in the order of partitions, whatever order they came in."""
    # Floating-point sums depend on the order, and the order of tasks' ends is a matter of chance.
    first, *others = sorted(sums, key=lambda each: each.first)
    return reduce(lambda a, b: a + b, others, first)


def num_groups(partitions: int) -> int:
    """Return in how many groups executors add up; 0 if the driver does. A tree of depth 2."""
    return int(np.ceil(np.sqrt(partitions))) if partitions > _DIRECT else 0


def added(pairs: Iterable[tuple[int, Sum]]) -> Iterator[tuple[int, Sum]]:
    """Add up a group's sums."""
    found = list(pairs)
    if found:
        yield found[0][0], total(each for _, each in found)


def pack(arrays: Sequence[Array]) -> tuple[Array, tuple[Array, ...]]:
    """Return the floats of `arrays` as one vector, float64 if one of them is; and the others."""
    floats = [array for array in arrays if is_float(array)]
    wide = any(array.dtype == np.float64 for array in floats)
    dtype = np.float64 if wide else np.float32
    flat = [np.asarray(array, dtype).ravel() for array in floats]
    vector = np.concatenate(flat) if flat else np.zeros(0, dtype)
    return vector, tuple(array for array in arrays if not is_float(array))


def unpack(vector: Array, exact: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    """Return the arrays that `pack` was given, of the shapes and dtypes of `like`."""
    found, at, others = [], 0, iter(exact)
    for array in like:
        if is_float(array):
            values = vector[at : at + array.size]
            found.append(values.reshape(array.shape).astype(array.dtype, copy=False))
            at += array.size
        else:
            found.append(next(others))
    return found


def is_float(array: Array) -> bool:
    """Whether an array holds floats, bfloat16 included (which numpy itself does not know)."""
    return array.dtype.kind == "f" or array.dtype.name in ("bfloat16", "float8_e4m3fn")


class Learner(Protocol):
    """A model in a worker process."""

    def load(self, state: State) -> None:
        """Take over weights."""

    def learn(self, batch: dict[str, Array], seed: int) -> tuple[State, tuple[Array, ...]]:
        """Return the gradients with the weights that are not trained, and the metrics' states."""

    def evaluate(self, batch: dict[str, Array]) -> tuple[Array, ...]:
        """Return the states of the metrics."""


class LearnerSpec(Protocol):
    """Makes a learner, anywhere."""

    def learner(self) -> Learner:
        """Return a learner; takes seconds, since it imports a framework."""


class Master(Protocol):
    """The driver's model and optimizer; the methods that only observe are optional."""

    model: Any

    def columns(self) -> tuple[Column, ...]:
        """Return the columns to keep."""

    def begin(self, sample: dict[str, Array]) -> None:
        """Build all, from one row `[1, …]`."""
        return

    def state(self) -> list[Array]:
        """Return what workers need."""

    def apply(self, found: Sum) -> None:
        """Take one step with the average of what workers have learned."""

    def metrics(self, states: Sequence[Array]) -> dict[str, float]:
        """Return values from the sums of the metrics' states."""

    def epoch_begins(self, epoch: int) -> None:
        """Note that an epoch begins."""
        return

    def epoch_ended(self, epoch: int, logs: Mapping[str, float]) -> bool:
        """Note that an epoch has ended; return whether it is the last."""
        return False

    def end(self) -> None:
        """Note the end."""
        return


@dataclass(frozen=True)
class Store:
    """For `DataFrame.mapInArrow`: keeps each partition's rows on its executor."""

    job: str
    role: str
    columns: tuple[Column, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Store a partition; yield one row that describes it."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        part = context.partitionId()
        folder = folder_of(work_root(), self.job, f"{self.role}-{part}")
        stored = store(folder, self.columns, batches)
        yield pa.RecordBatch.from_pylist([{"part": part, **vars(stored)}], _STORED)


@dataclass(frozen=True)
class Work:
    """One iteration: what each partition's task does. For `RDD.mapPartitionsWithIndex`.

    Attributes:
        spec: makes the model in a worker that has none for this training yet.
        role: of the rows: `training`, or others, which are evaluated.
        columns: of the rows.
        digests: the expected digest of each partition's rows.
        step: of the epoch; None to evaluate all rows.
        num_steps: that the epoch has.
        seed: of the order of the rows, and of random layers.
    """

    job: str
    spec: LearnerSpec
    state: Broadcast[State] = field(repr=False)
    role: str
    columns: tuple[Column, ...]
    digests: tuple[int, ...]
    epoch: int = 0
    step: int | None = None
    num_steps: int = 1
    seed: int = 0
    shuffle: bool = False

    def __call__(self, number: int, records: Iterable[Any]) -> Iterator[tuple[int, Sum]]:
        """Yield what this partition adds, with its number; or that its rows are not here."""
        for record in records:  # all are to be read, or Spark gives this worker up
            self._check(number, record.digest)
        folder = folder_of(work_root(), self.job, f"{self.role}-{number}")
        if not folder.is_dir():
            found = Sum(number, missing=(number,))
        else:
            rows = _rows(folder)
            self._check(number, rows.digest)
            try:
                is_training = self.step is not None
                found = (self._learn if is_training else self._evaluate)(number, rows)
            except ConfigError as error:
                # Spark hands on the text alone; the driver makes the error again of it.
                raise Problem(ConfigError.__name__, str(error)).error() from error
        yield number, found

    def _check(self, number: int, digest: int) -> None:
        if digest != self.digests[number]:
            raise ReadError(
                f"Spark computed partition {number} of the {self.role} rows again, and they are "
                "not those of before: make the DataFrame deterministic, or write it to Parquet "
                "and read that"
            )

    def _learn(self, number: int, rows: Rows) -> Sum:
        assert self.step is not None
        # numpy takes no negative seeds.
        order = ((self.seed + number) % 2**32, self.epoch) if self.shuffle else None
        batch = rows.batch(self.columns, self.step, self.num_steps, order)
        size = len(next(iter(batch.values()), ()))
        if not size:
            return Sum(number)
        learner = _learner(self)
        learner.load(self.state.value)
        # Another seed for each partition and step, the same one in a repeated task.
        seeds = np.random.SeedSequence([self.seed % 2**32, self.epoch, self.step, number])
        learned, metrics = learner.learn(batch, int(seeds.generate_state(1)[0]))
        vector, exact = pack(learned)
        _settle()
        return Sum(number, size, vector * vector.dtype.type(size), exact, metrics)

    def _evaluate(self, number: int, rows: Rows) -> Sum:
        learner = _learner(self)
        learner.load(self.state.value)
        steps = num_batches(rows.num_rows)
        found = (
            learner.evaluate(rows.batch(self.columns, step, steps, None)) for step in range(steps)
        )
        return total([Sum(number), *(Sum(number, metrics=metrics) for metrics in found)])


def num_batches(rows: int) -> int:
    """Return into how many batches rows are cut to be evaluated."""
    return -(-rows // _EVALUATION_ROWS)


@dataclass(frozen=True)
class Forget:
    """Takes the rows of a job from the executors' disks, and its model from this worker."""

    job: str

    def __call__(self, records: Iterable[Any]) -> Iterator[Any]:
        """Forget; yields nothing."""
        # All are read, or Spark ends this Python worker.
        list(records)
        shutil.rmtree(folder_of(work_root(), self.job, ""), ignore_errors=True)
        _learners.pop(self.job, None)
        for folder in [f for f in _open_rows if self.job in f.parent.name]:
            del _open_rows[folder]
        yield from ()


_learners: OrderedDict[str, Learner] = OrderedDict()
_open_rows: dict[Path, Rows] = {}
"""Mapped rows, retained for the next task: Spark gives its Python workers no other place."""
_has_settled = False


def _rows(folder: Path) -> Rows:
    if folder not in _open_rows:
        for gone in [each for each in _open_rows if not each.is_dir()]:
            del _open_rows[gone]  # of a job that has ended; its files go with their last reader
        _open_rows[folder] = Rows(folder)
    return _open_rows[folder]


def _learner(work: Work) -> Learner:
    """Return the model of a job: this process's, or a new one. The least used one is let go."""
    global _has_settled
    if work.job not in _learners:
        # A model that was frozen and is let go below would never be collected.
        gc.unfreeze()
        with quick_imports():
            _learners[work.job] = work.spec.learner()
        _has_settled = False
        while len(_learners) > _MAX_LEARNERS:
            _learners.popitem(last=False)
    _learners.move_to_end(work.job)
    return _learners[work.job]


def _settle() -> None:
    """Spark's workers collect garbage after each task, which takes long over a framework's objects.

    They are frozen after the first step, which has made the last of them.
    """
    global _has_settled
    if not _has_settled:
        gc.collect()
        gc.freeze()
        _has_settled = True
