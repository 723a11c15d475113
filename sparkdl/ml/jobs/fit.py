"""Train as Spark jobs, without long-running nodes or open ports: the functions that users call.

Runs in: driver

The way of BigDL (https://arxiv.org/abs/1804.05839): weights are broadcast, each partition's task
computes the gradient of its part of the mini-batch, Spark adds them up, the driver takes the step.
See docs/jobs.md. `KerasEstimator(mode="jobs")` is the face for Keras, `fit_in_jobs` for PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import DataFrame

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.keras_model import trained, with_softmax
from sparkdl.ml.estimators.keras_train import KerasTask
from sparkdl.ml.estimators.source import Signature
from sparkdl.ml.estimators.training import Training, TrainingSummary, check_columns
from sparkdl.ml.jobs.keras import KerasMaster, KerasSpec, backend, signature_of
from sparkdl.ml.jobs.loop import Loop, Plan
from sparkdl.ml.jobs.spark import Jobs
from sparkdl.ml.jobs.task import Aggregation
from sparkdl.ml.jobs.torch import TorchMaster, TorchSpec

if TYPE_CHECKING:
    import torch

    from sparkdl.ml.jobs.torch import LossFn, ModelFn, OptimizerFn

AGGREGATIONS = ("tree", "slices")
_NODES_ONLY = (
    *("num_gpus", "recovery", "feeding", "observe", "startup"),
    *("shutdown_timeout", "feed_reader", "class_weight", "verbose"),
)
_JOBS_ONLY = ("sync_every", "aggregation")


@dataclass(frozen=True)
class JobsResult:
    """The result of `fit_in_jobs`.

    Attributes:
        model: the trained model, on the driver's CPU.
        history: `loss`, and `val_loss` with validation rows; one value an epoch.
        rows: in an epoch.
        iterations: training jobs run in this program.
        seconds: from the first job to the last.
    """

    model: torch.nn.Module
    history: dict[str, list[float]]
    rows: int
    iterations: int
    seconds: float


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
    sync_every: int = 1,
    aggregation: Aggregation = "tree",
    shuffle: bool = True,
    seed: int = 0,
    max_restarts: int = 0,
    checkpoint_dir: str | None = None,
) -> JobsResult:
    """Train a PyTorch model as Spark jobs, without nodes.

    With `sync_every=1` a step is one step of `optimizer_fn`'s optimizer on the driver, with the
    gradient of the whole mini-batch: that of one process with `batch_size` times the partitions.

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
        sync_every: 1 averages gradients. With more, each task takes this many local steps, then
            weights and optimizer state are averaged, weighted by rows.
        aggregation: how gradients are added, `tree` or `slices`, see docs/jobs.md.
        seed: of initial weights, the order of rows and random layers.
        max_restarts: how many jobs may fail; each is run again.
        checkpoint_dir: folder to which the driver writes after each epoch; the same call in another
            program resumes from it. It is deleted when the training has succeeded.

    Raises:
        ConfigError: if an argument is invalid, or over Spark Connect.
        JobFailedError: if a task failed more often than Spark repeats it; by arrays of different
            lengths for example, or by nulls.
        CheckpointError: if a checkpoint cannot be read or written.
    """
    names = tuple(columns or df.columns)
    check_columns(df.columns, names)
    if validation is not None:
        check_columns(validation.columns, names)
    for name, number in (
        ("num_partitions", 1 if num_partitions is None else num_partitions),
        ("batch_size", batch_size),
        ("epochs", epochs),
        ("sync_every", sync_every),
    ):
        if number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    if aggregation not in AGGREGATIONS:
        raise ConfigError(f"aggregation={aggregation!r}: choose 'tree' or 'slices'")
    spec = TorchSpec(model_fn, loss_fn, optimizer_fn, sync_every > 1)
    plan = Plan(
        partitions=num_partitions,
        batch_size=batch_size,
        epochs=epochs,
        sync_every=sync_every,
        aggregation=aggregation,
        shuffle=shuffle,
        seed=seed,
        retries=max_restarts,
        checkpoint_dir=checkpoint_dir,
        identity=names,
    )
    with Jobs(df.sparkSession, max_restarts) as jobs:
        master = TorchMaster(spec, names, seed)
        outcome = Loop(jobs, plan, master, spec).run(df, validation)
    return JobsResult(master.model, **vars(outcome))


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
    """Train; return the model as a `.keras` file, its signature, and a summary of the training.

    Raises:
        ConfigError: if an argument is invalid.
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
        if isinstance(task.recipe.made, bytes):
            # As a broadcast: within the task it would travel again in every iteration.
            content = stack.enter_context(jobs.sent(task.recipe.made))
            small = replace(task, recipe=replace(task.recipe, made=b""))
        spec = KerasSpec(small, content, is_local, backend())
        plan = replace(plan, identity=_identity(task, master))
        outcome = Loop(jobs, plan, master, spec).run(rows, validation)
    content = task.recipe.packed(master.model)
    model = trained(content)
    signature = with_softmax(signature_of(model), model)
    return content, signature, TrainingSummary(outcome.history, seconds=outcome.seconds)


def _identity(task: KerasTask, master: KerasMaster) -> tuple[object, ...]:
    columns, recipe, stopping = task.columns, task.recipe, task.stopping
    config = [recipe.optimizer, recipe.loss, recipe.metrics, recipe.learning_rate]
    data = [*astuple(columns), task.validates, task.seed, stopping.monitor]
    end = [*config, stopping.patience], stopping.min_delta
    text = msgspec.json.encode([data, *end], enc_hook=repr).decode()
    return (text, master.config())
