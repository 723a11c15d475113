"""Makes runs of MLflow of what trains."""

from __future__ import annotations

import atexit
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from sparkdl.core.errors import FrameworkMissingError
from sparkdl.core.tracking import Kind, track_by
from sparkdl.driver.controller import Controller
from sparkdl.driver.events import Changed, Ended, Report
from sparkdl.driver.lifecycle import state as states
from sparkdl.mlflow.runs import MAX_TEXT, Run, Writer


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
    return _program.writer is None or _program.writer.flush(timeout_s)


@dataclass
class _Span:
    """A training, and the run that records it: its own, or that of the span around it."""

    kind: str
    run: Run
    is_owner: bool


@dataclass
class _Tracker:
    """Reports trainings to MLflow; see `sparkdl.core.tracking.Tracker`."""

    writer: Writer
    logs_models: bool

    def begin(self, kind: Kind, within: _Span | None, facts: dict[str, Any]) -> _Span:
        """Begin a run, or go on in the one around it."""
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
            if self.logs_models:
                self.writer.do(run, run.save_model, model)

    def end(self, span: _Span | None, error: BaseException | None) -> None:
        """End the run of the span, if it is its own."""
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
        """Follow a cluster, in the run around it or in one of its own."""
        return _Follower(self.writer, self.span("launch", within))


@dataclass
class _Follower:
    """Follows one cluster. Its own run is made once there is a cluster to follow."""

    writer: Writer
    span: _Span
    is_over: bool = False

    def follow(self, controller: Controller) -> None:
        """Subscribe to the events of a cluster."""
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
        """Record the cluster's outcome once it has ended."""
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
    """The tracking of this program."""

    writer: Writer | None = None

    def begin(self, logs_models: bool) -> None:
        if self.writer is None:
            self.writer = Writer()
            self.writer.start()
            # The writing thread is a daemon, so waiting writes would be lost at the program's end.
            atexit.register(self.end)
        track_by(_Tracker(self.writer, logs_models))

    def end(self) -> None:
        track_by(None)
        atexit.unregister(self.end)
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.end()


_program = _Program()
