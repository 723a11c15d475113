"""The Spark side of a training as Spark jobs: rows kept on executors, and one job an iteration.

`kept` is a persisted RDD with one small record for each partition, made by the task that puts the
partition's rows on its executor's disk. Spark therefore schedules each iteration's task on the
executor with its rows. If the executor is lost, Spark computes its partitions again elsewhere,
within the very task that needs them. A task on any other executor reports that it lacks the rows; a
second job then brings them there.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t

from sparkdl.core.errors import ConfigError, JobFailedError, SparkdlError
from sparkdl.core.jobs import context_of, named_jobs
from sparkdl.driver.executors.scored import addressed
from sparkdl.driver.slots.spark_errors import raised_in_task, was_shut_down
from sparkdl.ml.jobs.rows import Column
from sparkdl.ml.jobs.task import STORED_SCHEMA, Forget, Store, Sum, Work, added, num_groups, total
from sparkdl.ml.scoring.inputs import NUMBERS, leaf_type
from sparkdl.node.task import parse_problem

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class KeptRows:
    """Rows on executors.

    Attributes:
        again: the same records as `kept`, but not persisted: a task of it brings the rows along.
        rows, digests: by partition.
        sample: the first row, see `rows.read_sample`.
    """

    kept: RDD[Any]
    again: RDD[Any]
    role: str
    columns: tuple[Column, ...]
    rows: tuple[int, ...]
    digests: tuple[int, ...]
    sample: bytes


class Jobs:
    """The jobs of one training. On exit it removes its stored rows and broadcasts.

    Args:
        retries: how many jobs may fail, after Spark's own retries of their tasks.

    Raises:
        ConfigError: over Spark Connect, which has neither RDDs nor broadcasts.
    """

    def __init__(self, spark: SparkSession, retries: int = 0) -> None:
        context = context_of(spark)
        if context is None:
            raise ConfigError(
                "training as Spark jobs needs a classic SparkSession: Spark Connect has neither "
                "broadcasts nor RDDs. Run the program with spark-submit, or train on nodes "
                "(mode='nodes')"
            )
        self.context: SparkContext = context
        self.name = secrets.token_hex(6)
        self._retries = retries
        self._kept: list[KeptRows] = []
        self._tag = f"sparkdl-jobs-{self.name}"

    def __enter__(self) -> Jobs:
        self.context.addJobTag(self._tag)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception), self._named("remove the rows"):  # Spark is gone, perhaps
            self.context.cancelJobsWithTag(self._tag)  # one that was interrupted may still run
            self.context.removeJobTag(self._tag)
            for each in self._kept:
                each.kept.mapPartitions(Forget(self.name)).collect()
                each.kept.unpersist()

    def keep(
        self, data: DataFrame, role: str, columns: Sequence[Column], partitions: int | None
    ) -> KeptRows:
        """Keep the rows of a DataFrame on the executors.

        Args:
            partitions: into how many the rows are shared out; None for as many as there are.
        """
        for column in columns:
            _check_type(column.name, data.schema[column.name].dataType)
        names = data.columns
        data, known = addressed(data)
        data = data.select([known[names.index(column.name)] for column in columns])
        store = Store(self.name, role, tuple(columns))
        with self._named(f"keep {role} rows"):  # a shuffle of the DataFrame is a job of its own
            again = data.mapInArrow(store, STORED_SCHEMA).rdd
            if partitions is not None and again.getNumPartitions() != partitions:
                again = data.repartition(partitions).mapInArrow(store, STORED_SCHEMA).rdd
        # A step of its own: `again` stays unpersisted, or its tasks would not bring rows along.
        kept: RDD[Any] = again.mapPartitions(lambda rows: rows).persist(
            StorageLevel.MEMORY_AND_DISK
        )
        records = self._tried(f"keep {role} rows", kept.collect)
        records.sort(key=lambda record: record.part)
        samples = [bytes(record.sample) for record in records if record.rows]
        if not samples:
            raise ConfigError(
                f"the DataFrame has no {role} rows: give one with rows, or remove its filters"
            )
        found = KeptRows(
            kept,
            again,
            role,
            tuple(columns),
            tuple(record.rows for record in records),
            tuple(record.digest for record in records),
            samples[0],
        )
        self._kept.append(found)
        return found

    @contextmanager
    def sent(self, state: Any) -> Iterator[Any]:
        """Give a broadcast, which is destroyed afterwards."""
        broadcast = self.context.broadcast(state)
        try:
            yield broadcast
        finally:
            with suppress(Exception):  # Spark is gone, perhaps
                broadcast.destroy()

    def run(self, kept: KeptRows, work: Work, what: str) -> Sum:
        """Run one iteration; return the sum over all partitions.

        Args:
            what: the job's name in Spark's UI.

        Raises:
            JobFailedError: if a task failed more often than Spark repeats it.
        """
        return self._tried(what, lambda: self._run(kept, work))

    def _run(self, kept: KeptRows, work: Work) -> Sum:
        found = kept.kept.mapPartitionsWithIndex(work)
        groups = 0 if work.step is None else num_groups(len(kept.rows))
        if not groups:
            whole = total(each for _, each in found.collect())
        else:
            merged = found.partitionBy(groups, int).mapPartitions(added)
            try:
                whole = total(each for _, each in merged.collect())
            finally:
                with suppress(Exception):  # else Spark keeps the files until the driver collects
                    merged._jrdd.rdd().cleanShuffleDependencies(False)
        if not whole.missing:
            return whole
        # Each of them now computes where it has just got its rows, so this ends.
        moved = sorted(set(whole.missing))
        _log.info("Moving partitions %s of the %s rows to other executors", moved, kept.role)
        rest = self.context.runJob(
            kept.again.mapPartitionsWithIndex(work), lambda pairs: pairs, moved
        )
        there = [each for _, each in rest]
        if lost := [number for each in there for number in each.missing]:
            raise JobFailedError(
                f"partitions {lost} were stored and not found by the same task: an executor's "
                "local directory is not the same for all its Python workers"
            )
        return total([replace(whole, missing=()), *there])

    def _named(self, what: str) -> AbstractContextManager[None]:
        return named_jobs(self.context, f"sparkdl {self.name}", what)

    def _tried(self, what: str, run: Callable[[], T]) -> T:
        from py4j.protocol import Py4JJavaError  # which pyspark-client has not

        while True:
            try:
                with self._named(what):
                    return run()
            except (Py4JJavaError, PySparkException) as error:
                if was_shut_down(error) or not self._retries:
                    raise _explained(error) from None
                # For all jobs of the training together.
                self._retries -= 1
                _log.warning("A job of the training failed and is run again: %s", _explained(error))


def _check_type(name: str, kind: t.DataType) -> None:
    if not isinstance(leaf_type(kind), NUMBERS):
        raise ConfigError(
            f"column {name!r} is of type {kind.simpleString()}: training as Spark jobs takes "
            "numbers, arrays of them and ML vectors. Encode it as numbers, leave it out, or train "
            "on nodes (mode='nodes')"
        )


def _explained(error: Exception) -> SparkdlError:
    """Return what the Python of a task raised, as far as Spark's text shows it."""
    if problem := parse_problem(str(error)):
        return problem.at_driver()
    return JobFailedError(f"a Spark job of the training failed: {raised_in_task(error)}")
