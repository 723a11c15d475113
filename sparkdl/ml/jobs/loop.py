"""The driver's loop of a training as Spark jobs: epochs, iterations, validation.

```text
 driver   state ──broadcast──▶ tasks ──gradients──▶ groups ──sums──▶ driver: one update
```
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame

from sparkdl.ml.estimators.training import warn_of_no_numbers
from sparkdl.ml.jobs.rows import num_steps, read_sample
from sparkdl.ml.jobs.spark import Jobs, KeptRows
from sparkdl.ml.jobs.task import LearnerSpec, Master, Sum, Work, total

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """The settings of a training as jobs.

    Attributes:
        partitions: number of partitions of the rows; None for as many as they have.
        batch_size: rows of a mini-batch in each of them, on average.
        seed: of the order of the rows, and of random layers.
    """

    partitions: int | None
    batch_size: int
    epochs: int
    shuffle: bool
    seed: int


@dataclass(frozen=True)
class JobsResult:
    """The result of a training as Spark jobs.

    Attributes:
        model: the trained model, on the driver's CPU.
        history: `loss`, and `val_loss` with validation rows; one value an epoch.
        rows: in an epoch.
        iterations: training jobs run in this program.
        seconds: from the first job to the last.
    """

    model: Any
    history: dict[str, list[float]]
    rows: int
    iterations: int
    seconds: float


class Loop:
    """One training.

    Args:
        jobs: open, and left open.
        spec: makes the workers' models; `master` is the driver's.
    """

    def __init__(self, jobs: Jobs, plan: Plan, master: Master, spec: LearnerSpec) -> None:
        self._jobs, self._plan, self._master, self._spec = jobs, plan, master, spec

    def run(self, training: DataFrame, validation: DataFrame | None) -> JobsResult:
        """Train.

        Raises:
            ConfigError: if it cannot work as asked; before the first iteration.
            JobFailedError: if a job failed.
        """
        start_s, plan, master = time.monotonic(), self._plan, self._master
        columns = master.columns()
        kept = self._jobs.keep(training, "training", columns, plan.partitions)
        held = None
        if validation is not None:
            held = self._jobs.keep(validation, "validation", columns, plan.partitions)
        master.begin(read_sample(kept.sample, columns))
        history: dict[str, list[float]] = {}
        iterations = 0
        for epoch in range(plan.epochs):
            master.epoch_begins(epoch)
            iterations += self._epoch(epoch, kept, held, history)
            if master.epoch_ended(epoch, {name: v[-1] for name, v in history.items()}):
                break
        master.end()
        warn_of_no_numbers(history.get("loss", ()))
        seconds = time.monotonic() - start_s
        return JobsResult(master.model, history, sum(kept.rows), iterations, seconds)

    def _epoch(
        self,
        epoch: int,
        kept: KeptRows,
        held: KeptRows | None,
        history: dict[str, list[float]],
    ) -> int:
        """Train one epoch; return the iterations."""
        start_s = time.monotonic()
        steps = num_steps(kept.rows, self._plan.batch_size * len(kept.rows))
        metrics = Sum(0)
        for step in range(steps):
            found = self._job(kept, f"training, epoch {epoch}, step {step} of {steps}", epoch, step)
            assert found.vector is not None
            # By the rows, of which partitions have different numbers.
            self._master.apply(replace(found, vector=found.vector / found.weight))
            metrics = total([metrics, Sum(0, metrics=found.metrics)])
        logs = self._master.metrics(metrics.metrics)
        if held is not None:
            found = self._job(held, f"validation, epoch {epoch}", epoch, None)
            measured = self._master.metrics(found.metrics)
            logs |= {f"val_{name}": value for name, value in measured.items()}
        for name, value in logs.items():
            history.setdefault(name, []).append(value)
        seconds = time.monotonic() - start_s
        shown = ", ".join(f"{name} {value:.4g}" for name, value in logs.items())
        _log.info("Epoch %d: %d iterations in %.1f s, %s", epoch, steps, seconds, shown)
        return steps

    def _job(self, rows: KeptRows, what: str, epoch: int, step: int | None) -> Sum:
        plan = self._plan
        with self._jobs.sent(self._master.state()) as state:
            work = Work(
                self._jobs.name,
                self._spec,
                state,
                rows.role,
                rows.columns,
                rows.digests,
                epoch,
                step,
                num_steps(rows.rows, plan.batch_size * len(rows.rows)),
                plan.seed,
                plan.shuffle,
            )
            return self._jobs.run(rows, work, what)
