"""Trains a `LightningModule` on a node: what `LightningEstimator` runs there.

Runs in: child
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError
from sparkdl.lightning import TRAINERS, Checkpoint, Environment, FeedDataModule
from sparkdl.ml.estimators.columns import VALIDATION, check_board, check_travels
from sparkdl.ml.estimators.source import Tensor
from sparkdl.ml.estimators.torch_batch import floats_as
from sparkdl.ml.estimators.torch_module import (
    SAMPLE_ROWS,
    ModuleTask,
    arranged,
    full_state,
    inputs_of,
    labels_of,
    made,
    returned,
    say,
    weights_of,
)
from sparkdl.ml.estimators.torch_train import Watch
from sparkdl.ml.scoring.torch import module_content, module_signature

if TYPE_CHECKING:
    from sparkdl.node.context import NodeContext


@dataclass(frozen=True, kw_only=True)
class LightningTask(ModuleTask):
    """The training task that each node receives from `LightningEstimator`."""

    trainer_args: Mapping[str, Any] = field(default_factory=dict)


def train_by_lightning(task: LightningTask, ctx: NodeContext) -> dict[str, Any]:
    """Fit the module by a `Trainer`.

    Returns:
        `history`; and of the chief what `torch_train.train` returns.

    Raises:
        ConfigError: if the module cannot be trained, or could not be returned; before any row.
        FrameworkMissingError: if TensorBoard is to log and is not installed.
    """
    check_board(task)
    module = made(task, ctx)
    home = _home(module)
    # `nn.Module` itself has one, which only raises.
    if type(module).forward is import_module("torch").nn.Module.forward:
        raise ConfigError(
            f"{type(module).__name__} has no forward, by which the trained model scores: define it"
        )
    arrange = _Arrange(task, inputs_of(module_signature(module), task), _dtype(module))
    # First, so that a module that cannot travel fails before any row.
    content = module_content(module)
    check_travels(len(content), task.model_dir)
    notes = Notes(task, ctx)
    data = FeedDataModule(
        task.batch_size,
        validation=VALIDATION if task.validates else None,
        ctx=ctx,
        collate_fn=arrange,
        shuffle=task.shuffle,
        seed=task.seed or 0,
    )
    trainer = home.Trainer(**_arguments(task, ctx, notes, home))
    trainer.fit(module, data, ckpt_path=notes.path if task.saves else None)
    state = full_state(module) if notes.best is None else notes.best
    found = returned(content, state, arrange.sample, "", task, ctx) if ctx.is_chief else {}
    return {**found, "history": notes.history}


def _home(module: Any) -> Any:
    """Return the Lightning that a module is of: there are two names of it."""
    for name in TRAINERS:
        home = sys.modules.get(name)
        if home is not None and isinstance(module, home.LightningModule):
            return home
    raise ConfigError(
        f"the model is a {type(module).__name__}, and must be a LightningModule; use "
        "TorchEstimator for any other module"
    )


def _dtype(module: Any) -> Any:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def _arguments(task: LightningTask, ctx: NodeContext, notes: Any, home: Any) -> dict[str, Any]:
    given = dict(task.trainer_args)
    own = task.callbacks() if callable(task.callbacks) else task.callbacks
    callbacks = [notes, *own, *_listed(given.pop("callbacks", None))]
    plugins = [Environment(ctx), *_listed(given.pop("plugins", None))]
    logger: Any = False
    if task.tensorboard_dir:
        logger = home.loggers.TensorBoardLogger(task.tensorboard_dir, name="", version="")
    return {
        "strategy": task.strategy if ctx.num_workers > 1 else "auto",
        "logger": logger,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        # A look at validation rows before the training would take them from the feed.
        "num_sanity_val_steps": 0,
        # The user's arguments win over those above, and not over those below, which nodes rely on.
        **given,
        "devices": 1,
        "num_nodes": ctx.num_workers,
        "max_epochs": task.epochs,
        "callbacks": callbacks,
        "plugins": plugins,
    }


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


class _Arrange:
    """Makes `(features, label)` of a batch of columns, or `(features, label, weight)`.

    Attributes:
        sample: the first rows of the model's inputs.
    """

    def __init__(self, task: LightningTask, inputs: Mapping[str, Tensor], dtype: Any) -> None:
        self._columns, self._inputs, self._dtype = task.columns, inputs, dtype
        self.sample: dict[str, Any] = {}

    def __call__(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        x = arranged(batch, self._inputs, self._dtype, "cpu")
        self.sample = self.sample or {name: each[:SAMPLE_ROWS] for name, each in x.items()}
        features = x if len(x) > 1 else next(iter(x.values()))
        label = floats_as(self._dtype, labels_of(batch, self._columns))
        weight = weights_of(batch, self._columns)
        return (features, label) if weight is None else (features, label, weight)


class Notes(Checkpoint):
    """The callback that keeps the history, stops early, and saves after each epoch.

    A checkpoint to Lightning, which calls those last: all is logged by then.

    Attributes:
        history: metric to its values, one for each epoch.
        best: the weights of the best epoch, if the training may stop early.
    """

    _base = ".callbacks:Checkpoint"

    def __init__(self, task: LightningTask, ctx: NodeContext) -> None:
        super().__init__(every_epochs=1, ctx=ctx)
        self._task = task
        self._watch = Watch(task.stopping, task.validates, {})
        self.history: dict[str, list[float]] = {}
        self.best: dict[str, Any] | None = None
        self._loss: Any = 0.0
        self._rows = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop at once where the training has been stopped before a restart."""
        super().on_train_start(trainer, pl_module)
        trainer.should_stop = self._watch.stops

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add up the loss."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            rows = _rows(batch[1])
            self._rows += rows
            self._loss = self._loss + loss.detach().double() * rows  # which waits for no GPU

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record all nodes' metrics, stop the training if they no longer improve, and save."""
        own = {"loss": float(self._loss) / self._rows} if self._rows else {}
        own |= {name: float(value) for name, value in trainer.callback_metrics.items()}
        # Lightning reduces a metric over nodes only if it is logged with `sync_dist=True`.
        logs = _means(self._ctx.all_gather([self._rows, own]))
        self._loss, self._rows = 0.0, 0
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
        say(self._task, self._ctx, trainer.current_epoch, logs)
        if self._task.stopping.patience is not None:
            if self._watch.improves(logs):
                self.best = full_state(pl_module)
            trainer.should_stop = trainer.should_stop or self._watch.stops
        if self._task.saves:
            super().on_train_epoch_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return what belongs into a checkpoint."""
        return {"history": self.history, "watch": self._watch.state, "best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a checkpoint was made."""
        self.history, self.best = state_dict["history"], state_dict["best"]
        self._watch.state = state_dict["watch"]


def _rows(label: Any) -> int:
    return len(next(iter(label.values())) if isinstance(label, Mapping) else label)


def _means(gathered: list[Any]) -> dict[str, float]:
    """Return means weighted by each node's rows, each metric over the nodes that logged it."""
    names = dict.fromkeys(name for _, logs in gathered for name in logs)
    found = {}
    for name in names:
        # A training step that returns no loss counts no rows: nodes weigh the same then.
        parts = [(rows or 1, logs[name]) for rows, logs in gathered if name in logs]
        found[name] = sum(rows * value for rows, value in parts) / sum(rows for rows, _ in parts)
    return found
