"""Makes runs of MLflow of what trains.

Runs in: driver
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sparkdl.core.errors import FrameworkMissingError
from sparkdl.core.tracking import Kind, track_by
from sparkdl.driver.controller import Controller
from sparkdl.driver.events import Changed, Ended, Report
from sparkdl.driver.lifecycle import state as states
from sparkdl.mlflow.model import save_model
from sparkdl.mlflow.runs import (
    MAX_TEXT,
    Run,
    Writer,
    begin_run,
    end_run,
    write_failure,
    write_params,
    write_tag,
)

_log = logging.getLogger(__name__)

_WITH_INNER = ("fit", "trial")
"""Spans whose run also records a launch or a fit within them."""


def autolog(disable: bool = False, log_models: bool = True) -> None:
    """Record each training from now on as a run of MLflow, in its active experiment.

    Launches, fits of estimators and trials of searches are runs. Trials are nested in the run of
    their search. All are nested in the active run of the thread that begins them. No fault of
    MLflow harms a training, or slows it.

    Args:
        disable: stop tracking; waits for pending writes, as `flush` does.
        log_models: save the model that an estimator returns, by `mlflow.keras` or
            `mlflow.pytorch`.

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
    _program.begin(log_models)


def flush(timeout_s: float | None = None) -> bool:
    """Wait until all that is known so far is written, or has failed; return whether it is over."""
    return _program.flush(timeout_s)


@dataclass
class _Span:
    """A training, and the run that records it."""

    kind: str
    run: Run
    is_owner: bool


class _Tracker:
    """Reports trainings to MLflow; see `sparkdl.core.tracking.Tracker`."""

    def __init__(self, writer: Writer, logs_models: bool) -> None:
        self._writer = writer
        self._logs_models = logs_models

    def begin(self, kind: Kind, within: _Span | None, facts: dict[str, Any]) -> _Span:
        """Begin a run, or go on in the one around it."""
        estimator = facts.get("estimator")
        if within is not None and within.kind in _WITH_INNER:
            span = _Span(kind, within.run, False)
        else:
            name = f"trial {facts['number']}" if kind == "trial" else kind
            name = type(estimator).__name__ if estimator is not None else name
            run, begin = self._run(name, within.run if within else None)
            begin()
            span = _Span(kind, run, True)
        params = facts.get("params", {}) if estimator is None else _params_of(estimator)
        self._writer.do(span.run, partial(write_params, span.run, params))
        return span

    def note(self, span: _Span, **facts: Any) -> None:
        """Take a model, the value of a trial, the best one of a search."""
        run, now_s = span.run, time.time()
        if facts.get("value") is not None:
            self._writer.metric(run, "value", facts["value"], 0, now_s)
        if best := facts.get("best"):
            params = {f"best_{name}": value for name, value in best.params.items()}
            self._writer.do(run, partial(write_params, run, params))
            self._writer.metric(run, "best_value", best.value, 0, now_s)
        model = facts.get("model")
        if model is not None and hasattr(model, "history"):
            for name, values in model.history.items():
                # A metric that was reported step by step already has another axis.
                key = f"epoch_{name}" if name in run.reported else name
                for epoch, value in enumerate(values):
                    if value is not None:
                        self._writer.metric(run, key, value, epoch, now_s)
            if self._logs_models:
                self._writer.do(run, partial(self._save_model, run, model))

    def end(self, span: _Span | None, error: BaseException | None) -> None:
        """End the run of the span, if it is its own."""
        if span is None:
            return
        if error is not None and not _is_stop(error):
            self._writer.do(span.run, partial(write_failure, span.run, error))
        if span.is_owner:
            status = "FAILED" if error is not None else "FINISHED"
            self.finish(span.run, "KILLED" if error and _is_stop(error) else status)

    def cluster(self, within: _Span | None) -> _Follower:
        """Follow a cluster, in the run around it or in one of its own."""
        if within is not None and within.kind in _WITH_INNER:
            return _Follower(self, self._writer, within.run)
        run, begin = self._run("launch", within.run if within else None)
        return _Follower(self, self._writer, run, begin)

    def finish(self, run: Run, status: str) -> None:
        """End a run."""
        self._writer.do(run, partial(end_run, run, status, time.time()))

    def _save_model(self, run: Run, model: Any) -> None:
        save_model(run.client, run.run_id, model)

    def _run(self, name: str, parent: Run | str | None) -> tuple[Run, Callable[[], None]]:
        """Return a run, placed by this thread's active run, and the function that creates it."""
        import mlflow
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_ID

        active = mlflow.active_run() if parent is None else None
        parent = parent or (active.info.run_id if active else None)
        run = Run(name, mlflow.get_tracking_uri(), parent)
        # `set_experiment` sets it; the program may set another one before this run is made.
        chosen = MLFLOW_EXPERIMENT_ID.get() or ""
        experiment = active.info.experiment_id if active else "" if parent else chosen
        return run, partial(self._writer.do, run, partial(begin_run, run, experiment, time.time()))


class _Follower:
    """Follows one cluster.

    Args:
        begin: has the run made, if it is the cluster's own: once there is a cluster to follow.
    """

    def __init__(
        self, tracker: _Tracker, writer: Writer, run: Run, begin: Callable[[], None] | None = None
    ) -> None:
        self._tracker, self._writer = tracker, writer
        self._run, self._begin = run, begin
        self._is_over = False

    def follow(self, controller: Controller) -> None:
        """Subscribe to the events of a cluster."""
        spec = controller.spec
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
        run = self._run
        if self._begin is not None:
            self._begin()
        self._writer.do(run, partial(write_params, run, params))
        self._writer.do(run, partial(write_tag, run, "sparkdl.cluster", spec.cluster_id))
        controller.events.subscribe(self._report, Report)
        controller.events.subscribe(partial(self._end, controller), Changed, Ended)

    def _report(self, report: Report) -> None:
        for name, value in report.metrics.items():
            key = name if report.rank == 0 else f"{_dashed(report.node)}/{name}"
            self._run.reported.add(key)
            self._writer.metric(self._run, key, value, report.step, report.time_s)

    def _end(self, controller: Controller, event: Changed | Ended) -> None:
        """Record the cluster's outcome once it has ended."""
        # Once: `Ended` follows the `Changed` with which the cluster was over.
        if self._is_over or (isinstance(event, Changed) and not event.is_over):
            return
        self._is_over = True
        state = controller.look(lambda view: view.state)
        before, error = states.before_stop(state), states.failure_of(state)
        restarts = getattr(getattr(before, "roster", None), "history", None)
        if restarts is not None and restarts.restarts_s:
            count = len(restarts.restarts_s)
            self._writer.metric(self._run, "restarts", count, 0, time.time())
        if error is not None:
            self._writer.do(self._run, partial(write_failure, self._run, error))
        if self._begin is not None:
            is_done = isinstance(before, states.Finished)
            status = "FAILED" if error else "FINISHED" if is_done else "KILLED"
            self._tracker.finish(self._run, status)


def _params_of(estimator: Any) -> dict[str, Any]:
    values = {param.name: estimator.getOrDefault(param) for param in estimator.params}
    return {name: value for name, value in values.items() if value is not None}


def _is_stop(error: BaseException) -> bool:
    """Whether a person or the pruner of a search has ended the training."""
    return isinstance(error, KeyboardInterrupt) or type(error).__name__ == "TrialPruned"


def _dashed(node: str) -> str:
    return node.replace(":", "-")


class _Program:
    """The tracking of this program."""

    def __init__(self) -> None:
        self._writer: Writer | None = None
        self._tracker: _Tracker | None = None

    def begin(self, logs_models: bool) -> None:
        if self._writer is None:
            self._writer = Writer()
            self._writer.start()
            # The writing thread is a daemon, so waiting writes would be lost at the program's end.
            atexit.register(self.end)
        self._tracker = _Tracker(self._writer, logs_models)
        track_by(self._tracker)

    def flush(self, timeout_s: float | None) -> bool:
        return self._writer is None or self._writer.flush(timeout_s)

    def end(self) -> None:
        track_by(None)
        atexit.unregister(self.end)
        writer, self._writer, self._tracker = self._writer, None, None
        if writer is not None:
            writer.end()


_program = _Program()
