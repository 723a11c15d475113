"""Train a PyTorch model on a node: the training function of `TorchEstimator`.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.feed.reader.batches import SAMPLE_WEIGHT
from sparkdl.ml.estimators.columns import VALIDATION, EarlyStopping, check_board, check_travels
from sparkdl.ml.estimators.namespace import Namespace
from sparkdl.ml.estimators.source import Tensor
from sparkdl.ml.estimators.torch_batch import (
    Means,
    Scores,
    described,
    fitted_label,
    is_greater_better,
    loss_of,
    metrics_of,
    naming,
    optimizer_of,
)
from sparkdl.ml.estimators.torch_module import (
    SAMPLE_ROWS,
    ModuleTask,
    arranged,
    broadcast,
    full_state,
    inputs_of,
    join,
    labels_of,
    load_state,
    made,
    note_inputs,
    optimizer_state,
    returned,
    say,
    weights_of,
    wrapped,
)
from sparkdl.ml.estimators.torch_shapes import unmixed
from sparkdl.ml.scoring.torch import module_content, module_signature, uncompiled

if TYPE_CHECKING:
    import torch

    from sparkdl.node.context import NodeContext

_STATE = "state.pt"
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


def train(task: TorchTask, ctx: NodeContext) -> dict[str, Any]:
    """Fit the model, on several nodes under a strategy.

    Returns:
        `history`; and of the chief `signature` as JSON, and `content`, the pickled module, or
        `path` if it is in `model_dir`.

    Raises:
        ConfigError: if the model cannot be trained, or could not be returned; before any row.
        FrameworkMissingError: if TensorBoard is to log and is not installed.
    """
    check_board(task)
    device = join(ctx)
    module = uncompiled(made(task, ctx))
    inputs = inputs_of(module_signature(module), task)
    # Pickled before the training, so that a module that cannot travel costs no epochs: a strategy
    # changes its class.
    content = module_content(module)
    check_travels(len(content), task.model_dir)
    if task.train_fn is None:
        loop = _Loop(task, ctx, module.to(device), inputs, device)
        history, state, sample, scores = loop.run()
    else:
        noted = note_inputs(module)
        history = task.train_fn(module.to(device), task.args, ctx)
        state, sample, scores = full_state(module), noted, ""
    found = returned(content, state, sample, scores, task, ctx) if ctx.is_chief else {}
    return {**found, "history": history}


class _Loop:
    """The epochs of a training.

    Attributes:
        history: metric to its values, one for each epoch.
    """

    def __init__(
        self,
        task: TorchTask,
        ctx: NodeContext,
        module: Any,
        inputs: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self._task, self._ctx, self._module, self._device = task, ctx, module, device
        self._inputs = inputs
        self._loss, self._metrics = loss_of(task.loss), metrics_of(task.metrics)
        for each in (self._loss.call, self._loss.by_row, *self._metrics.values()):
            if hasattr(each, "to"):  # a module, with weights of the classes for example
                each.to(device)
        self._dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        self._world = ctx.num_workers
        self._wrapped = wrapped(module, task.strategy, ctx, device)
        # After the wrapping: FSDP replaces the parameters by shards.
        self._optimizer = optimizer_of(
            task.optimizer, task.optimizer_args, task.learning_rate, module.parameters()
        )
        self._callbacks = list(task.callbacks() if callable(task.callbacks) else task.callbacks)
        self._watch = Watch(task.stopping, task.validates, self._metrics)
        self.history: dict[str, list[float]] = {}
        self._best: dict[str, Any] | None = None
        self._stops = False
        self._sample: dict[str, torch.Tensor] = {}
        self._is_tried = False

    def run(self) -> tuple[dict[str, list[float]], dict[str, Any], dict[str, Any], Scores]:
        """Train; return the history, the chief's model state, a batch, and the kind of scores."""
        begin = self._resume()
        feeds = [self._feed(DEFAULT_FEED)]
        if self._task.validates:
            feeds.append(self._feed(VALIDATION))
        for number in range(begin, self._task.epochs):
            if self._stops:
                break
            logs = self._trained(feeds[0])
            if len(feeds) > 1:
                logs |= {f"val_{name}": v for name, v in self._validated(feeds[1]).items()}
            self._end(number, logs)
        state = full_state(self._module) if self._best is None else self._best
        return self.history, state, self._sample, self._loss.scores

    def _feed(self, feed: str) -> Any:
        """Return batches, all of the same size; what only fills the last ones has no weight."""
        is_training = feed == DEFAULT_FEED
        return self._ctx.torch_dataset(
            self._task.batch_size,
            columns=list(self._task.columns.names),
            feed=feed,
            tail="pad",
            shuffle=self._task.shuffle and is_training,
            seed=self._task.seed or 0,
        )

    def _trained(self, batches: Any) -> dict[str, float]:
        self._wrapped.train()
        means = self._means()
        for padded in batches:
            rows, batch = real_rows(padded)
            if not self._sample:
                self._begin_with(batch)
            # Begun before the forward pass, so that it travels meanwhile.
            total = self._summed(rows)
            self._optimizer.zero_grad()
            with self._kept_norms(rows):
                loss, output, label = self._forward(self._wrapped, batch)
            if not self._is_tried:
                self._try(output, batch)
            # A strategy takes the mean of the nodes' gradients, and nodes differ in rows.
            (loss * (rows * self._world / total())).backward()
            self._optimizer.step()
            means.add(loss, output, label, rows)
        return means.result()

    def _validated(self, batches: Any) -> dict[str, float]:
        import torch

        # DDP copies the chief's buffers at the next training step, which may not come any more.
        if self._world > 1:
            broadcast(self._module.buffers())
        # The module itself: DDP would broadcast the buffers again with each batch.
        module = self._wrapped if self._task.strategy == "fsdp" else self._module
        module.eval()
        means = self._means()
        with torch.no_grad():
            for padded in batches:
                rows, batch = real_rows(padded)
                means.add(*self._forward(module, batch), rows)
        return means.result()

    def _means(self) -> Means:
        return Means(self._loss, self._metrics, self._reduce, self._device)

    def _reduce(self, values: torch.Tensor) -> None:
        import torch

        if self._world > 1:
            torch.distributed.all_reduce(values)

    def _summed(self, rows: int) -> Callable[[], float]:
        """Begin to add up the rows of all nodes' batches; return what waits for their number."""
        import torch

        if self._world == 1:
            return lambda: rows
        values = torch.tensor([rows], dtype=torch.float64, device=self._device)
        work: Any = torch.distributed.all_reduce(values, async_op=True)

        def total() -> float:
            work.wait()
            return float(values.item())

        return total

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
            for each in self._module.modules()
            if isinstance(each, _BatchNorm) and not isinstance(each, SyncBatchNorm)
        ]
        modes = [each.training for each in kept]
        for each in kept:
            each.eval()
        yield
        for each, mode in zip(kept, modes, strict=True):
            each.train(mode)

    def _begin_with(self, batch: dict[str, Any]) -> None:
        """Try the first batch on this node alone: what fails is the batch, and no other node."""
        import torch

        inputs = self._arranged(batch)
        self._sample = {name: x[:SAMPLE_ROWS].cpu() for name, x in inputs.items()}
        # A sharded module runs on all nodes together, or not at all.
        if self._task.strategy == "fsdp" and self._world > 1:
            return
        self._module.eval()
        with torch.no_grad(), naming("the model", **inputs):
            output = self._module(**inputs)
        rows = len(next(iter(inputs.values())))
        if rows in getattr(output, "shape", ())[1:] and rows > SAMPLE_ROWS:
            # Another number of rows than of outputs: the loss must not mistake one for the other.
            self._begin_with({name: values[:-1] for name, values in batch.items()})
            return
        self._try(output, batch)
        self._wrapped.train()

    def _try(self, output: Any, batch: dict[str, Any]) -> None:
        """Compute loss and metrics of the first batch, and look at the shapes that they compare."""
        import torch

        self._is_tried = True
        inputs, columns = self._arranged(batch), self._task.columns
        given = {"output": output, "label": labels_of(batch, columns, output)}
        sources = {"output": output, "label": [batch[name] for name in columns.labels]}
        what = f"the loss {self._loss.name}"
        with torch.no_grad(), naming(what, **given), unmixed(what, sources):
            loss, _, label = self._losses(output, batch, inputs)
        for name, metric in self._metrics.items():
            means = Means(self._loss, {name: metric}, self._reduce, self._device)
            what, sources = f"the metric {name!r}", {"output": output, "label": label}
            with naming(what, **sources), unmixed(what, sources):
                means.add(loss, output, label, 1)

    def _forward(self, module: Any, batch: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return loss, output and label of a batch."""
        inputs = self._arranged(batch)
        try:
            output = module(**inputs)
        except RuntimeError as error:
            # DDP raises a plain RuntimeError: only its advice tells it from the user's errors.
            if "find_unused_parameters" not in str(error):
                raise
            raise ConfigError(
                "a step has made no use of some of the model's parameters: set "
                "strategy='ddp_find_unused_parameters_true', or leave them out of the model"
            ) from error
        return self._losses(output, batch, inputs)

    def _arranged(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        return arranged(batch, self._inputs, self._dtype, self._device)

    def _losses(
        self, output: Any, batch: dict[str, Any], inputs: Mapping[str, Any]
    ) -> tuple[Any, Any, Any]:
        columns = self._task.columns
        weight = weights_of(batch, columns)
        weight = None if weight is None else weight.to(self._device)
        names = ", ".join(columns.labels)
        check_rows(output, len(batch[next(iter(columns.labels))]), inputs)
        # The label is checked before it moves to the GPU: reading a GPU's memory waits for the GPU.
        label = fitted_label(self._loss, output, labels_of(batch, columns, output), names)
        label = _on(self._device, label)
        return self._loss.of(output, label, weight), output, label

    def _end(self, number: int, logs: dict[str, float]) -> None:
        """End an epoch: note it, decide whether to stop, and save."""
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
        say(self._task, self._ctx, number, logs)
        if self._ctx.is_chief:
            self._board(number, logs)
        if self._task.stopping.patience is not None and self._watch.improves(logs):
            self._best = full_state(self._module)
        self._stops = self._called_back(number, logs) or self._watch.stops
        if self._task.saves:
            self._save(number + 1)

    def _called_back(self, number: int, logs: Mapping[str, float]) -> bool:
        import torch

        if not self._callbacks:
            return False
        epoch = Epoch(number, logs, self._module, self._optimizer, self._ctx)
        for callback in self._callbacks:
            callback(epoch)
        # All nodes stop, or none: one that stopped alone would leave the others in a collective.
        stops = torch.tensor([float(epoch.stops)], device=self._device)
        self._reduce(stops)
        return bool(stops.item())

    def _board(self, number: int, logs: Mapping[str, float]) -> None:
        if self._task.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            with SummaryWriter(self._task.tensorboard_dir) as writer:
                for name, value in logs.items():
                    writer.add_scalar(name, value, number)

    def _save(self, epochs: int) -> None:
        # On all nodes: reading shards is a collective.
        model, optimizer = full_state(self._module), optimizer_state(self._module, self._optimizer)
        with self._ctx.checkpoint(epochs) as folder:
            if self._ctx.is_chief:
                import torch

                own = (self.history, self._watch.state, self._best, self._stops, self._sample)
                torch.save({"model": model, "optimizer": optimizer, "own": own}, folder / _STATE)

    def _resume(self) -> int:
        """Load the last checkpoint; return how many epochs it has."""
        import torch

        last = self._ctx.last_checkpoint
        if last is None:
            return 0
        saved = torch.load(last.folder / _STATE, "cpu", weights_only=True)
        load_state(self._module, self._optimizer, saved["model"], saved["optimizer"])
        self.history, self._watch.state, self._best, self._stops, self._sample = saved["own"]
        return int(last.step)


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


def _on(device: Any, label: Any) -> Any:
    """Return a label, or several, on a device."""
    if isinstance(label, Mapping):
        return {name: each.to(device) for name, each in label.items()}
    return tuple(e.to(device) for e in label) if isinstance(label, tuple) else label.to(device)


def real_rows(batch: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return how many rows of a padded batch count, and these; one row where none does."""
    rows = int(batch[SAMPLE_WEIGHT].sum())
    kept = {name: values for name, values in batch.items() if name != SAMPLE_WEIGHT}
    # A node without rows takes part in the step all the same, with weight 0.
    return rows, {name: values[: max(rows, 1)] for name, values in kept.items()}


def check_rows(output: Any, rows: int, inputs: Mapping[str, Any]) -> None:
    """Check that the model gives its outputs row by row.

    Raises:
        ConfigError: if it does not: a linear layer takes a column of numbers for one vector.
    """
    if hasattr(output, "shape") and (not output.ndim or output.shape[0] != rows):
        taken = ", ".join(f"{name} {described(value)}" for name, value in inputs.items())
        raise ConfigError(
            f"the model made {described(output)} of {taken}: its first axis must be the {rows} "
            "rows. Where a column holds one number in a row, input_shapes={column: [1]} makes it "
            "[rows, 1]"
        )
