"""Runs of MLflow, and the one thread of this program that writes to them.

Runs in: driver

Trainings put jobs into its queue and never wait. Failed writes are counted and logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from sparkdl.core.errors import NodeFailedError
from sparkdl.driver.threads import Outcome

MAX_TEXT = 500
"""Characters of a parameter or tag."""
END_S = 10.0
"""The program's end waits so long for a server that did not answer last, or never has."""
_EXIT_S = 60.0
_MAX_WAITING = 50_000
"""Jobs in the queue, beyond which metrics are dropped."""
_BATCH = 1000
"""Metrics that a server takes in one request."""
_log = logging.getLogger(__name__)
_Job = Callable[[], None]


@dataclass
class Run:
    """A run of MLflow, of one or more spans.

    Attributes:
        uri: of MLflow's tracking.
        parent: its run, or the id of one of the user's.
        client: of the writer.
        is_there: whether the run could be made; until it is tried that is assumed.
        lost: how much could not be written.
    """

    name: str
    uri: str
    parent: Run | str | None = None
    client: Any = None
    run_id: str = ""
    is_there: bool = True
    lost: int = 0
    params: set[str] = field(default_factory=set)
    reported: set[str] = field(default_factory=set)
    has_failure: bool = False


class Writer(threading.Thread):
    """Performs the calls to MLflow, in order."""

    def __init__(self) -> None:
        super().__init__(name="sparkdl-mlflow", daemon=True)
        self._jobs: SimpleQueue[tuple[Run, _Job | Any] | None] = SimpleQueue()
        self._is_answered = False

    def do(self, run: Run, job: _Job) -> None:
        """Queue a job."""
        self._jobs.put((run, job))

    def metric(self, run: Run, name: str, value: float, step: int, time_s: float) -> None:
        """Queue a metric, unless too much waits already."""
        # Metrics alone are dropped: parameters, tags and ends of runs are few.
        if self._jobs.qsize() >= _MAX_WAITING:
            _lose(run, 1, "MLflow is slower than the training reports")
            return
        from mlflow.entities import Metric

        self._jobs.put((run, Metric(name, float(value), int(time_s * 1000), step)))

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until all queued jobs are done."""
        done: Outcome[None] = Outcome()
        self.do(_NO_RUN, partial(done.of, lambda: None))
        return done.wait(timeout_s)

    def end(self) -> None:
        """Finish, as far as MLflow answers."""
        if not self.flush(_EXIT_S if self._is_answered else END_S):
            _log.warning(
                "MLflow did not answer in time: %d entries are lost. Check the tracking server, "
                "MLFLOW_TRACKING_URI",
                self._jobs.qsize(),
            )
            return
        self._jobs.put(None)
        self.join(END_S)

    def run(self) -> None:
        """Do jobs until the end; metrics of one run that follow each other go together."""
        taken = self._jobs.get()
        while taken is not None:
            run, job = taken
            if callable(job):
                self._try(run, job, 1)
                taken = self._jobs.get()
                continue
            metrics, taken = self._batch(run, job)
            write = partial(self._write, run, metrics)
            self._try(run, write, len(metrics))

    def _batch(self, run: Run, first: Any) -> tuple[list[Any], tuple[Run, Any] | None]:
        """Return the metrics that can be written at once, and what comes then."""
        metrics = [first]
        while len(metrics) < _BATCH:
            try:
                taken = self._jobs.get_nowait()
            except Empty:
                break
            # The order stays: metrics go together only with their neighbours.
            if taken is None or taken[0] is not run or callable(taken[1]):
                return metrics, taken
            metrics.append(taken[1])
        return metrics, _NOTHING

    @staticmethod
    def _write(run: Run, metrics: list[Any]) -> None:
        run.client.log_batch(run.run_id, metrics=metrics)

    def _try(self, run: Run, job: _Job, count: int) -> None:
        if not run.is_there:
            run.lost += count
            return
        try:
            job()
            self._is_answered = True
        except Exception as error:  # noqa: BLE001 (whatever it is, the training goes on)
            self._is_answered = False
            _lose(run, count, f"{type(error).__name__}: {error}")


_NO_RUN = Run("", "")
_NOTHING: tuple[Run, _Job] = (_NO_RUN, lambda: None)


def _lose(run: Run, count: int, why: str) -> None:
    """Count failed writes; log the first one."""
    if not run.lost:
        _log.warning(
            "A part of %s is not in MLflow, and the training continues: %s. Check the tracking "
            "server, MLFLOW_TRACKING_URI",
            run.name,
            why,
        )
    run.lost += count


# In the writer's thread.


def begin_run(run: Run, experiment: str, time_s: float) -> None:
    """Make the run, in the given experiment, else its parent's, else the one that is set."""
    from mlflow import MlflowClient
    from mlflow.tracking.context.registry import resolve_tags
    from mlflow.tracking.fluent import _get_experiment_id
    from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

    run.is_there = False  # unless all of this works
    run.client = client = MlflowClient(run.uri)
    parent = run.parent.run_id if isinstance(run.parent, Run) else run.parent
    tags = resolve_tags({MLFLOW_PARENT_RUN_ID: parent} if parent else {})
    if parent and not experiment:
        experiment = client.get_run(parent).info.experiment_id
    made = client.create_run(
        experiment or _get_experiment_id(), int(time_s * 1000), tags, f"sparkdl {run.name}"
    )
    run.run_id, run.is_there = made.info.run_id, True


def write_params(run: Run, params: Mapping[str, Any]) -> None:
    """Write parameters; a parameter that the run has already keeps its first value."""
    from mlflow.entities import Param

    new = {name: str(value)[:MAX_TEXT] for name, value in params.items()}
    found = [Param(name, value) for name, value in new.items() if name not in run.params]
    run.params.update(new)
    for start in range(0, len(found), 100):  # which is a server's limit
        run.client.log_batch(run.run_id, params=found[start : start + 100])


def write_tag(run: Run, name: str, value: str) -> None:
    """Write a tag."""
    run.client.set_tag(run.run_id, name, value)


def write_failure(run: Run, error: BaseException) -> None:
    """Write why a training has failed: the root cause as a tag, all of it as a file."""
    if run.has_failure:
        return  # the cluster's own; the fit only repeats it
    run.has_failure = True
    headline = f"{type(error).__name__}: {error}"
    if isinstance(error, NodeFailedError):
        headline = error.root_cause.headline()
    write_tag(run, "sparkdl.failure", headline[:MAX_TEXT])
    run.client.log_text(run.run_id, f"{type(error).__name__}: {error}\n", "failure.txt")


def end_run(run: Run, status: str, time_s: float) -> None:
    """End the run; log and tag the number of lost entries."""
    if run.lost:
        _log.warning("MLflow lacks %d entries of %s (run %s)", run.lost, run.name, run.run_id)
        write_tag(run, "sparkdl.lost", str(run.lost))
    run.client.set_terminated(run.run_id, status, int(time_s * 1000))
