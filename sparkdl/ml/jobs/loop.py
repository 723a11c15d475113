"""The driver's loop of a training as Spark jobs: epochs, iterations, validation, checkpoints.

Runs in: driver

```text
 driver   state ──broadcast──▶ tasks ──gradients──▶ groups or slices ──sums──▶ driver: one update
```

The driver writes a checkpoint after each epoch. A fit resumes only from checkpoints of the same
fit: the folder's name is a digest of its settings and all its rows. The folds and grids of a tuning
may therefore share a `checkpoint_dir`.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from zipfile import BadZipFile

import msgspec
import numpy as np
import pyarrow.fs as pafs
from pyspark.sql import DataFrame

from sparkdl.core.errors import CheckpointError, ConfigError
from sparkdl.core.paths import absolute_url
from sparkdl.driver.executors.sessions import default_fs
from sparkdl.ml.estimators.training import warn_of_no_numbers
from sparkdl.ml.jobs.rows import num_steps, read_sample
from sparkdl.ml.jobs.spark import Jobs, KeptRows
from sparkdl.ml.jobs.task import Aggregation, LearnerSpec, Master, Sum, Work, num_groups, total
from sparkdl.storage.systems import locate, open_storage
from sparkdl.values.ndarrays import Array

_log = logging.getLogger(__name__)
_FILE = "epoch.npz"
_ABOUT = tuple[int, dict[str, list[float]]]
"""The content of a file's first array: the number of epochs done, and the history."""


@dataclass(frozen=True)
class Plan:
    """The settings of a training as jobs.

    Attributes:
        partitions: number of partitions of the rows; None for as many as they have.
        batch_size: rows of a mini-batch in each of them, on average.
        sync_every: steps between two averages; 1 averages gradients.
        seed: of the order of the rows, and of random layers.
        checkpoint_dir: folder that outlives the driver; None for no checkpoints.
        identity: distinguishes this training, besides these settings and the rows.
    """

    partitions: int | None
    batch_size: int
    epochs: int
    sync_every: int
    aggregation: Aggregation
    shuffle: bool
    seed: int
    retries: int
    checkpoint_dir: str | None
    identity: tuple[object, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of a training: history (one value an epoch for each metric), rows and time."""

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

    def run(self, training: DataFrame, validation: DataFrame | None) -> Outcome:
        """Train.

        Raises:
            ConfigError: if it cannot work as asked; before the first iteration.
            JobFailedError: if a job failed.
            CheckpointError: if a checkpoint could not be read or written.
        """
        start_s, plan, master = time.monotonic(), self._plan, self._master
        columns = master.columns()
        kept = self._jobs.keep(training, "training", columns, plan.partitions)
        held = None
        if validation is not None:
            held = self._jobs.keep(validation, "validation", columns, plan.partitions)
        master.begin(read_sample(kept.sample))
        checkpoints = self._checkpoints(training, kept)
        history: dict[str, list[float]] = {}
        first = 0
        if checkpoints and (progress := checkpoints.read()):
            master.restore(progress.arrays)
            first = progress.epochs
            history = {name: list(values) for name, values in progress.history.items()}
        iterations = 0
        for epoch in range(first, plan.epochs):
            master.epoch_begins(epoch)
            iterations += self._epoch(epoch, kept, held, history)
            is_last = master.epoch_ended(epoch, {name: v[-1] for name, v in history.items()})
            if checkpoints:
                # A fit that resumes after an early end must not train on.
                done = plan.epochs if is_last else epoch + 1
                checkpoints.write(Progress(done, master.save(), history))
            if is_last:
                break
        master.end()
        if checkpoints:
            checkpoints.delete()
        warn_of_no_numbers(history.get("loss", ()))
        return Outcome(history, sum(kept.rows), iterations, time.monotonic() - start_s)

    def _epoch(
        self,
        epoch: int,
        kept: KeptRows,
        held: KeptRows | None,
        history: dict[str, list[float]],
    ) -> int:
        """Train one epoch; return the iterations."""
        plan, start_s = self._plan, time.monotonic()
        steps = num_steps(kept.rows, plan.batch_size * len(kept.rows))
        sums: list[Sum] = []
        rounds = range(0, steps, plan.sync_every)
        for start in rounds:
            taken = tuple(range(start, min(start + plan.sync_every, steps)))
            what = f"training, epoch {epoch}, steps {taken[0]}-{taken[-1]} of {steps}"
            with self._jobs.sent(self._master.state()) as state:
                work = self._work(kept, state, epoch, taken, steps)
                found = self._jobs.run(kept, work, what)
            assert found.vector is not None
            # By the rows, of which partitions have different numbers.
            self._master.apply(replace(found, vector=found.vector / found.weight))
            # The metrics alone: they are of the epoch, and the vector is of these steps.
            sums = [total([*sums, Sum(0, metrics=found.metrics)])]
        logs = self._master.metrics(sums[0].metrics)
        if held is not None:
            with self._jobs.sent(self._master.state()) as state:
                found = self._jobs.run(held, self._work(held, state), f"validation, epoch {epoch}")
            measured = self._master.metrics(found.metrics)
            logs |= {f"val_{name}": value for name, value in measured.items()}
        for name, value in logs.items():
            history.setdefault(name, []).append(value)
        seconds = time.monotonic() - start_s
        shown = ", ".join(f"{name} {value:.4g}" for name, value in logs.items())
        _log.info("Epoch %d: %d iterations in %.1f s, %s", epoch, len(rounds), seconds, shown)
        return len(rounds)

    def _work(
        self,
        kept: KeptRows,
        state: object,
        epoch: int = 0,
        steps: tuple[int, ...] = (),
        steps_of_epoch: int = 1,
    ) -> Work:
        plan, partitions = self._plan, len(kept.rows)
        return Work(
            self._jobs.name,
            self._spec,
            state,  # type: ignore[arg-type]
            kept.role,
            kept.digests,
            epoch,
            steps,
            steps_of_epoch,
            plan.seed,
            plan.shuffle,
            plan.aggregation,
            num_groups(plan.aggregation, partitions) if steps else 0,
        )

    def _checkpoints(self, data: DataFrame, kept: KeptRows) -> Checkpoints | None:
        if self._plan.checkpoint_dir is None:
            return None
        url = absolute_url(self._plan.checkpoint_dir, default_fs(data.sparkSession), os.getcwd())
        # Where the folder is and how many jobs may fail do not make it another training.
        plan = replace(self._plan, checkpoint_dir=None, retries=0)
        # Functions that make models cannot be compared, but the shapes of their weights can.
        shapes = [array.shape for array in self._master.state()]
        return Checkpoints(url, [plan, kept.rows, kept.digests, shapes])


@dataclass(frozen=True)
class Progress:
    """How far a training is.

    Attributes:
        epochs: that are done.
        arrays: what the model's `save` returned.
        history: metric to its values, one an epoch.
    """

    epochs: int
    arrays: Sequence[Array]
    history: Mapping[str, Sequence[float]]


class Checkpoints:
    """The folder of one fit.

    Args:
        parent: URL of the folder that fits share.
        identity: of the fit: what differs between two trainings.

    Raises:
        ConfigError: if the storage cannot be opened.
    """

    def __init__(self, parent: str, identity: Sequence[object]) -> None:
        digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
        self.url = f"{parent.rstrip('/')}/jobs-{digest}"
        storage, self._folder = locate(self.url)
        self._system = open_storage(storage)

    def read(self) -> Progress | None:
        """Return the progress of an earlier run of the same fit; None if there is none.

        Raises:
            CheckpointError: if the checkpoint cannot be read.
        """
        path = f"{self._folder}/{_FILE}"
        try:
            if self._system.get_file_info(path).type == pafs.FileType.NotFound:
                return None
            with self._system.open_input_file(path) as file:
                content = file.read()
            # The folder may be writable for others, and a pickle is code.
            with np.load(io.BytesIO(content), allow_pickle=False) as found:
                about, *arrays = (found[f"arr_{n}"] for n in range(len(found.files)))
            epochs, history = msgspec.msgpack.decode(about.tobytes(), type=_ABOUT)
            progress = Progress(epochs, arrays, history)
        except (OSError, ValueError, KeyError, BadZipFile, msgspec.MsgspecError) as error:
            raise CheckpointError(
                f"the checkpoint {self.url}/{_FILE} cannot be read: {error}. Delete the folder to "
                "train from the start"
            ) from error
        _log.info("The training continues after epoch %d of %s", progress.epochs, self.url)
        return progress

    def write(self, progress: Progress) -> None:
        """Write the checkpoint, then replace the previous one.

        Raises:
            CheckpointError: if it cannot be written; the previous one remains.
        """
        file = io.BytesIO()
        about = msgspec.msgpack.encode((progress.epochs, progress.history))
        np.savez(file, np.frombuffer(about, np.uint8), *progress.arrays, allow_pickle=False)
        try:
            self._system.create_dir(self._folder, recursive=True)
            # Renamed once it is whole, so a crash leaves the checkpoint before.
            draft = f"{self._folder}/draft"
            with self._system.open_output_stream(draft) as stream:
                stream.write(file.getvalue())
            self._system.move(draft, f"{self._folder}/{_FILE}")
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint could be written to {self.url}: {error}"
            ) from error

    def delete(self) -> None:
        """Delete the folder: the training is over."""
        try:
            self._system.delete_dir(self._folder)
        except (OSError, ConfigError) as error:
            _log.warning(
                "The checkpoint in %s was not deleted: %s. Delete it by hand", self.url, error
            )
