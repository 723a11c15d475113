"""Lightning's `Trainer` on a node: it trains for `TorchEstimator` and `LightningEstimator`.

Runs in: child
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.texts import did_you_mean
from sparkdl.feed.reader.batches import SAMPLE_WEIGHT
from sparkdl.lightning import TRAINERS, Adopted, Checkpoint, Environment, FeedDataModule
from sparkdl.ml.estimators.columns import (
    VALIDATION,
    EarlyStopping,
    check_board,
    check_travels,
    delivered,
)
from sparkdl.ml.estimators.torch_batch import (
    ACCURACY,
    accuracy,
    described,
    fitted_label,
    floats_as,
    is_greater_better,
    loss_of,
    metrics_of,
    optimizer_of,
    target_of,
)
from sparkdl.ml.estimators.torch_module import (
    SAMPLE_ROWS,
    ModuleTask,
    arranged,
    broadcast,
    full_state,
    inputs_of,
    labels_of,
    made,
    traced,
    weights_of,
)
from sparkdl.ml.scoring.source import Tensor
from sparkdl.ml.scoring.torch import module_content, module_of, plain
from sparkdl.ml.scoring.torch import module_signature as signature_of
from sparkdl.ml.summary import History

if TYPE_CHECKING:
    import torch

    from sparkdl.node.context import NodeContext


@dataclass(frozen=True, kw_only=True)
class TorchTask(ModuleTask):
    """The training task that each node receives from `TorchEstimator`."""

    optimizer: Any = None
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
    loss: Any = None
    metrics: Any = None
    learning_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class LightningTask(ModuleTask):
    """The training task that each node receives from `LightningEstimator`."""

    trainer_args: Mapping[str, Any] = field(default_factory=dict)


def check_lightning() -> None:
    if find_spec("lightning") is None:
        raise FrameworkMissingError(
            "TorchEstimator trains by Lightning's Trainer, and there is no Lightning: "
            "pip install 'sparkdl[torch]', here and on the executors"
        )


def train(task: TorchTask | LightningTask, ctx: NodeContext) -> dict[str, Any]:
    """Fit the model, on several nodes under a strategy.

    Returns:
        `history`; and of the chief `signature` as JSON, and `content`, the pickled module, or
        `path` if it is in `model_dir`.

    Raises:
        ConfigError: if the model cannot be trained, or could not be returned; before any row.
        FrameworkMissingError: without Lightning; if TensorBoard is to log and is not installed.
    """
    check_board(task)
    if isinstance(task, TorchTask):
        check_lightning()
    given = made(task, ctx)
    module = plain(given)
    callbacks = list(task.callbacks() if callable(task.callbacks) else task.callbacks)
    trainer_args: Mapping[str, Any] = {}
    if isinstance(task, LightningTask):
        trainer_args = task.trainer_args
        _check_module(module)
    check_trainer_args(trainer_args, callbacks)
    inputs = inputs_of(signature_of(module), task)
    # Before the training, so that a module that cannot travel costs no epochs.
    content = module_content(module)
    check_travels(len(content), task.model_dir)
    steps = None
    if isinstance(task, TorchTask):
        given = steps = Steps(given, task, ctx)
        trainer_args = steps.trainer_args()
    arrange = (Arrange if steps is None else Counted)(task, inputs, module)
    notes = Notes(module, arrange, task, ctx, steps)
    home = _home(plain(given))
    data = FeedDataModule(
        task.batch_size,
        validation=VALIDATION if task.validates else None,
        ctx=ctx,
        collate_fn=arrange,
        shuffle=task.shuffle,
        seed=task.seed or 0,
        tail=arrange.tail,
    )
    # It would tell of devices, and give advice that a feed cannot follow.
    logging.getLogger(home.__name__).setLevel(logging.WARNING)
    warnings.simplefilter("ignore", home.utilities.warnings.PossibleUserWarning)
    trainer = home.Trainer(**_arguments(task, ctx, home, trainer_args, callbacks))
    # After the construction: the trainer would take `notes` for a checkpoint of its own.
    trainer.callbacks.append(notes)
    trainer.fit(given, data, ckpt_path=notes.path if task.saves else None)
    state = full_state(module) if notes.best is None else notes.best
    if not ctx.is_chief:
        return {"history": notes.history}
    # A new one: the trained one has hooks, and wrappers of the training.
    module = module_of(content)
    module.load_state_dict(state)
    signature = traced(module.eval(), arrange.sample, "" if steps is None else steps.loss.scores)
    sent = delivered(module_content(module), "pt", signature, task, ctx)
    return {**sent, "history": notes.history}


def _check_module(module: Any) -> None:
    from torch import nn

    _home(module)
    # `nn.Module` itself has one, which only raises.
    if type(module).forward is nn.Module.forward:
        raise ConfigError(
            f"{type(module).__name__} has no forward, by which the trained model scores: define it"
        )


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
    """Check arguments of Lightning's `Trainer`, and callbacks, against the feeds of a fit."""
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
    callbacks: list[Any],
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
class Batch:
    """A batch of a node.

    Attributes:
        rows: that count: 0 if the node only takes part, with a row that others have.
        inputs: of the model, by name.
        labels: by column.
    """

    rows: int
    inputs: dict[str, Any]
    labels: dict[str, Any]
    weight: Any = None

    @property
    def size(self) -> int:
        return len(next(iter(self.labels.values())))

    def to(self, device: Any) -> Batch:
        """Move it as Lightning asks; labels are checked first, and reading a GPU waits for it."""
        return replace(self, inputs=_moved(self.inputs, device), weight=_moved(self.weight, device))


class Counted(Arrange):
    """Makes a `Batch` of a padded batch of columns."""

    tail = "pad"

    def __call__(self, padded: dict[str, Any]) -> Any:
        """Return it, with one row at least: a node without rows takes part all the same."""
        rows = int(padded[SAMPLE_WEIGHT].sum())
        kept = {n: values[: max(rows, 1)] for n, values in padded.items() if n != SAMPLE_WEIGHT}
        labels = {name: kept[name] for name in self.columns.labels}
        return Batch(rows, self.inputs(kept), labels, weights_of(kept, self.columns))


class Steps(Adopted):
    """The `LightningModule` that a module is trained in.

    Attributes:
        loss: as it is applied to a batch.
        metrics: by name.
    """

    _packages = TRAINERS[:1]
    _base = ":LightningModule"
    # Lightning's own.
    log: Any
    device: Any
    device_mesh: Any
    trainer: Any

    def __init__(self, given: Any, task: TorchTask, ctx: NodeContext) -> None:
        import torch

        super().__init__()
        self.module, self._task, self._world = plain(given), task, ctx.num_workers
        # In a list, because a compiled module would be a further module here.
        self._called = [given]
        self.loss, self.metrics = loss_of(task.loss), metrics_of(task.metrics)
        kept = [
            (n, each) for n, each in enumerate(self.metrics.values()) if hasattr(each, "compute")
        ]
        # Of torchmetrics: they have states, those of training and validation at once.
        copies = {f"{prefix}{n}": deepcopy(each) for prefix in ("", "val_") for n, each in kept}
        self.kept = torch.nn.ModuleDict(copies)
        self._rows, self._all_rows = 0, torch.ones(())
        self._sum: Any = None

    def trainer_args(self) -> dict[str, Any]:
        # FSDP gathers weights into memory that the training uses as well.
        found: dict[str, Any] = {"inference_mode": False}
        if self._task.strategy == "fsdp" and self._world > 1:
            from lightning.pytorch.strategies import ModelParallelStrategy

            # Lightning's own "fsdp" is the older kind, which needs GPUs.
            sharding = ModelParallelStrategy(self._world, 1, save_distributed_checkpoint=False)
            found["strategy"] = sharding
        return found

    def logs(self) -> dict[str, float]:
        names = ["loss", *self.metrics]
        names += [f"val_{name}" for name in names] if self._task.validates else []
        return {name: float(self.trainer.callback_metrics[name]) for name in names}

    def configure_model(self) -> None:
        """Shard the module, if a strategy has made a mesh for it."""
        if self.device_mesh is None:
            return
        from torch.distributed.fsdp import fully_shard
        from torch.nn import ModuleList

        mesh = self.device_mesh["data_parallel"]
        self.module.to(self.trainer.strategy.root_device)
        # FSDP does not do this, as DDP does: nodes without a seed have made different weights.
        broadcast([*self.module.parameters(), *self.module.buffers()])
        for part in self.module.modules():
            # Block by block, so that only one block's whole weights are in memory at a time.
            for block in part if isinstance(part, ModuleList) else ():
                fully_shard(block, mesh=mesh)
        fully_shard(self.module, mesh=mesh)

    def configure_optimizers(self) -> Any:
        task = self._task
        parameters = self.module.parameters()
        return optimizer_of(task.optimizer, task.optimizer_args, task.learning_rate, parameters)

    def on_fit_start(self) -> None:
        """Move what is no part of the module, like a loss with weights of the classes."""
        given: Any = (self.loss.call, self.loss.by_row)
        for each in given:
            if hasattr(each, "to"):
                each.to(self.device)

    def on_validation_epoch_start(self) -> None:
        """Give all nodes the first one's buffers, as DDP does by itself."""
        if self.device_mesh is not None:
            broadcast(self.module.buffers())

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self._begin_sum(batch.rows)
        with self._kept_norms(batch.rows):
            return self._measured(batch, "")

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients: of the mean over the rows of all nodes."""
        if self._sum is not None:
            self._sum.wait()
        # A strategy takes the mean of the nodes' gradients, and nodes differ in rows.
        share = self._rows * self._world / self._all_rows
        (loss * share.to(loss.dtype)).backward()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._measured(batch, "val_")

    def _begin_sum(self, rows: int) -> None:
        """Begin to add up the rows of all nodes' batches: they travel during the forward pass."""
        import torch

        self._rows, self._all_rows = rows, torch.tensor(float(rows), device=self.device)
        if self._world > 1:
            self._sum = torch.distributed.all_reduce(self._all_rows, async_op=True)

    @contextmanager
    def _kept_norms(self, rows: int) -> Iterator[None]:
        """Make BatchNorm use its running statistics for a lone row: it has no variance."""
        if rows > 1 or self._task.batch_size == 1:
            yield
            return
        from torch.nn import SyncBatchNorm
        from torch.nn.modules.batchnorm import _BatchNorm

        norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm) and m.training]
        own = [norm for norm in norms if not isinstance(norm, SyncBatchNorm)]
        for norm in own:
            norm.eval()
        yield
        for norm in own:
            norm.train()

    def _measured(self, batch: Batch, prefix: str) -> torch.Tensor:
        """Return the loss of a batch; log it and the metrics, which Lightning averages by rows."""
        import torch

        output = self._called[0](**batch.inputs)
        _check_rows(output, batch)
        columns = self._task.columns
        label = labels_of(batch.labels, columns, output)
        label = fitted_label(self.loss, output, label, ", ".join(columns.labels))
        label = _moved(label, self.device)
        loss = self.loss.of(output, label, batch.weight)
        with torch.no_grad():
            for name, value in self._values(prefix, output, label, batch.rows).items():
                self._log(f"{prefix}{name}", value, batch.rows)
        self._log(f"{prefix}loss", loss.detach().double(), batch.rows)
        return loss

    def _values(self, prefix: str, output: Any, label: Any, rows: int) -> dict[str, Any]:
        import torch

        found: dict[str, Any] = {}
        for place, (name, metric) in enumerate(self.metrics.items()):
            if (key := f"{prefix}{place}") in self.kept:
                found[name] = self.kept[key]
                if rows:
                    found[name].update(output, target_of(self.loss, label))
                continue
            value = metric(output, label) if metric != ACCURACY else None
            value = accuracy(self.loss, output, label) if value is None else value
            # A number, or an array of the rows' values, of PyTorch or NumPy.
            found[name] = torch.as_tensor(value, device=self.device).detach().double().mean()
        return found

    def _log(self, name: str, value: Any, rows: int) -> None:
        # A float, because Lightning would round the nodes' mean of whole numbers.
        size = float(rows)
        self.log(name, value, on_step=False, on_epoch=True, sync_dist=True, batch_size=size)


def _moved(tensors: Any, device: Any) -> Any:
    """Return tensors, in whatever they are, on a device."""
    from lightning.fabric.utilities import move_data_to_device

    return move_data_to_device(tensors, device)


def _check_rows(output: Any, batch: Batch) -> None:
    if hasattr(output, "shape") and (not output.ndim or output.shape[0] != batch.size):
        taken = ", ".join(f"{name} {described(value)}" for name, value in batch.inputs.items())
        raise ConfigError(
            f"the model made {described(output)} of {taken}: its first axis must be the "
            f"{batch.size} rows. Where a column holds one number in a row, input_shapes={{column: "
            "[1]} makes it [rows, 1]"
        )


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
        return self.stopping.monitor or ("val_loss" if self.validates else "loss")

    def improves(self, logs: Mapping[str, float]) -> bool:
        """Take the values of an epoch; return whether they are the best."""
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
        patience = self.stopping.patience
        return patience is not None and self.state[1] >= patience


class Notes(Checkpoint):
    """The callback that keeps the history, stops early, and saves after each epoch.

    A checkpoint to Lightning, which calls those last: all is logged by then.

    Args:
        module: the one that is returned; its weights are kept.
        arrange: makes the batches.
        steps: what trains the module, if it is no module of Lightning.

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
        steps: Steps | None = None,
    ) -> None:
        super().__init__(every_epochs=1, ctx=ctx)
        self.module, self.arrange, self._task, self._steps = module, arrange, task, steps
        self._watch = Watch(task.stopping, task.validates, steps.metrics if steps else {})
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
        if self._steps is not None:  # whose logs are means over all rows
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            rows = _rows(batch[1])
            self._rows += rows
            if pl_module.automatic_optimization:  # Lightning has divided it
                rows *= trainer.accumulate_grad_batches
            self._loss = self._loss + loss.detach().double() * rows  # which waits for no GPU

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._is_validated = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record all nodes' metrics, stop the training if they no longer improve, and save."""
        logs = self._logs(trainer)
        epochs = max(map(len, self.history.values()), default=0)
        for name in dict.fromkeys([*self.history, *logs]):
            self.history.setdefault(name, [None] * epochs).append(logs.get(name))
        if self._task.verbose and self._ctx.is_chief:
            text = " - ".join(f"{name}: {value:.4g}" for name, value in logs.items())
            sys.stdout.write(f"Epoch {trainer.current_epoch + 1}/{self._task.epochs} - {text}\n")
            sys.stdout.flush()
        # `check_val_every_n_epoch` leaves epochs without a value to judge.
        is_judged = self._is_validated or not self._task.validates or self._watch.name in logs
        self._is_validated = False
        if self._task.stopping.patience is not None and is_judged and self._watch.improves(logs):
            self.best = full_state(self.module)
        stops = bool(trainer.should_stop or self._watch.stops)
        # All nodes stop, or none: one that stopped alone would leave the others in a collective.
        trainer.should_stop = self._stops = any(self._ctx.all_gather(stops))
        if self._task.saves:
            super().on_train_epoch_end(trainer, pl_module)

    def _logs(self, trainer: Any) -> dict[str, float]:
        """Return the epoch's entries of the history, over all nodes."""
        if self._steps is not None:
            return self._steps.logs()
        own = {"loss": float(self._loss) / self._rows} if self._rows else {}
        # Lightning keeps the last value of each metric: the same tensor where an epoch logs none.
        found, before = dict(trainer.callback_metrics), self._logged
        own |= {name: float(x) for name, x in found.items() if x is not before.get(name)}
        self._logged = found
        # Lightning reduces a metric over nodes only if it is logged with `sync_dist=True`.
        logs = _means(self._ctx.all_gather([self._rows, own]))
        self._loss, self._rows = 0.0, 0
        return logs

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": self.history,
            "watch": self._watch.state,
            "best": self.best,
            "stops": self._stops,
            "sample": self.arrange.sample,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
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
