"""The training of a PyTorch model in one of several processes.

Runs in: child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/torch/remote.py
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.scratch import scratch_folder
from sparkdl.horovod.spark.common.util import say, to_list
from sparkdl.horovod.spark.common.work import Work
from sparkdl.horovod.spark.torch.modules import (
    OptimizerState,
    as_list,
    load_start,
    multiply_rates,
    shaped,
    unpacked_module,
)
from sparkdl.node.context import current

if TYPE_CHECKING:
    import torch

Tensors = Sequence["torch.Tensor"]
_STEPS_PER_LINE = 100


@dataclass(frozen=True)
class TorchTrainer:
    """The training function of each process."""

    work: Work

    def __call__(self) -> list[dict[str, Any]] | None:
        """Train; return the history, on rank 0."""
        self.work.start()
        import torch

        import sparkdl.horovod.torch as hvd

        hvd.init()
        if self.work.params.random_seed is not None:
            torch.manual_seed(self.work.params.random_seed)
        with scratch_folder() as folder:
            training = _Training(self.work, hvd, folder)
            history = training.run()
            if hvd.rank() == 0:
                return history
        return None


class _Training:
    """The training of this process."""

    def __init__(self, work: Work, hvd: Any, folder: Path) -> None:
        self.work, self.params, self.hvd, self.folder = work, work.params, hvd, folder
        self.is_root = hvd.rank() == 0
        with work.received("start") as file:
            start = load_start(file)
        self.device = chosen_device(hvd, self.params.use_gpu)
        self.model: Any = unpacked_module(start["model"]).to(self.device)
        self.state: OptimizerState = start["optimizer"]
        optimizer = self.state.optimizer_for(self.model)
        # As in Horovod: the batch of all processes is so many times larger (Goyal et al., 2017).
        multiply_rates(optimizer.param_groups, hvd.size())
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        compression = self.params.gradient_compression or hvd.Compression.none
        self.optimizer = hvd.DistributedOptimizer(
            optimizer,
            self.model.named_parameters(),
            compression,
            self.params.backward_passes_per_step,
        )
        self.pending = _Pending(self.model, self.optimizer)
        self.loss = Loss(_losses(self), self.params.loss_weights, len(self.params.label_cols))
        self.minibatch: Callable[..., Any] = self.params.train_minibatch_fn or train_minibatch
        self.writer = self._writer()

    def _writer(self) -> Any:
        if not (self.is_root and self.work.store.saving_runs()):
            return None
        try:
            import tensorboard.compat

            # TensorBoard imports TensorFlow, for seconds, unless there is this module. Keras' own
            # callback would miss it, but a node of this training needs none.
            if current() is not None:
                sys.modules.setdefault("tensorboard.compat.notf", tensorboard.compat)
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            say("No logs for TensorBoard: the package tensorboard is not installed")
            return None
        return SummaryWriter(str(self.folder / self.work.store.get_logs_subdir()))

    def run(self) -> list[dict[str, Any]]:
        size = self.hvd.size()
        steps, val_steps = self.work.steps(size)
        sync = self.work.store.sync_fn(self.work.run_id)
        if self.is_root and self.params.verbose:
            self.work.describe(size)
        history: list[dict[str, Any]] = []
        with self.work.rows(self.hvd.rank(), size) as rows:
            # One iterator for all epochs, as the readers of Horovod have it: epochs go on where the
            # last one ended.
            train = iter(rows.train_data())
            val = iter(rows.val_data()) if self.work.val is not None else None
            for epoch in range(self.params.epochs):
                measured = {"epoch": epoch, "train": self._train(epoch, train, steps)}
                if val is not None:
                    measured["validation"] = self._validate(epoch, val, val_steps)
                history.append(measured)
                if self.is_root:
                    if self.params.verbose:
                        say(f"{measured}")
                    self._save()
                    if self.work.store.saving_runs():
                        sync(str(self.folder))
        if self.is_root:
            self.work.send(self._checkpoint, "result")
            if self.writer is not None:
                self.writer.close()
                sync(str(self.folder))
        return history

    @property
    def _checkpoint(self) -> Path:
        return self.folder / self.work.store.get_checkpoint_filename()

    def _save(self) -> None:
        """Write the model, and the optimizer with the rate of one process."""
        import torch

        state = self.optimizer.state_dict()
        groups = [dict(group) for group in state["param_groups"]]
        multiply_rates(groups, 1 / self.hvd.size())
        state = {**state, "param_groups": groups}
        torch.save({"model": self.model.state_dict(), "optimizer": state}, self._checkpoint)

    def _train(self, epoch: int, rows: Iterator[Any], steps: int) -> dict[str, Any]:
        self.model.train()
        measure = self._measure()
        for step in range(steps):
            inputs, labels, weights = self._batch(next(rows))
            outputs, loss = self.minibatch(
                *(self.model, self.optimizer, self._outputs, self.loss, inputs, labels, weights),
                *(self.params.backward_passes_per_step, step),
            )
            measure.add(loss, *self._outputs(outputs, labels))
            if self.is_root and self.params.verbose and step and not step % _STEPS_PER_LINE:
                say(f"epoch {epoch}, batch {step} of {steps}: loss {measure.loss_here:.6g}")
        # Gradients that no step has used must not be added to the next epoch's.
        self.pending.step()
        return measure.over_all("train", epoch, self.writer)

    def _validate(self, epoch: int, rows: Iterator[Any], steps: int) -> dict[str, Any]:
        import torch

        self.model.eval()
        measure = self._measure()
        with torch.no_grad():
            for _ in range(steps):
                inputs, labels, weights = self._batch(next(rows))
                outputs, labels = self._outputs(self.model(*inputs), labels)
                measure.add(self.loss(outputs, labels, weights), outputs, labels)
        return measure.over_all("val", epoch, self.writer)

    def _measure(self) -> _Measure:
        return _Measure(self.hvd, self.params.metrics, self.params.label_cols)

    def _batch(self, row: Any) -> tuple[list[Any], list[Any], Any]:
        """Return inputs, labels and weights of a batch: columns, or columns and label."""
        features, label = row if isinstance(row, tuple) else (row, None)
        names, params = self.params.feature_cols, self.params
        shapes = params.input_shapes or [None] * len(names)
        inputs = [shaped(self._tensor(features[n]), s) for n, s in zip(names, shapes, strict=True)]
        found = [label if label is not None else features[name] for name in params.label_cols]
        weights = features[params.sample_weight_col] if params.sample_weight_col else None
        return (
            inputs,
            [self._tensor(values) for values in found],
            None if weights is None else self._tensor(weights).flatten(),
        )

    def _tensor(self, values: Any) -> torch.Tensor:
        import torch

        # A copy, because the values may be Arrow's memory, which must not change.
        found = values if isinstance(values, torch.Tensor) else torch.tensor(values)
        # Horovod gives models float32, whatever the columns hold.
        return found.to(self.device, torch.float32)

    def _outputs(self, outputs: Any, labels: Tensors) -> tuple[list[Any], list[Any]]:
        return matched(outputs, labels, self.params.label_cols, self.params.label_shapes)


def matched(
    outputs: Any, labels: Tensors, names: Sequence[str], shapes: Sequence[Sequence[int]] | None
) -> tuple[list[Any], list[Any]]:
    """Return the labels' outputs, and the labels in the outputs' shapes or the user's.

    Raises:
        ConfigError: if there are fewer outputs than labels.
    """
    found = as_list(outputs)[: len(labels)]
    if len(found) < len(labels):
        raise ConfigError(
            f"the model has {len(found)} outputs, and needs one for each label: {', '.join(names)}"
        )
    if shapes:
        return found, [shaped(x, shape) for x, shape in zip(labels, shapes, strict=True)]
    return found, [
        label.reshape(output.shape) if output.numel() == label.numel() else label
        for label, output in zip(labels, found, strict=True)
    ]


def chosen_device(hvd: Any, use_gpu: bool) -> torch.device:
    """Return where to train; the same kind in all processes.

    Raises:
        ConfigError: if only some have GPUs.
    """
    import torch

    has_gpu = use_gpu and torch.cuda.is_available()
    # All ask, because a member on a CPU and one on a GPU would wait for each other.
    found = hvd.allgather_object(has_gpu, name="device type")
    if len(set(found)) > 1:
        without = [rank for rank, each in enumerate(found) if not each]
        raise ConfigError(
            f"the processes {without} have no GPU, and others have: give all of them GPUs, or set "
            "use_gpu=False"
        )
    if not has_gpu:
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", hvd.local_rank())


def train_minibatch(  # noqa: PLR0913 (the arguments of users' own, train_minibatch_fn)
    model: Any,
    optimizer: Any,
    transform_outputs: Callable[[Any, Tensors], tuple[list[Any], list[Any]]],
    loss_fn: Callable[..., torch.Tensor],
    inputs: Tensors,
    labels: Tensors,
    sample_weights: torch.Tensor | None,
    backward_passes_per_step: int,
    batch_idx: int,
) -> tuple[Any, torch.Tensor]:
    """Train on a batch; return the model's outputs and the loss."""
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels, sample_weights)
    (loss / backward_passes_per_step).backward()
    if (batch_idx + 1) % backward_passes_per_step == 0:
        optimizer.step()
        optimizer.zero_grad()
    return outputs, loss


class _Pending:
    """Knows of gradients that no step has used: users' functions may leave the last step to us."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._has_gradients = False
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._note)
        optimizer.register_step_post_hook(self._forget)

    def _note(self, _param: object) -> None:
        self._has_gradients = True

    def _forget(self, *_: object) -> None:
        self._has_gradients = False

    def step(self) -> None:
        if self._has_gradients:
            self._optimizer.step()
            self._optimizer.zero_grad()


def _losses(training: _Training) -> list[Any]:
    params = training.params
    count = len(params.label_cols)
    if params.loss_constructors is None:
        return to_list(params.loss, count) or []
    given = {
        "model": training.model,
        "optimizer_cls": training.state.kind,
        "train_rows": training.work.train.num_rows,
        "val_rows": training.work.val.num_rows if training.work.val else 0,
        "hvd": training.hvd,
    }
    return [make(**given) for make in to_list(params.loss_constructors, count) or []]


@dataclass(frozen=True)
class Loss:
    """The weighted sum of the losses of all labels.

    Attributes:
        functions: one for each label.
        weights: of the labels; equal ones, of the sum 1, if it is not given.
    """

    functions: Sequence[Callable[..., Any]]
    weights: Sequence[float] | None
    num_labels: int

    def __call__(
        self, outputs: Tensors, labels: Tensors, sample_weights: torch.Tensor | None = None
    ) -> Any:
        """Return the loss of a batch: with weights the mean of the rows' losses times weights."""
        weights = self.weights or [1.0 / self.num_labels] * self.num_labels
        return sum(
            weight * (
                function(output, label)
                if sample_weights is None
                else (_by_row(function, output, label) * sample_weights).mean()
            )
            for function, output, label, weight in zip(
                self.functions, outputs, labels, weights, strict=True
            )
        )  # fmt: skip


def _by_row(function: Callable[..., Any], output: Any, label: Any) -> Any:
    import torch

    if isinstance(function, torch.nn.Module) and hasattr(function, "reduction"):
        own = copy.copy(function)
        own.reduction = "none"
        losses = own(output, label)
    else:
        losses = function(output, label, reduction="none")
    return losses.reshape(len(losses), -1).mean(1)


class _Measure:
    """Loss and metrics of an epoch; means of the batches of all processes."""

    def __init__(self, hvd: Any, metrics: Sequence[Any], label_cols: Sequence[str]) -> None:
        self._hvd = hvd
        groups = [group if isinstance(group, list | tuple) else [group] for group in metrics]
        self._groups = [to_list(group, len(label_cols)) or [] for group in groups]
        self._names = [
            [f"group_{number}_{label}" for label in label_cols] for number in range(len(groups))
        ]
        self._sums = [0.0] * (1 + sum(map(len, self._names)))
        self._count = 0

    @property
    def loss_here(self) -> float:
        return float(self._sums[0]) / self._count

    def add(self, loss: Any, outputs: Tensors, labels: Tensors) -> None:
        import torch

        found = [loss.detach()] + [
            torch.as_tensor(function(output, label)).detach()
            for group in self._groups
            for function, output, label in zip(group, outputs, labels, strict=True)
        ]
        self._sums = [total + value for total, value in zip(self._sums, found, strict=True)]
        self._count += 1

    def over_all(self, stage: str, epoch: int, writer: Any) -> dict[str, Any]:
        import torch

        sums = torch.tensor([float(total) for total in self._sums], dtype=torch.float64)
        means = iter(self._hvd.allreduce(sums / self._count, name=f"{stage} means").tolist())
        loss = next(means)
        groups: list[Mapping[str, float]] = [
            {name: next(means) for name in names} for names in self._names
        ]
        if writer is not None:
            writer.add_scalar(f"{stage}/loss", loss, epoch)
            for number, group in enumerate(groups):
                for name, value in group.items():
                    writer.add_scalar(f"{stage}/{name}:{number}", value, epoch)
            writer.flush()
        return {"loss": loss, "all_metrics": groups}
