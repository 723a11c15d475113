"""Lightning's `Trainer` on a node: it trains for `LightningEstimator` and `TorchEstimator`.

Runs in: child
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.spelling import did_you_mean
from sparkdl.lightning import TRAINERS, Checkpoint, Environment, FeedDataModule
from sparkdl.ml.estimators.columns import VALIDATION, EarlyStopping, check_board
from sparkdl.ml.estimators.torch_batch import floats_as, is_greater_better
from sparkdl.ml.estimators.torch_module import (
    SAMPLE_ROWS,
    Fitted,
    ModuleTask,
    arranged,
    full_state,
    labels_of,
    made,
    say,
    trained,
    weights_of,
)
from sparkdl.ml.scoring.source import Tensor
from sparkdl.ml.scoring.torch import plain
from sparkdl.ml.summary import History

if TYPE_CHECKING:
    from sparkdl.node.context import NodeContext


@dataclass(frozen=True, kw_only=True)
class LightningTask(ModuleTask):
    """The training task that each node receives from `LightningEstimator`."""

    trainer_args: Mapping[str, Any] = field(default_factory=dict)


def train_by_lightning(task: LightningTask, ctx: NodeContext) -> dict[str, Any]:
    """Fit the module by a `Trainer`; return what `trained` does.

    Raises:
        ConfigError: if the module cannot be trained, or could not be returned; before any row.
        FrameworkMissingError: if TensorBoard is to log and is not installed.
    """
    from torch import nn

    check_board(task)
    given = made(task, ctx)
    module = plain(given)
    _home(module)
    # `nn.Module` itself has one, which only raises.
    if type(module).forward is nn.Module.forward:
        raise ConfigError(
            f"{type(module).__name__} has no forward, by which the trained model scores: define it"
        )
    own = list(task.callbacks() if callable(task.callbacks) else task.callbacks)
    check_trainer_args(task.trainer_args, own)

    def fit(inputs: dict[str, Tensor]) -> Fitted:
        notes = Notes(module, Arrange(task, inputs, module), task, ctx)
        state = fitted(given, notes, task, ctx, task.trainer_args, own)
        return notes.history, state, notes.arrange.sample, ""

    return trained(task, ctx, module, fit)


def fitted(
    module: Any,
    notes: Notes,
    task: ModuleTask,
    ctx: NodeContext,
    trainer_args: Mapping[str, Any],
    callbacks: Sequence[Any] = (),
) -> dict[str, Any]:
    """Train a `LightningModule`, compiled or not; return the weights of what `notes` is about."""
    home = _home(plain(module))
    data = FeedDataModule(
        task.batch_size,
        validation=VALIDATION if task.validates else None,
        ctx=ctx,
        collate_fn=notes.arrange,
        shuffle=task.shuffle,
        seed=task.seed or 0,
        tail=notes.arrange.tail,
    )
    # It would tell of devices, and give advice that a feed cannot follow.
    logging.getLogger(home.__name__).setLevel(logging.WARNING)
    warnings.simplefilter("ignore", home.utilities.warnings.PossibleUserWarning)
    trainer = home.Trainer(**_arguments(task, ctx, home, trainer_args, callbacks))
    # After the construction: the trainer would take `notes` for a checkpoint of its own.
    trainer.callbacks.append(notes)
    trainer.fit(module, data, ckpt_path=notes.path if task.saves else None)
    return full_state(notes.module) if notes.best is None else notes.best


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


def check_trainer_args(given: Mapping[str, Any], callbacks: Any = ()) -> None:
    """Check arguments of Lightning's `Trainer`, and callbacks, against the feeds of a fit.

    Raises:
        ConfigError: if there is no such argument, as far as Lightning is imported here; or it
            changes when or how often rows are read.
    """
    homes = [sys.modules[name] for name in TRAINERS if name in sys.modules]
    known = inspect.signature(homes[0].Trainer).parameters if homes else given
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f"trainer_args has {name!r}, which must be an argument of Lightning's Trainer"
                f"{did_you_mean(name, known)}"
            )
        if name in _REFUSED:
            raise ConfigError(f"trainer_args must leave out {name}={value!r}: {_REFUSED[name]}")
    for each in (*callbacks, *_listed(given.get("callbacks"))):
        if found := [kind.__name__ for kind in type(each).__mro__ if kind.__name__ in _READERS]:
            raise ConfigError(
                f"callbacks has a {found[0]}, which reads rows beside the epochs of the training, "
                "and the feed has no others: leave it out, or train it by launch, with its own data"
            )


_FEEDS = (
    "an epoch is one pass over the rows: fit(df.sample(…)) or fit(df.limit(…)) makes it shorter"
)
_VALIDATES = "the rows to validate with are fed once an epoch: leave it out"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("devices", "num_nodes"), "set num_workers of the estimator instead"),
    "max_epochs": "set epochs of the estimator instead",
    **dict.fromkeys(("limit_train_batches", "limit_val_batches", "overfit_batches"), _FEEDS),
    "fast_dev_run": _FEEDS,
    **dict.fromkeys(("val_check_interval", "num_sanity_val_steps"), _VALIDATES),
    "reload_dataloaders_every_n_epochs": "the loaders last for the whole feed",
}
"""Arguments that change when or how often rows are read, and advice."""
_READERS = ("BatchSizeFinder", "LearningRateFinder", "StochasticWeightAveraging")


def _arguments(
    task: ModuleTask,
    ctx: NodeContext,
    home: Any,
    trainer_args: Mapping[str, Any],
    callbacks: Sequence[Any],
) -> dict[str, Any]:
    from torch import cuda

    given = dict(trainer_args)
    callbacks = [*callbacks, *_listed(given.pop("callbacks", None))]
    plugins = [Environment(), *_listed(given.pop("plugins", None))]
    logger: Any = False
    if task.tensorboard_dir:
        logger = home.loggers.TensorBoardLogger(task.tensorboard_dir, name="", version="")
    return {
        "strategy": task.strategy if ctx.num_workers > 1 else "auto",
        "accelerator": "cuda" if cuda.is_available() else "cpu",
        "logger": logger,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(e, home.callbacks.Checkpoint) for e in callbacks),
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


class Arrange:
    """Makes `(features, label)` of a batch of columns, or `(features, label, weight)`.

    Attributes:
        tail: what the feed does with the last rows of an epoch.
        sample: the first rows of the model's inputs.
    """

    tail = "short"

    def __init__(self, task: ModuleTask, inputs: Mapping[str, Tensor], module: Any) -> None:
        self.columns, self._inputs = task.columns, inputs
        self._dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        self.sample: dict[str, Any] = {}

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of the model by name."""
        x = arranged(batch, self._inputs, self._dtype, "cpu")
        self.sample = self.sample or {name: each[:SAMPLE_ROWS] for name, each in x.items()}
        return x

    def __call__(self, batch: dict[str, Any]) -> Any:
        """Return the batch as the steps of a module are given it."""
        x = self.inputs(batch)
        features = x if len(x) > 1 else next(iter(x.values()))
        label = floats_as(self._dtype, labels_of(batch, self.columns))
        weight = weights_of(batch, self.columns)
        return (features, label) if weight is None else (features, label, weight)


@dataclass
class Watch:
    """Watches a metric for the early stopping.

    Attributes:
        state: the best value, and the epochs since then.
    """

    stopping: EarlyStopping
    validates: bool
    metrics: Mapping[str, Any]
    state: tuple[float | None, int] = (None, 0)

    @property
    def name(self) -> str:
        """The metric."""
        return self.stopping.monitor or ("val_loss" if self.validates else "loss")

    def improves(self, logs: Mapping[str, float]) -> bool:
        """Take the values of an epoch; return whether they are the best.

        Raises:
            ConfigError: if there is no such metric.
        """
        name = self.name
        if name not in logs:
            raise ConfigError(
                f"early_stopping_monitor={name!r} must be one of the history's {', '.join(logs)}"
            )
        metric = self.metrics.get(name.removeprefix("val_"))
        value = -logs[name] if is_greater_better(name, metric) else logs[name]
        best, waited = self.state
        # NaN is never the best: it does not equal itself.
        is_best = value == value and (best is None or value < best - self.stopping.min_delta)
        self.state = (value, 0) if is_best else (best, waited + 1)
        return is_best

    @property
    def stops(self) -> bool:
        """Whether the patience is at its end."""
        patience = self.stopping.patience
        return patience is not None and self.state[1] >= patience


class Notes(Checkpoint):
    """The callback that keeps the history, stops early, and saves after each epoch.

    A checkpoint to Lightning, which calls those last: all is logged by then.

    Args:
        module: the one that is returned; its weights are kept.
        arrange: makes the batches.
        metrics: that know whether more of them is better, by name.

    Attributes:
        history: metric to its values, one for each epoch; None for an epoch that logged none.
        best: the weights of the best epoch, if the training may stop early.
    """

    _base = ".callbacks:Checkpoint"

    def __init__(
        self,
        module: Any,
        arrange: Arrange,
        task: ModuleTask,
        ctx: NodeContext,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(every_epochs=1, ctx=ctx)
        self.module, self.arrange, self._task = module, arrange, task
        self._watch = Watch(task.stopping, task.validates, metrics or {})
        self.history: History = {}
        self.best: dict[str, Any] | None = None
        self._stops = False
        self._loss: Any = 0.0
        self._rows = 0
        self._logged: dict[str, Any] = {}
        self._is_validated = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop at once where the training has been stopped before a restart."""
        super().on_train_start(trainer, pl_module)
        trainer.should_stop = self._stops

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and add up the loss; a checkpoint has whole epochs alone."""
        self._batches += 1
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            rows = _rows(batch[1])
            self._rows += rows
            if pl_module.automatic_optimization:  # Lightning has divided it
                rows *= trainer.accumulate_grad_batches
            self._loss = self._loss + loss.detach().double() * rows  # which waits for no GPU

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note that this epoch has been validated."""
        self._is_validated = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record all nodes' metrics, stop the training if they no longer improve, and save."""
        logs = self._logs(trainer)
        epochs = max(map(len, self.history.values()), default=0)
        for name in dict.fromkeys([*self.history, *logs]):
            self.history.setdefault(name, [None] * epochs).append(logs.get(name))
        say(self._task, self._ctx, trainer.current_epoch, logs)
        # `check_val_every_n_epoch` leaves epochs without a value to judge.
        is_judged = self._is_validated or not self._task.validates or self._watch.name in logs
        self._is_validated = False
        if self._task.stopping.patience is not None and is_judged and self._watch.improves(logs):
            self.best = full_state(self.module)
        self._stops = self._called_back(trainer, logs) or self._watch.stops
        trainer.should_stop = trainer.should_stop or self._stops
        if self._task.saves:
            super().on_train_epoch_end(trainer, pl_module)

    def _logs(self, trainer: Any) -> dict[str, float]:
        """Return the epoch's entries of the history, over all nodes."""
        own = {"loss": float(self._loss) / self._rows} if self._rows else {}
        # Lightning keeps the last value of each metric: the same tensor where an epoch logs none.
        found, before = dict(trainer.callback_metrics), self._logged
        own |= {name: float(x) for name, x in found.items() if x is not before.get(name)}
        self._logged = found
        # Lightning reduces a metric over nodes only if it is logged with `sync_dist=True`.
        logs = _means(self._ctx.all_gather([self._rows, own]))
        self._loss, self._rows = 0.0, 0
        return logs

    def _called_back(self, trainer: Any, logs: Mapping[str, float]) -> bool:
        """Call the user's functions; return whether the training is to stop."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what belongs into a checkpoint."""
        return {
            "history": self.history,
            "watch": self._watch.state,
            "best": self.best,
            "stops": self._stops,
            "sample": self.arrange.sample,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a checkpoint was made."""
        self.history, self.best = state_dict["history"], state_dict["best"]
        self._watch.state, self._stops = state_dict["watch"], state_dict["stops"]
        self.arrange.sample = state_dict["sample"]


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
