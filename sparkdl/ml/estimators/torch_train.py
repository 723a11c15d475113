"""Train a PyTorch model on a node: the training function of `TorchEstimator`.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import FrameworkMissingError
from sparkdl.ml.estimators.columns import check_board, check_travels
from sparkdl.ml.estimators.lightning_train import Notes, fitted
from sparkdl.ml.estimators.namespace import Namespace
from sparkdl.ml.estimators.torch_module import (
    ModuleTask,
    full_state,
    inputs_of,
    join,
    made,
    note_inputs,
    returned,
)
from sparkdl.ml.estimators.torch_steps import Counted, Steps
from sparkdl.ml.scoring.torch import module_content, module_signature, uncompiled

if TYPE_CHECKING:
    from sparkdl.node.context import NodeContext

TrainFn = Callable[[Any, Namespace, Any], Any]


@dataclass(frozen=True, kw_only=True)
class TorchTask(ModuleTask):
    """The training task that each node receives from `TorchEstimator`.

    Attributes:
        train_fn: a function that replaces the training loop here; called with `args`.
    """

    optimizer: Any = None
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
    loss: Any = None
    metrics: Any = None
    learning_rate: float | None = None
    train_fn: TrainFn | None = None
    args: Namespace = field(default_factory=Namespace)


@dataclass
class Epoch:
    """The argument of a `TorchEstimator` callback, which runs after each epoch on every node.

    Attributes:
        number: from 0.
        logs: the epoch's entries of the history, over all nodes.
        model: the module, not wrapped; with `strategy="fsdp"` of shards.
        stops: set it to True on any node to end the training after this epoch.
    """

    number: int
    logs: Mapping[str, float]
    model: Any
    optimizer: Any
    ctx: NodeContext
    stops: bool = False


def check_lightning() -> None:
    """Raise a FrameworkMissingError without Lightning."""
    if find_spec("lightning") is None:
        raise FrameworkMissingError(
            "TorchEstimator trains by Lightning's Trainer, and there is no Lightning: "
            "pip install 'sparkdl[torch]', here and on the executors; or give a train_fn"
        )


def train(task: TorchTask, ctx: NodeContext) -> dict[str, Any]:
    """Fit the model, on several nodes under a strategy.

    Returns:
        `history`; and of the chief `signature` as JSON, and `content`, the pickled module, or
        `path` if it is in `model_dir`.

    Raises:
        ConfigError: if the model cannot be trained, or could not be returned; before any row.
        FrameworkMissingError: without Lightning; if TensorBoard is to log and is not installed.
    """
    check_board(task)
    if task.train_fn is None:
        check_lightning()
    module = uncompiled(made(task, ctx))
    inputs = inputs_of(module_signature(module), task)
    # Pickled before the training, so that a module that cannot travel costs no epochs: a strategy
    # changes its class.
    content = module_content(module)
    check_travels(len(content), task.model_dir)
    if task.train_fn is not None:
        sample, device = note_inputs(module), join(ctx)
        history = task.train_fn(module.to(device), task.args, ctx)
        state, scores = full_state(module), ""
    else:
        steps = Steps(module, task, ctx)
        notes = _EpochNotes(steps, Counted(task, inputs, module), task, ctx)
        args: dict[str, Any] = {"inference_mode": False}
        if task.strategy == "fsdp" and ctx.num_workers > 1:
            args["strategy"] = _sharding(ctx)  # Lightning's own "fsdp" needs GPUs
        state = fitted(steps, notes, task, ctx, args)
        history, sample, scores = notes.history, notes.arrange.sample, steps.loss.scores
    found = returned(content, state, sample, scores, task, ctx) if ctx.is_chief else {}
    return {**found, "history": history}


def _sharding(ctx: NodeContext) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(ctx.num_workers, 1, save_distributed_checkpoint=False)


class _EpochNotes(Notes):
    """The callback that takes an epoch's history from `Steps`, and calls the user's functions."""

    def __init__(self, steps: Steps, arrange: Counted, task: TorchTask, ctx: NodeContext) -> None:
        super().__init__(steps.module, arrange, task, ctx, steps.metrics)
        given = task.callbacks() if callable(task.callbacks) else task.callbacks
        self._callbacks, self._steps = list(given), steps

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Count the batch; its means are those of `Steps`."""
        self._batches += 1

    def _logs(self, trainer: Any) -> dict[str, float]:
        logs = self._steps.logs()
        for logger in trainer.loggers:
            logger.log_metrics(logs, trainer.current_epoch)
        return logs

    def _called_back(self, trainer: Any, logs: Mapping[str, float]) -> bool:
        if not self._callbacks:
            return False
        (optimizer,) = trainer.optimizers
        epoch = Epoch(trainer.current_epoch, logs, self.module, optimizer, self._ctx)
        for callback in self._callbacks:
            callback(epoch)
        # All nodes stop, or none: one that stopped alone would leave the others in a collective.
        return any(self._ctx.all_gather(bool(epoch.stops)))
