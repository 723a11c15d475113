"""A module of PyTorch with its loss, metrics and optimizer, as Lightning's `Trainer` takes it.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError
from sparkdl.feed.reader.batches import SAMPLE_WEIGHT
from sparkdl.lightning import TRAINERS, Adopted
from sparkdl.ml.estimators.lightning_train import Arrange
from sparkdl.ml.estimators.torch_batch import (
    Means,
    described,
    fitted_label,
    loss_of,
    metrics_of,
    naming,
    optimizer_of,
)
from sparkdl.ml.estimators.torch_module import SAMPLE_ROWS, labels_of, weights_of
from sparkdl.ml.estimators.torch_shapes import unmixed

if TYPE_CHECKING:
    import torch

    from sparkdl.ml.estimators.torch_train import TorchTask
    from sparkdl.node.context import NodeContext


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
        """Move it as Lightning asks; but the labels are checked first, and a GPU has one wait."""
        inputs = {name: x.to(device, non_blocking=True) for name, x in self.inputs.items()}
        weight = None if self.weight is None else self.weight.to(device)
        return replace(self, inputs=inputs, weight=weight)

    def without_last(self) -> Batch:
        """Return it with one row fewer, where its inputs are no matter."""
        labels = {name: values[:-1] for name, values in self.labels.items()}
        weight = None if self.weight is None else self.weight[:-1]
        return replace(self, labels=labels, weight=weight)


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
    device: Any
    device_mesh: Any
    trainer: Any

    def __init__(self, module: Any, task: TorchTask, ctx: NodeContext) -> None:
        super().__init__()
        self.module, self._task, self._world = module, task, ctx.num_workers
        self.loss, self.metrics = loss_of(task.loss), metrics_of(task.metrics)
        self._means: dict[str, Means] = {}
        self._share: Callable[[], float] = lambda: 1.0
        self._is_tried = False

    def configure_model(self) -> None:
        """Shard the module, if a strategy has made a mesh for it."""
        if self.device_mesh is None:
            return
        from torch import distributed
        from torch.distributed.fsdp import fully_shard
        from torch.nn import ModuleList

        mesh = self.device_mesh["data_parallel"]
        self.module.to(self.trainer.strategy.root_device)
        # FSDP does not do this, as DDP does: nodes without a seed have made different weights.
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            distributed.broadcast(tensor.detach(), 0)
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
        for each in (self.loss.call, self.loss.by_row, *self.metrics.values()):
            if hasattr(each, "to"):
                each.to(self.device)

    def on_train_epoch_start(self) -> None:
        """Begin the means of an epoch."""
        self._means = {"": self._new_means(self.metrics)}

    def on_validation_epoch_start(self) -> None:
        """Begin those of its validation."""
        self._means["val_"] = self._new_means(self.metrics)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        # Begun before the forward pass, so that it travels meanwhile.
        self._share = self._shared(batch.rows)
        with self._kept_norms(batch.rows):
            return self._measured(batch, self._means[""])

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients: of the mean over the rows of all nodes."""
        (loss * self._share()).backward()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Measure a batch."""
        self._measured(batch, self._means["val_"])

    def logs(self) -> dict[str, float]:
        """Return the epoch's entries of the history, over all nodes; call it on all of them."""
        return {
            f"{prefix}{name}": value
            for prefix, means in self._means.items()
            for name, value in means.result().items()
        }

    def _new_means(self, metrics: Mapping[str, Any]) -> Means:
        return Means(self.loss, metrics, self._reduce, self.device)

    def _reduce(self, values: torch.Tensor) -> None:
        import torch

        if self._world > 1:
            torch.distributed.all_reduce(values)

    def _shared(self, rows: int) -> Callable[[], float]:
        """Begin to add up the rows of all nodes' batches; return what waits for this node's share.

        A strategy takes the mean of the nodes' gradients, and nodes differ in rows.
        """
        import torch

        if self._world == 1:
            return lambda: 1.0
        total = torch.tensor([rows], dtype=torch.float64, device=self.device)
        work: Any = torch.distributed.all_reduce(total, async_op=True)

        def share() -> float:
            work.wait()
            return rows * self._world / float(total.item())

        return share

    @contextmanager
    def _kept_norms(self, rows: int) -> Iterator[None]:
        """Make BatchNorm use its running statistics for a lone row: it has no variance."""
        if rows > 1 or self._task.batch_size == 1:
            yield
            return
        from torch.nn import SyncBatchNorm
        from torch.nn.modules.batchnorm import _BatchNorm

        kept = [
            each
            for each in self.module.modules()
            if isinstance(each, _BatchNorm) and not isinstance(each, SyncBatchNorm)
        ]
        modes = [each.training for each in kept]
        for each in kept:
            each.eval()
        yield
        for each, mode in zip(kept, modes, strict=True):
            each.train(mode)

    def _measured(self, batch: Batch, means: Means) -> torch.Tensor:
        """Return the loss of a batch; add it and the metrics to the means."""
        is_first, self._is_tried = not self._is_tried, True
        # Shards run on all nodes together, whose errors come here, too.
        is_own = is_first and self.device_mesh is None
        with naming("the model", **batch.inputs) if is_own else nullcontext():
            output = self.module(**batch.inputs)
        _check_rows(output, batch)
        if is_first:
            self._try(output, batch)
        loss, label = self._compared(output, batch)
        means.add(loss, output, label, batch.rows)
        return loss

    def _try(self, output: Any, batch: Batch) -> None:
        """Compute loss and metrics of the first batch, and look at the shapes that they compare."""
        import torch

        if batch.size in getattr(output, "shape", ())[1:] and batch.size > SAMPLE_ROWS:
            # Another number of rows than of outputs: the loss must not mistake one for the other.
            output, batch = output[:-1], batch.without_last()
        given = {"output": output, "label": labels_of(batch.labels, self._task.columns, output)}
        sources = {"output": output, "label": list(batch.labels.values())}
        what = f"the loss {self.loss.name}"
        with torch.no_grad(), naming(what, **given), unmixed(what, sources):
            loss, label = self._compared(output, batch)
        for name, metric in self.metrics.items():
            what, sources = f"the metric {name!r}", {"output": output, "label": label}
            with naming(what, **sources), unmixed(what, sources):
                self._new_means({name: metric}).add(loss, output, label, 1)

    def _compared(self, output: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
        """Return the loss, and the label as the loss takes it."""
        columns = self._task.columns
        label = labels_of(batch.labels, columns, output)
        label = _on(self.device, fitted_label(self.loss, output, label, ", ".join(columns.labels)))
        return self.loss.of(output, label, batch.weight), label


def _on(device: Any, label: Any) -> Any:
    """Return a label, or several, on a device."""
    if isinstance(label, Mapping):
        return {name: each.to(device) for name, each in label.items()}
    return tuple(e.to(device) for e in label) if isinstance(label, tuple) else label.to(device)


def _check_rows(output: Any, batch: Batch) -> None:
    """Check that the model gives its outputs row by row.

    Raises:
        ConfigError: if it does not: a linear layer takes a column of numbers for one vector.
    """
    if hasattr(output, "shape") and (not output.ndim or output.shape[0] != batch.size):
        taken = ", ".join(f"{name} {described(value)}" for name, value in batch.inputs.items())
        raise ConfigError(
            f"the model made {described(output)} of {taken}: its first axis must be the {batch.size} "
            "rows. Where a column holds one number in a row, input_shapes={column: [1]} makes it "
            "[rows, 1]"
        )
