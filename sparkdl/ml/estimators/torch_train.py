"""Train a PyTorch model on a node: the training function of `TorchEstimator`.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.feed.reader.batches import SAMPLE_WEIGHT
from sparkdl.lightning import TRAINERS, Adopted
from sparkdl.ml.estimators.columns import check_board
from sparkdl.ml.estimators.lightning_train import Arrange, Notes, fitted
from sparkdl.ml.estimators.torch_batch import (
    ACCURACY,
    accuracy,
    described,
    fitted_label,
    loss_of,
    metrics_of,
    optimizer_of,
    target_of,
)
from sparkdl.ml.estimators.torch_module import (
    Fitted,
    ModuleTask,
    broadcast,
    full_state,
    join,
    labels_of,
    made,
    note_inputs,
    trained,
    weights_of,
)
from sparkdl.ml.namespace import Namespace
from sparkdl.ml.scoring.torch import plain

if TYPE_CHECKING:
    import torch

    from sparkdl.ml.scoring.source import Tensor
    from sparkdl.node.context import NodeContext

TrainFn = Callable[[Any, Namespace, Any], Any]


@dataclass(frozen=True, kw_only=True)
class TorchTask(ModuleTask):
    """The training task that each node receives from `TorchEstimator`.

    Attributes:
        train_fn: a function that replaces the `Trainer`; called with `args`.
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
    """Fit the model, on several nodes under a strategy; return what `trained` does.

    Raises:
        ConfigError: if the model cannot be trained, or could not be returned; before any row.
        FrameworkMissingError: without Lightning; if TensorBoard is to log and is not installed.
    """
    check_board(task)
    if task.train_fn is None:
        check_lightning()
    given = made(task, ctx)
    module = plain(given)

    def fit(inputs: dict[str, Tensor]) -> Fitted:
        if task.train_fn is not None:
            sample, device = note_inputs(given), join(ctx)
            history = task.train_fn(given.to(device), task.args, ctx)
            return history, full_state(module), sample, ""
        steps = Steps(given, task, ctx)
        notes = _EpochNotes(steps, Counted(task, inputs, module), task, ctx)
        state = fitted(steps, notes, task, ctx, _trainer_args(task, ctx))
        return notes.history, state, notes.arrange.sample, steps.loss.scores

    return trained(task, ctx, module, fit)


def _trainer_args(task: TorchTask, ctx: NodeContext) -> dict[str, Any]:
    # FSDP gathers weights into memory that the training uses as well.
    given: dict[str, Any] = {"inference_mode": False}
    if task.strategy == "fsdp" and ctx.num_workers > 1:
        from lightning.pytorch.strategies import ModelParallelStrategy

        # Lightning's own "fsdp" is the older kind, which needs GPUs.
        sharding = ModelParallelStrategy(ctx.num_workers, 1, save_distributed_checkpoint=False)
        given["strategy"] = sharding
    return given


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
        names = ["loss", *self._steps.metrics]
        names += [f"val_{name}" for name in names] if self._task.validates else []
        return {name: float(trainer.callback_metrics[name]) for name in names}

    def _called_back(self, trainer: Any, logs: Mapping[str, float]) -> bool:
        if not self._callbacks:
            return False
        (optimizer,) = trainer.optimizers
        epoch = Epoch(trainer.current_epoch, logs, self.module, optimizer, self._ctx)
        for callback in self._callbacks:
            callback(epoch)
        # All nodes stop, or none: one that stopped alone would leave the others in a collective.
        return any(self._ctx.all_gather(bool(epoch.stops)))


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
        """The rows that are there."""
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
        """Return the optimizer, of the module's parameters or shards."""
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
        """Return the loss of a batch."""
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
        """Measure a batch."""
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
        """Return what is logged of each metric."""
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
    """Check that the model gives its outputs row by row.

    Raises:
        ConfigError: if it does not: a linear layer takes a column of numbers for one vector.
    """
    if hasattr(output, "shape") and (not output.ndim or output.shape[0] != batch.size):
        taken = ", ".join(f"{name} {described(value)}" for name, value in batch.inputs.items())
        raise ConfigError(
            f"the model made {described(output)} of {taken}: its first axis must be the "
            f"{batch.size} rows. Where a column holds one number in a row, input_shapes={{column: "
            "[1]} makes it [rows, 1]"
        )
