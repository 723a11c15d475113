"""Train as Spark jobs, without long-running nodes or open ports: the driver's side.

The way of BigDL (https://arxiv.org/abs/1804.05839): weights are broadcast, each partition's task
computes the gradient of its part of the mini-batch, Spark adds them up, the driver takes the step.
See docs/spark-ml.md. `KerasEstimator(mode="jobs")` is the face.

```text
 driver   state ──broadcast──▶ tasks ──gradients──▶ groups ──sums──▶ driver: one update
```
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, functions

from sparkdl.core.errors import ConfigError, JobFailedError, SparkdlError
from sparkdl.core.jobs import cancel_jobs, context_of, named_jobs
from sparkdl.driver.executors.scored import addressed
from sparkdl.driver.slots.spark_errors import raised_in_task
from sparkdl.ml.estimators.keras_train import KerasTask, inputs_of, outputs_of, with_softmax
from sparkdl.ml.estimators.training import Training, warn_of_no_numbers, without_vectors
from sparkdl.ml.jobs.keras import KerasLearner, KerasMaster, as_arrays
from sparkdl.ml.jobs.work import (
    STORED_SCHEMA,
    Parts,
    Plan,
    Sum,
    Work,
    added,
    forget,
    num_groups,
    num_steps,
    read_sample,
    store_partition,
    total,
)
from sparkdl.ml.model_file import ModelFile
from sparkdl.ml.scoring.keras_objects import loaded
from sparkdl.ml.scoring.source import ModelSource, Signature
from sparkdl.ml.summary import TrainingSummary
from sparkdl.node.task import parse_problem
from sparkdl.values.types import NUMERIC, spark_family

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

_log = logging.getLogger(__name__)
_NODES_ONLY = (
    *("num_gpus", "max_restarts", "recovery", "feeding", "observe", "startup", "checkpoint_dir"),
    "sparse",
)


def check_mode(stage: Any) -> None:
    """Refuse parameters that were set and have no effect in the stage's mode."""
    useless = [name for name in _NODES_ONLY if stage.isSet(name)]
    if stage.getMode() == "jobs" and useless:
        raise ConfigError(
            f"{', '.join(useless)} cannot be used with mode='jobs'; leave it out, or set "
            "mode='nodes'"
        )


def fit_keras(
    task: KerasTask, training: Training, plan: Plan, dataset: DataFrame
) -> tuple[ModelFile, Signature, TrainingSummary]:
    """Train; return the model as a `.keras` file, its signature, and a summary of the training."""
    rows, validation = training.rows(dataset)
    made = None
    if isinstance(task.model_spec.made, ModelFile):
        task = task.with_made(made := task.model_spec.made.whole)
    with Jobs(dataset.sparkSession, plan) as jobs, jobs.sent(made) as content:
        # As a broadcast: within the task it would travel again in every iteration.
        small = task.with_made(ModelSource("", "keras", "")) if made else task
        learner = partial(KerasLearner, small, content)
        master, start_s = KerasMaster(task), time.monotonic()
        history = jobs.train(master, learner, task.columns.names, rows, validation)
        summary = TrainingSummary(history, seconds=time.monotonic() - start_s)
    file = ModelFile("keras", partial(task.model_spec.save, master.model))
    model = loaded(file.path, task.model_spec.objects)
    signature = with_softmax(Signature(inputs_of(model), outputs_of(model)), model)
    return file, signature, summary


@dataclass(frozen=True)
class _Stored:
    """Rows on executors.

    Attributes:
        kept: a persisted RDD with a record for each partition, made by the task that stores its
            rows: Spark schedules an iteration's task on the executor with its rows. If that is
            lost, Spark computes them again within the very task that needs them.
        again: the same records, not persisted: a task of it brings the rows along.
        sample: the first row, see `read_sample`.
    """

    kept: RDD[Any]
    again: RDD[Any]
    parts: Parts
    sample: bytes


class Jobs:
    """The jobs of one training. On exit it removes its stored rows.

    Raises:
        ConfigError: over Spark Connect, which has neither RDDs nor broadcasts.
    """

    def __init__(self, spark: SparkSession, plan: Plan) -> None:
        if (context := context_of(spark)) is None:
            raise ConfigError(
                "training as Spark jobs needs a classic SparkSession: Spark Connect has neither "
                "broadcasts nor RDDs. Run the program with spark-submit, or train on nodes "
                "(mode='nodes')"
            )
        self._context: SparkContext = context
        self._plan, self._name = plan, secrets.token_hex(6)
        self._group = f"sparkdl {self._name}"
        self._kept: list[RDD[Any]] = []

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):  # Spark is gone, perhaps
            cancel_jobs(self._context, self._group)  # one that was interrupted may still run
            with named_jobs(self._context, self._group, "remove the rows"):
                for each in self._kept:
                    each.mapPartitions(partial(forget, self._name)).collect()
                    each.unpersist()

    @contextmanager
    def sent(self, value: Any) -> Iterator[Any]:
        """Give a broadcast, which is destroyed afterwards."""
        broadcast = self._context.broadcast(value)
        try:
            yield broadcast
        finally:
            with suppress(Exception):  # Spark is gone, perhaps
                broadcast.destroy()

    def train(
        self,
        master: KerasMaster,
        learner: Callable[[], KerasLearner],
        columns: tuple[str, ...],
        training: DataFrame,
        validation: DataFrame | None,
    ) -> dict[str, list[float]]:
        """Return the history; the trained model is `master`'s."""
        stored = self._store(training, "training", columns)
        held = None if validation is None else self._store(validation, "validation", columns)
        master.begin(read_sample(stored.sample, columns))
        rows = stored.parts.rows
        steps = num_steps(rows, self._plan.batch_size * len(rows))
        history: dict[str, list[float]] = {}
        for epoch in range(self._plan.epochs):
            start_s = time.monotonic()
            master.callbacks.on_epoch_begin(epoch)
            metrics = Sum(0)
            for step in range(steps):
                what = f"training, epoch {epoch}, step {step} of {steps}"
                found = self._iterate(what, master, learner, stored, epoch, step, steps)
                master.apply(found.averages())
                metrics += Sum(0, metrics=found.metrics)
            logs = master.metrics(metrics.metrics)
            if held is not None:
                what = f"validation, epoch {epoch}"
                found = self._iterate(what, master, learner, held, epoch, None, steps)
                logs |= {f"val_{n}": value for n, value in master.metrics(found.metrics).items()}
            for name, value in logs.items():
                history.setdefault(name, []).append(value)
            seconds = time.monotonic() - start_s
            shown = ", ".join(f"{name} {value:.4g}" for name, value in logs.items())
            _log.info("Epoch %d: %d iterations in %.1f s, %s", epoch, steps, seconds, shown)
            master.callbacks.on_epoch_end(epoch, dict(logs))
            if master.model.stop_training:
                break
        master.callbacks.on_train_end()
        warn_of_no_numbers(history.get("loss", ()))
        return history

    def _store(self, data: DataFrame, role: str, columns: tuple[str, ...]) -> _Stored:
        for name in columns:
            kind = data.schema[name].dataType
            if spark_family(kind) not in NUMERIC:
                raise ConfigError(
                    f"column {name!r} is of type {kind.simpleString()}: training as Spark "
                    "jobs takes numbers, arrays of them and ML vectors. Encode it as numbers, "
                    "leave it out, or train on nodes (mode='nodes')"
                )
        names, wanted = data.columns, self._plan.partitions
        data, known = addressed(data)
        data = data.select([known[names.index(name)] for name in columns])
        store = partial(store_partition, self._name, role, columns)
        with self._named(f"keep {role} rows"):
            again = data.mapInArrow(store, STORED_SCHEMA).rdd
            if again.getNumPartitions() != wanted:
                again = spread(data, wanted).mapInArrow(store, STORED_SCHEMA).rdd
            # A step of its own: `again` stays unpersisted, or its tasks would not bring rows along.
            kept = again.mapPartitions(lambda records: records)
            kept.persist(StorageLevel.MEMORY_AND_DISK)
            records = sorted(kept.collect(), key=lambda record: record.part)
        self._kept.append(kept)
        sample = next(bytes(record.sample) for record in records if record.rows)
        rows = tuple(record.rows for record in records)
        parts = Parts(role, columns, rows, tuple(record.digest for record in records))
        return _Stored(kept, again, parts, sample)

    def _iterate(
        self,
        what: str,
        master: KerasMaster,
        learner: Callable[[], KerasLearner],
        stored: _Stored,
        epoch: int,
        step: int | None,
        steps: int,
    ) -> Sum:
        parts = stored.parts
        with self.sent(as_arrays(master.model.weights)) as state, self._named(what):
            work = Work(self._name, self._plan, parts, learner, state, epoch, step, steps)
            found = stored.kept.mapPartitionsWithIndex(work)
            groups = 0 if step is None else num_groups(len(parts.rows))
            if groups:
                found = found.partitionBy(groups, int).mapPartitions(added)
            try:
                whole = total(each for _, each in found.collect())
            finally:
                with suppress(Exception):  # else Spark keeps a shuffle's files for long
                    found._jrdd.rdd().cleanShuffleDependencies(False)
            if not whole.missing:
                return whole
            # Each of them now computes where it has just got its rows.
            moved = sorted(set(whole.missing))
            _log.info("Moving partitions %s of the %s rows to other executors", moved, parts.role)
            again = stored.again.mapPartitionsWithIndex(work)
            rest = self._context.runJob(again, lambda pairs: pairs, moved)
            return total([replace(whole, missing=()), *(each for _, each in rest)])

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        from py4j.protocol import Py4JJavaError  # which pyspark-client has not

        try:
            with named_jobs(self._context, self._group, what):
                yield
        except (Py4JJavaError, PySparkException) as error:
            raise explained(error) from None


def spread(data: DataFrame, partitions: int) -> DataFrame:
    """Return the rows in so many partitions, each in the same order if Spark computes it again.

    A shuffle alone brings the rows of a partition in any order.
    """
    order = functions.xxhash64(*without_vectors(data))
    return data.repartition(partitions).sortWithinPartitions(order)


def explained(error: Exception) -> SparkdlError:
    """Return what the Python of a task raised, as far as Spark's text shows it."""
    if problem := parse_problem(str(error)):
        return problem.at_driver()
    return JobFailedError(f"a Spark job of the training failed: {raised_in_task(error)}")
