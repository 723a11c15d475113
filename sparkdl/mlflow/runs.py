"""Runs of MLflow, and the one thread of this program that writes to them.

Trainings put jobs into its queue and never wait. MLflow's own queue would keep a program from
ending while it retries a server that does not answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from sparkdl.core.errors import NodeFailedError
from sparkdl.core.scratch import scratch_folder
from sparkdl.driver.threads import Outcome

MAX_TEXT = 500
"""Characters of a parameter or tag."""
END_S = 10.0
"""The program's end waits so long for a server that did not answer last, or never has."""
_EXIT_S = 60.0
_MAX_WAITING = 50_000
"""Jobs in the queue, beyond which metrics are dropped."""
_log = logging.getLogger(__name__)


class Writer(threading.Thread):
    """Performs the calls to MLflow, in order."""

    def __init__(self) -> None:
        super().__init__(name="sparkdl-mlflow", daemon=True)
        self._jobs: SimpleQueue[tuple[Run | None, Callable[[], None]] | None] = SimpleQueue()
        self._is_answered = False

    def do(self, run: Run | None, job: Callable[..., None], *arguments: Any) -> None:
        """Queue a job."""
        self._jobs.put((run, partial(job, *arguments)))

    def metrics(self, run: Run, values: Mapping[str, float], step: int, time_s: float) -> None:
        """Queue the values of a step, unless too much waits already."""
        # Metrics alone are dropped: parameters, tags and ends of runs are few.
        if self._jobs.qsize() >= _MAX_WAITING:
            run.lose("MLflow is slower than the training reports")
        else:
            self.do(run, run.write_metrics, values, step, time_s)

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until all queued jobs are done."""
        done: Outcome[None] = Outcome()
        self.do(None, done.of, lambda: None)
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
        """Do jobs until the end."""
        while (taken := self._jobs.get()) is not None:
            run, job = taken
            if run is not None and not run.is_there:
                continue
            try:
                job()
                self._is_answered = True
            except Exception as error:  # noqa: BLE001 (whatever it is, the training goes on)
                self._is_answered = False
                if run is not None:
                    run.lose(f"{type(error).__name__}: {error}")


@dataclass
class Run:
    """A run of MLflow, of one or more spans. Its methods, except `lose`, are jobs of the writer.

    Attributes:
        uri: of MLflow's tracking.
        experiment: its id; the parent's, or the one that is set, if it is empty.
        parent: its run, or the id of one of the user's.
        is_there: whether the run could be made; until it is tried that is assumed.
        reported: names of the metrics that came step by step.
    """

    name: str
    uri: str
    experiment: str
    parent: Run | str | None
    client: Any = None
    run_id: str = ""
    is_there: bool = True
    is_lossy: bool = False
    has_failure: bool = False
    params: set[str] = field(default_factory=set)
    reported: set[str] = field(default_factory=set)

    def lose(self, why: str) -> None:
        """Log the first failed write."""
        if not self.is_lossy:
            self.is_lossy = True
            _log.warning(
                "A part of %s is not in MLflow, and the training continues: %s. Check the tracking "
                "server, MLFLOW_TRACKING_URI",
                self.name,
                why,
            )

    def begin(self, time_s: float) -> None:
        """Make the run."""
        from mlflow import MlflowClient
        from mlflow.tracking.context.registry import resolve_tags
        from mlflow.tracking.fluent import _get_experiment_id
        from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

        self.is_there = False  # unless all of this works
        self.client = client = MlflowClient(self.uri)
        parent = self.parent.run_id if isinstance(self.parent, Run) else self.parent
        tags = resolve_tags({MLFLOW_PARENT_RUN_ID: parent} if parent else {})
        experiment = self.experiment
        if parent and not experiment:
            experiment = client.get_run(parent).info.experiment_id
        made = client.create_run(
            experiment or _get_experiment_id(), int(time_s * 1000), tags, f"sparkdl {self.name}"
        )
        self.run_id, self.is_there = made.info.run_id, True

    def write_params(self, params: Mapping[str, Any]) -> None:
        """Write parameters; a parameter that the run has already keeps its first value."""
        from mlflow.entities import Param

        new = {name: str(value)[:MAX_TEXT] for name, value in params.items()}
        found = [Param(name, value) for name, value in new.items() if name not in self.params]
        self.params.update(new)
        for start in range(0, len(found), 100):  # which is a server's limit
            self.client.log_batch(self.run_id, params=found[start : start + 100])

    def write_metrics(self, values: Mapping[str, float], step: int, time_s: float) -> None:
        """Write the values of a step."""
        from mlflow.entities import Metric

        time_ms = int(time_s * 1000)
        found = [Metric(name, float(value), time_ms, step) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=found)

    def write_tag(self, name: str, value: str) -> None:
        """Write a tag."""
        self.client.set_tag(self.run_id, name, value)

    def write_failure(self, error: BaseException) -> None:
        """Write why a training has failed: the root cause as a tag, all of it as a file."""
        if self.has_failure:
            return  # the cluster's own; the fit only repeats it
        self.has_failure = True
        headline = text = f"{type(error).__name__}: {error}"
        if isinstance(error, NodeFailedError):
            headline = error.root_cause.headline()
        self.write_tag("sparkdl.failure", headline[:MAX_TEXT])
        self.client.log_text(self.run_id, f"{text}\n", "failure.txt")

    def save_model(self, model: Any) -> None:
        """Save a model that an estimator returned, as MLflow's own flavours do: `runs:/…/model`."""
        if not hasattr(model, "getModel"):
            _log.info("The model of %s is a folder of its own, and not in MLflow", model.uid)
            return
        found = model.getModel()
        if any(kind.__module__.startswith("torch.") for kind in type(found).__mro__):
            import mlflow.pytorch as flavour
        else:
            import mlflow.keras as flavour
        with scratch_folder() as scratch:
            folder = str(scratch / "model")
            # Named here: otherwise MLflow loads the model in another process, for its imports.
            wanted = flavour.get_default_pip_requirements()
            flavour.save_model(found, folder, pip_requirements=wanted)
            self.client.log_artifacts(self.run_id, folder, "model")

    def end(self, status: str, time_s: float) -> None:
        """End the run."""
        self.client.set_terminated(self.run_id, status, int(time_s * 1000))
