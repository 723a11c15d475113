"""PyTorch models in a training as Spark jobs: the driver's, and the workers'.

Runs in: driver, feeder
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.core.errors import ConfigError
from sparkdl.ml.jobs.rows import Column
from sparkdl.ml.jobs.task import Master, Sum, unpack
from sparkdl.values.ndarrays import Array

if TYPE_CHECKING:
    import torch

    LossFn = Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]
    OptimizerFn = Callable[[Any], torch.optim.Optimizer]
    ModelFn = Callable[[], torch.nn.Module]


@dataclass(frozen=True)
class TorchSpec:
    """Makes a worker's model from the user's functions."""

    model_fn: ModelFn
    loss_fn: LossFn
    optimizer_fn: OptimizerFn

    def learner(self) -> TorchLearner:
        """Return the worker's model."""
        share_threads()
        return TorchLearner(self)


class _Trained:
    """A model and its optimizer; its weights and buffers as arrays."""

    def __init__(self, spec: TorchSpec) -> None:
        self.spec = spec
        self.model = spec.model_fn()
        self.trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = spec.optimizer_fn(self.trainable)
        trainable = {id(parameter) for parameter in self.trainable}
        tensors = [*self.model.parameters(), *self.model.buffers()]
        # Frozen weights and buffers; those of batch normalization change without a gradient.
        self.others = [tensor for tensor in tensors if id(tensor) not in trainable]

    def weights(self) -> list[Array]:
        return [_array(tensor) for tensor in (*self.trainable, *self.others)]

    def assign(self, arrays: Sequence[Array]) -> None:
        """Set the weights."""
        set_tensors((*self.trainable, *self.others), arrays)


def set_tensors(tensors: Sequence[Any], arrays: Sequence[Array]) -> None:
    """Copy arrays into tensors."""
    import torch

    with torch.no_grad():
        for tensor, array in zip(tensors, arrays, strict=True):
            tensor.copy_(torch.from_numpy(np.array(array)))


class TorchLearner:
    """A worker's model."""

    def __init__(self, spec: TorchSpec) -> None:
        self._spec, self._trained = spec, _Trained(spec)

    def load(self, state: Sequence[Array]) -> None:
        """Set the weights."""
        self._trained.assign(state)

    def learn(
        self, batch: dict[str, Array], seed: int
    ) -> tuple[Sequence[Array], tuple[Array, ...]]:
        """Return the gradients with the weights that are not trained, and the metrics' states."""
        import torch

        # So that a repeated task computes the same, with dropout as well.
        torch.manual_seed(seed)
        trained = self._trained
        trained.model.train()
        trained.model.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        gradients = [
            # A parameter that the loss of these rows does not depend on has no gradient.
            np.zeros(tuple(p.shape), _array(p).dtype) if p.grad is None else _array(p.grad)
            for p in trained.trainable
        ]
        learned = [*gradients, *(_array(tensor) for tensor in trained.others)]
        return learned, _metrics(loss, batch)

    def evaluate(self, batch: dict[str, Array]) -> tuple[Array, ...]:
        """Evaluate some rows."""
        import torch

        self._trained.model.eval()
        with torch.no_grad():
            return _metrics(self._loss(batch), batch)

    def _loss(self, batch: dict[str, Array]) -> torch.Tensor:
        return _loss(self._spec, self._trained.model, _tensors_of(batch))


def _tensors_of(batch: dict[str, Array]) -> dict[str, torch.Tensor]:
    """Return a batch as the user's loss takes it."""
    import torch

    # Copies, because PyTorch warns of arrays that cannot be written to.
    return {name: torch.from_numpy(np.array(array)) for name, array in batch.items()}


def _loss(spec: TorchSpec, model: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    import torch

    loss = spec.loss_fn(model, tensors)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigError(
            f"loss_fn returned {type(loss).__name__}: it must return the mean over the batch as a "
            "tensor of one number"
        )
    return loss


class TorchMaster(Master):
    """The driver's model: the weights, and the optimizer with all that it remembers."""

    def __init__(self, spec: TorchSpec, columns: Sequence[str], seed: int) -> None:
        import torch

        self._columns = columns
        with torch.random.fork_rng(devices=[]):  # the driver's own random numbers stay as they are
            torch.manual_seed(seed)
            self._trained = _Trained(spec)
        self.model = self._trained.model
        if not self._trained.trainable:
            raise ConfigError(
                "the model of model_fn has no parameters to train: at least one must have "
                "requires_grad=True"
            )

    def columns(self) -> tuple[Column, ...]:
        """Return which columns are kept."""
        return tuple(Column(name) for name in self._columns)

    def begin(self, sample: dict[str, Array]) -> None:
        """Compute the loss of a row: what is wrong with it ends the training here."""
        import torch

        model = self._trained.model.eval()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            _loss(self._trained.spec, model, _tensors_of(sample))
        model.train()

    def state(self) -> list[Array]:
        """Return what workers need."""
        return self._trained.weights()

    def apply(self, found: Sum) -> None:
        """Take a step by the averaged gradients."""
        import torch

        assert found.vector is not None
        trained = self._trained
        learned = unpack(found.vector, found.exact, trained.weights())
        for parameter, gradient in zip(trained.trainable, learned, strict=False):
            parameter.grad = torch.from_numpy(np.array(gradient))
        set_tensors(trained.others, learned[len(trained.trainable) :])
        trained.optimizer.step()

    def metrics(self, states: Sequence[Array]) -> dict[str, float]:
        """Return the mean loss by its sum over rows."""
        return {"loss": float(states[0][0] / states[0][1])}


def share_threads() -> None:
    """In a Spark task: as many threads as it has cores; PyTorch takes all cores otherwise."""
    import torch
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is not None:
        torch.set_num_threads(context.cpus())


def _array(tensor: Any) -> Array:
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()  # numpy has no such type
    # A copy, because `numpy()` shares the memory, which the next step changes.
    return np.array(tensor.cpu().numpy())


def _metrics(loss: Any, batch: dict[str, Array]) -> tuple[Array, ...]:
    rows = len(next(iter(batch.values())))
    # Sums, because batches differ in their rows.
    return (np.array([loss.item() * rows, rows], np.float64),)
