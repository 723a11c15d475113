"""Makes runs of MLflow of what trains.

One thread of this program writes to them. Trainings put jobs into its queue and never wait.
MLflow's own queue would keep a program from ending while it retries a server that does not answer.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from sparkdl.core.errors import FrameworkMissingError, NodeFailedError
from sparkdl.core.tracking import Kind, track_by
from sparkdl.driver.controller import Controller
from sparkdl.driver.events import Changed, Ended, Report
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.threads import Outcome

MAX_TEXT = 500
"""Characters of a parameter or tag."""
END_S = 10.0
"""The program's end waits so long for a server that did not answer last, or never has."""
_EXIT_S = 60.0
_MAX_WAITING = 50_000
"""Jobs in the queue, beyond which metrics are dropped."""
_log = logging.getLogger(__name__)


def autolog(disable: bool = False) -> None:
    """Record each training from now on as a run of MLflow, in its active experiment.

    Launches, fits of estimators and trials of searches are runs. Trials are nested in the run of
    their search. All are nested in the active run of the thread that begins them. A failure
    of MLflow neither ends a training nor slows it.

    Args:
        disable: stop tracking; waits for pending writes, as `flush` does.

    Raises:
        FrameworkMissingError: without MLflow: pip install mlflow-skinny.
    """
    if disable:
        _program.end()
        return
    try:
        import mlflow  # noqa: F401 (it takes seconds: now, and not when a training begins)
    except ImportError as error:
        raise FrameworkMissingError(
            "sparkdl.mlflow.autolog: MLflow is not installed: pip install mlflow-skinny"
        ) from error
    _program.begin()


def flush(timeout_s: float | None = None) -> bool:
    """Wait until all entries so far are written or have failed; return false after `timeout_s`."""
    return _program.writer is None or _program.writer.flush(timeout_s)


class Writer(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="sparkdl-mlflow", daemon=True)
        self._jobs: SimpleQueue[tuple[Run | None, Callable[[], None]] | None] = SimpleQueue()
        self._is_answered = False

    def do(self, run: Run | None, job: Callable[..., None], *arguments: Any) -> None:
        self._jobs.put((run, partial(job, *arguments)))

    def metrics(self, run: Run, values: Mapping[str, float], step: int, time_s: float) -> None:
        # Metrics alone are dropped: parameters, tags and ends of runs are few.
        if self._jobs.qsize() >= _MAX_WAITING:
            run.lose("MLflow is slower than the training reports")
        else:
            self.do(run, run.write_metrics, values, step, time_s)

    def flush(self, timeout_s: float | None) -> bool:
        done: Outcome[None] = Outcome()
        self.do(None, done.of, lambda: None)
        return done.wait(timeout_s)

    def end(self) -> None:
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
        if not self.is_lossy:
            self.is_lossy = True
            _log.warning(
                "A part of %s is not in MLflow, and the training continues: %s. Check the tracking "
                "server, MLFLOW_TRACKING_URI",
                self.name,
                why,
            )

    def begin(self, time_s: float) -> None:
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
        self.client.log_batch(self.run_id, params=found)

    def write_metrics(self, values: Mapping[str, float], step: int, time_s: float) -> None:
        from mlflow.entities import Metric

        time_ms = int(time_s * 1000)
        found = [Metric(name, float(value), time_ms, step) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=found)

    def write_tag(self, name: str, value: str) -> None:
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

    def end(self, status: str, time_s: float) -> None:
        self.client.set_terminated(self.run_id, status, int(time_s * 1000))


@dataclass
class _Span:
    """A training, and the run that records it: its own, or that of the span around it."""

    kind: str
    run: Run
    is_owner: bool


@dataclass
class _Tracker:
    """Reports trainings to MLflow; see `sparkdl.core.tracking`."""

    writer: Writer

    def begin(self, kind: Kind, within: _Span | None, facts: dict[str, Any]) -> _Span:
        estimator = facts.get("estimator")
        name = f"trial {facts['number']}" if kind == "trial" else kind
        span = self.span(type(estimator).__name__ if estimator is not None else name, within)
        span.kind = kind
        if span.is_owner:
            self.writer.do(span.run, span.run.begin, time.time())
        params = facts.get("params", {})
        if estimator is not None:
            values = {param.name: estimator.getOrDefault(param) for param in estimator.params}
            params = {name: value for name, value in values.items() if value is not None}
        self.writer.do(span.run, span.run.write_params, params)
        return span

    def span(self, name: str, within: _Span | None) -> _Span:
        """Return a span: of the run of the fit or trial around it, or of one of its own."""
        import mlflow
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_ID

        if within is not None and within.kind in ("fit", "trial"):
            return _Span(name, within.run, False)
        active = mlflow.active_run() if within is None else None
        parent = within.run if within else active.info.run_id if active else None
        # `set_experiment` sets it; the program may set another one before this run is made.
        chosen = MLFLOW_EXPERIMENT_ID.get() or ""
        experiment = active.info.experiment_id if active else "" if parent else chosen
        return _Span(name, Run(name, mlflow.get_tracking_uri(), experiment, parent), True)

    def note(self, span: _Span, **facts: Any) -> None:
        """Take a model, the value of a trial, the best one of a search."""
        run, now_s = span.run, time.time()
        if facts.get("value") is not None:
            self.writer.metrics(run, {"value": facts["value"]}, 0, now_s)
        if best := facts.get("best"):
            params = {f"best_{name}": value for name, value in best.params.items()}
            self.writer.do(run, run.write_params, params)
            self.writer.metrics(run, {"best_value": best.value}, 0, now_s)
        model = facts.get("model")
        if model is not None and hasattr(model, "history"):
            for name, values in model.history.items():
                # A metric that was reported step by step already has another axis.
                key = f"epoch_{name}" if name in run.reported else name
                for epoch, value in enumerate(values):
                    if value is not None:
                        self.writer.metrics(run, {key: value}, epoch, now_s)

    def end(self, span: _Span | None, error: BaseException | None) -> None:
        if span is None:
            return
        # A person, or the pruner of a search, has ended the training.
        is_stop = isinstance(error, KeyboardInterrupt) or type(error).__name__ == "TrialPruned"
        if error is not None and not is_stop:
            self.writer.do(span.run, span.run.write_failure, error)
        if span.is_owner:
            status = "KILLED" if is_stop else "FAILED" if error is not None else "FINISHED"
            self.writer.do(span.run, span.run.end, status, time.time())

    def cluster(self, within: _Span | None) -> _Follower:
        return _Follower(self.writer, self.span("launch", within))


@dataclass
class _Follower:
    """Follows one cluster. Its own run is made once there is a cluster to follow."""

    writer: Writer
    span: _Span
    is_over: bool = False

    def follow(self, controller: Controller) -> None:
        spec, run = controller.spec, self.span.run
        params = {
            "nodes": len(spec.nodes),
            "roles": ", ".join(node.name for node in spec.nodes)[:MAX_TEXT],
            "framework": spec.framework,
            "is_fed": spec.is_fed,
            "placement": spec.placement,
            "max_restarts": spec.settings.max_restarts,
            **({"checkpoint_dir": spec.checkpoint_dir} if spec.checkpoint_dir else {}),
            **({"num_gpus": spec.num_gpus} if spec.num_gpus is not None else {}),
        }
        if self.span.is_owner:
            self.writer.do(run, run.begin, time.time())
        self.writer.do(run, run.write_params, params)
        self.writer.do(run, run.write_tag, "sparkdl.cluster", spec.cluster_id)
        controller.events.subscribe(self._report, Report)
        controller.events.subscribe(partial(self._end, controller), Changed, Ended)

    def _report(self, report: Report) -> None:
        prefix = "" if report.rank == 0 else f"{report.node.replace(':', '-')}/"
        values = {f"{prefix}{name}": value for name, value in report.metrics.items()}
        self.span.run.reported.update(values)
        self.writer.metrics(self.span.run, values, report.step, report.time_s)

    def _end(self, controller: Controller, event: Changed | Ended) -> None:
        # Once: `Ended` follows the `Changed` with which the cluster was over.
        if self.is_over or (isinstance(event, Changed) and not event.is_over):
            return
        self.is_over, run, now_s = True, self.span.run, time.time()
        state = controller.look(lambda view: view.state)
        before, error = states.before_stop(state), states.failure_of(state)
        restarts = getattr(getattr(before, "roster", None), "history", None)
        if restarts is not None and restarts.restarts_s:
            self.writer.metrics(run, {"restarts": len(restarts.restarts_s)}, 0, now_s)
        if error is not None:
            self.writer.do(run, run.write_failure, error)
        if self.span.is_owner:
            is_done = isinstance(before, states.Finished)
            status = "FAILED" if error else "FINISHED" if is_done else "KILLED"
            self.writer.do(run, run.end, status, now_s)


class _Program:
    writer: Writer | None = None

    def begin(self) -> None:
        if self.writer is None:
            self.writer = Writer()
            self.writer.start()
            # The writing thread is a daemon, so waiting writes would be lost at the program's end.
            atexit.register(self.end)
        track_by(_Tracker(self.writer))

    def end(self) -> None:
        track_by(None)
        atexit.unregister(self.end)
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.end()


_program = _Program()
