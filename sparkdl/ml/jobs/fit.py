"""Train as Spark jobs, without long-running nodes or open ports: the functions that users call.

The way of BigDL (https://arxiv.org/abs/1804.05839): weights are broadcast, each partition's task
computes the gradient of its part of the mini-batch, Spark adds them up, the driver takes the step.
See docs/jobs.md. `KerasEstimator(mode="jobs")` is the face for Keras, `fit_in_jobs` for PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.keras_model import with_softmax
from sparkdl.ml.estimators.keras_train import KerasTask
from sparkdl.ml.estimators.training import Training, check_columns
from sparkdl.ml.jobs.keras import KerasMaster, KerasSpec, backend, signature_of
from sparkdl.ml.jobs.loop import JobsResult, Loop, Plan
from sparkdl.ml.jobs.spark import Jobs
from sparkdl.ml.jobs.torch import TorchMaster, TorchSpec
from sparkdl.ml.scoring.keras_objects import loaded
from sparkdl.ml.scoring.source import Signature
from sparkdl.ml.summary import TrainingSummary

if TYPE_CHECKING:
    from sparkdl.ml.jobs.torch import LossFn, ModelFn, OptimizerFn

_NODES_ONLY = (
    *("num_gpus", "recovery", "feeding", "observe", "startup", "checkpoint_dir"),
    *("shutdown_timeout", "feed_reader", "class_weight", "verbose"),
)


def fit_in_jobs(  # noqa: PLR0913 (one option, one name)
    df: DataFrame,
    model_fn: ModelFn,
    loss_fn: LossFn,
    optimizer_fn: OptimizerFn,
    *,
    columns: Sequence[str] | None = None,
    validation: DataFrame | None = None,
    num_partitions: int | None = None,
    batch_size: int = 32,
    epochs: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    max_restarts: int = 0,
) -> JobsResult:
    """Train a PyTorch model as Spark jobs, without nodes.

    A step is one step of `optimizer_fn`'s optimizer on the driver, with the gradient of the whole
    mini-batch: that of one process with `batch_size` times the partitions.

    Args:
        df: numbers, arrays of one shape, ML vectors; each row is used once an epoch.
        model_fn: makes the model, on the driver and in Spark's Python workers.
        loss_fn: `loss_fn(model, batch)` returns the mean loss of a batch `{column: tensor}`.
        optimizer_fn: makes the optimizer for the given parameters.
        columns: the columns of the batches; all by default.
        validation: rows whose loss is computed after each epoch, as `val_loss`.
        num_partitions: the number of partitions, and of tasks in each iteration; by default that of
            `df`. The tasks need not run at once.
        batch_size: rows of a mini-batch in each partition, on average.
        seed: of initial weights, the order of rows and random layers.
        max_restarts: how many jobs may fail; each is run again.

    Raises:
        ConfigError: if an argument is invalid, or over Spark Connect.
        JobFailedError: if a task failed more often than Spark repeats it; by arrays of different
            lengths for example, or by nulls.
    """
    names = tuple(columns or df.columns)
    check_columns(df.columns, names)
    if validation is not None:
        check_columns(validation.columns, names)
    for name, number in (
        ("num_partitions", 1 if num_partitions is None else num_partitions),
        ("batch_size", batch_size),
        ("epochs", epochs),
    ):
        if number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    spec = TorchSpec(model_fn, loss_fn, optimizer_fn)
    plan = Plan(num_partitions, batch_size, epochs, shuffle, seed)
    with Jobs(df.sparkSession, max_restarts) as jobs:
        master = TorchMaster(spec, names, seed)
        return Loop(jobs, plan, master, spec).run(df, validation)


def check_mode(stage: Any) -> None:
    """Refuse parameters that were set and have no effect in the stage's mode.

    Raises:
        ConfigError: it names them.
    """
    useless = [name for name in _NODES_ONLY if stage.isSet(name)]
    if stage.getMode() == "jobs" and useless:
        raise ConfigError(
            f"{', '.join(useless)}: only mode='nodes' has this, and mode is 'jobs'; leave it out, "
            "or set the mode"
        )


def fit_keras(
    task: KerasTask, training: Training, plan: Plan, dataset: DataFrame, max_restarts: int
) -> tuple[bytes, Signature, TrainingSummary]:
    """Train; return the model as a `.keras` file, its signature, and a summary of the training.

    Raises:
        ConfigError: if an argument is invalid.
        JobFailedError: if a task failed more often than Spark repeats it.
    """
    with (
        training.rows(dataset) as (rows, validation),
        Jobs(dataset.sparkSession, max_restarts) as jobs,
        ExitStack() as stack,
    ):
        master = KerasMaster(task)
        content, small = None, task
        if isinstance(task.recipe.made, bytes):
            # As a broadcast: within the task it would travel again in every iteration.
            content = stack.enter_context(jobs.sent(task.recipe.made))
            small = replace(task, recipe=replace(task.recipe, made=b""))
        spec = KerasSpec(small, content, backend())
        outcome = Loop(jobs, plan, master, spec).run(rows, validation)
    content = task.recipe.packed(master.model)
    model = loaded(content, task.recipe.objects)
    signature = with_softmax(signature_of(model), model)
    return content, signature, TrainingSummary(outcome.history, seconds=outcome.seconds)
