"""What `KerasEstimator(mode="jobs")` does in its `fit`.

Runs in: driver
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
from pyspark.sql import DataFrame

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.keras_model import as_content
from sparkdl.ml.estimators.keras_train import KerasTask
from sparkdl.ml.estimators.source import Signature
from sparkdl.ml.estimators.summary import TrainingSummary
from sparkdl.ml.estimators.training import Training
from sparkdl.ml.jobs.keras import KerasSpec, backend, signature_of
from sparkdl.ml.jobs.keras_master import KerasMaster, final_copy
from sparkdl.ml.jobs.loop import Loop, Plan
from sparkdl.ml.jobs.spark import Jobs

_NODES_ONLY = (
    *("num_gpus", "placement", "log_to_driver", "feed_timeout", "reservation_timeout"),
    "shutdown_timeout",
)
_JOBS_ONLY = ("sync_every", "aggregation")


def check_mode(stage: Any) -> None:
    """Refuse parameters that were set and have no effect in the stage's mode.

    Raises:
        ConfigError: it names them.
    """
    mode = stage.getMode()
    others = _NODES_ONLY if mode == "jobs" else _JOBS_ONLY
    if useless := [name for name in others if stage.isSet(name)]:
        other = "nodes" if mode == "jobs" else "jobs"
        raise ConfigError(
            f"{', '.join(useless)}: only mode={other!r} has this, and mode is {mode!r}; "
            "leave it out, or set the mode"
        )


def fit_keras(
    task: KerasTask, training: Training, plan: Plan, dataset: DataFrame
) -> tuple[bytes, Signature, TrainingSummary]:
    """Train; return the model as a `.keras` file, what it takes and gives, and what came of it.

    Raises:
        ConfigError: if it cannot work as asked.
        JobFailedError: if a task failed more often than Spark repeats it.
    """
    is_local = plan.sync_every > 1
    with (
        training.rows(dataset) as (rows, validation),
        Jobs(dataset.sparkSession, plan.retries) as jobs,
        ExitStack() as stack,
    ):
        master = KerasMaster(task, is_local)
        content, small = None, task
        if isinstance(task.model, bytes):
            content = stack.enter_context(jobs.sent(task.model))
            small = replace(task, model=b"")
        spec = KerasSpec(small, content, is_local, backend())
        plan = replace(plan, identity=_identity(task, master))
        outcome = Loop(jobs, plan, master, spec).run(rows, validation)
    copy = final_copy(master.model)
    summary = TrainingSummary(outcome.history, seconds=outcome.seconds)
    return as_content(copy), signature_of(copy), summary


def _identity(task: KerasTask, master: KerasMaster) -> tuple[object, ...]:
    told = [task.features, task.label, task.weight, task.validates, task.seed, task.monitor]
    config = [task.optimizer, task.loss, task.metrics, task.learning_rate, task.patience]
    text = msgspec.json.encode([told, config, task.min_delta], enc_hook=repr).decode()
    return (text, master.config())
