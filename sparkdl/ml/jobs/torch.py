"""PyTorch models in a training as Spark jobs: the driver's, and the workers'.

Runs in: driver, feeder
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.core.errors import ConfigError
from sparkdl.ml.jobs.work import Master
from sparkdl.values.ndarrays import Array

if TYPE_CHECKING:
    import torch

    LossFn = Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]
    OptimizerFn = Callable[[Any], torch.optim.Optimizer]
    ModelFn = Callable[[], torch.nn.Module]


class TorchLearner:
    """A model, in the driver or in a worker."""

    def __init__(self, model_fn: ModelFn, loss_fn: LossFn) -> None:
        from pyspark import TaskContext

        # As many threads as the task has cores; PyTorch takes all cores otherwise.
        if (context := TaskContext.get()) is not None:
            import torch

            torch.set_num_threads(context.cpus())
        self._loss_fn, self.model = loss_fn, model_fn()
        self.trainable = [p for p in self.model.parameters() if p.requires_grad]
        trainable = {id(parameter) for parameter in self.trainable}
        tensors = [*self.model.parameters(), *self.model.buffers()]
        # Frozen weights and buffers; those of batch normalization change without a gradient.
        self.others = [tensor for tensor in tensors if id(tensor) not in trainable]

    def load(self, state: Sequence[Array]) -> None:
        set_tensors((*self.trainable, *self.others), state)

    def learn(
        self, batch: dict[str, Array], seed: int
    ) -> tuple[Sequence[Array], tuple[Array, ...]]:
        """Return the gradients with the weights that are not trained, and the metrics' states."""
        import torch

        # So that a repeated task computes the same, with dropout as well.
        torch.manual_seed(seed)
        self.model.train()
        self.model.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        # A parameter that the loss of these rows does not depend on has no gradient.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.trainable]
        return arrays_of([*gradients, *self.others]), _metrics(loss, batch)

    def evaluate(self, batch: dict[str, Array]) -> tuple[Array, ...]:
        import torch

        self.model.eval()
        with torch.no_grad():
            return _metrics(self.loss(batch), batch)

    def loss(self, batch: dict[str, Array]) -> torch.Tensor:
        import torch

        # Copies, because PyTorch warns of arrays that cannot be written to.
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in batch.items()}
        loss = self._loss_fn(self.model, tensors)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"loss_fn returned {type(loss).__name__}: it must return the mean over the batch "
                "as a tensor of one number"
            )
        return loss


class TorchMaster(Master):
    """The driver's model: the weights, and the optimizer with all that it remembers."""

    def __init__(
        self, here: Callable[[], TorchLearner], optimizer_fn: OptimizerFn, seed: int
    ) -> None:
        import torch

        with torch.random.fork_rng(devices=[]):  # the driver's own random numbers stay as they are
            torch.manual_seed(seed)
            self._here = here()
        self.model = self._here.model
        if not self._here.trainable:
            raise ConfigError(
                "the model of model_fn has no parameters to train: at least one must have "
                "requires_grad=True"
            )
        self._optimizer = optimizer_fn(self._here.trainable)

    def begin(self, sample: dict[str, Array]) -> None:
        """Compute the loss of a row: what is wrong with it ends the training here."""
        import torch

        with torch.random.fork_rng(devices=[]):
            self._here.evaluate(sample)
        self.model.train()

    def state(self) -> list[Array]:
        return arrays_of([*self._here.trainable, *self._here.others])

    def apply(self, learned: Sequence[Array]) -> None:
        import torch

        for parameter, gradient in zip(self._here.trainable, learned, strict=False):
            parameter.grad = torch.from_numpy(gradient).to(parameter.dtype)
        set_tensors(self._here.others, learned[len(self._here.trainable) :])
        self._optimizer.step()

    def metrics(self, states: Sequence[Array]) -> dict[str, float]:
        """Return the mean loss by its sum over rows."""
        return {"loss": float(states[0][0] / states[0][1])}


def set_tensors(tensors: Sequence[Any], arrays: Sequence[Array]) -> None:
    import torch

    with torch.no_grad():
        for tensor, array in zip(tensors, arrays, strict=True):
            tensor.copy_(torch.from_numpy(np.array(array)))


def arrays_of(tensors: Sequence[Any]) -> list[Array]:
    """Return copies: `numpy()` shares the memory, which the next step changes."""
    import torch

    # numpy has no bfloat16.
    return [
        np.array((x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy())
        for x in (tensor.detach() for tensor in tensors)
    ]


def _metrics(loss: Any, batch: dict[str, Array]) -> tuple[Array, ...]:
    rows = len(next(iter(batch.values())))
    # Sums, because batches differ in their rows.
    return (np.array([loss.item() * rows, rows], np.float64),)
