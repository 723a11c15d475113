"""PyTorch models in a training as Spark jobs: the driver's, and the workers'.

Runs in: driver, feeder
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.torch_shapes import unmixed
from sparkdl.ml.jobs.rows import Column
from sparkdl.ml.jobs.task import Master, Sum, unpack
from sparkdl.ml.scoring.torch import uncompiled
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
    is_local: bool

    def learner(self) -> TorchLearner:
        """Return the worker's model."""
        share_threads()
        return TorchLearner(self)


class _Trained:
    """A model and its optimizer as arrays: weights, buffers, and the optimizer's memory."""

    def __init__(self, spec: TorchSpec) -> None:
        self.spec = spec
        self.model = uncompiled(spec.model_fn())
        self.trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = spec.optimizer_fn(self.trainable)
        trainable = {id(parameter) for parameter in self.trainable}
        tensors = [*self.model.parameters(), *self.model.buffers()]
        # Frozen weights and buffers; those of batch normalization change without a gradient.
        self.others = [tensor for tensor in tensors if id(tensor) not in trainable]

    def weights(self) -> list[Array]:
        return [_array(tensor) for tensor in (*self.trainable, *self.others)]

    def memory(self) -> list[Array]:
        """Return the optimizer's state; the last array is JSON that says where each belongs."""
        found, places = [], []
        for number, values in self.optimizer.state_dict()["state"].items():
            for name, value in values.items():
                if value is None:
                    continue
                if not (isinstance(value, (int, float)) or hasattr(value, "detach")):
                    raise ConfigError(
                        f"{type(self.optimizer).__name__} remembers {name!r} as a "
                        f"{type(value).__name__}, which cannot be averaged or saved: choose "
                        "another optimizer"
                    )
                is_tensor = hasattr(value, "detach")
                array = _array(value) if is_tensor else np.asarray(value)
                places.append([number, name, is_tensor, list(array.shape), array.dtype.str])
                found.append(array)
        return [*found, np.frombuffer(json.dumps(places).encode(), np.uint8)]

    def all_like(self, places: Array) -> list[Array]:
        """Return arrays of the shapes of the weights and of the memory that `places` lists."""
        memory = [np.empty(shape, dtype) for *_, shape, dtype in json.loads(places.tobytes())]
        return [*self.weights(), *memory, places]

    def assign(self, arrays: Sequence[Array]) -> None:
        """Set the weights, and the optimizer's memory if it is there."""
        import torch

        count = len(self.trainable) + len(self.others)
        with torch.no_grad():
            for tensor, array in zip((*self.trainable, *self.others), arrays, strict=False):
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(array)))
        if len(arrays) == count:
            return
        state: dict[int, dict[str, Any]] = {}
        places = json.loads(arrays[-1].tobytes())
        for (number, name, is_tensor, *_), array in zip(places, arrays[count:-1], strict=True):
            value = torch.from_numpy(np.array(array)) if is_tensor else array.item()
            state.setdefault(number, {})[name] = value
        # The groups stay this optimizer's own: only what it remembers of the parameters travels.
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


class TorchLearner:
    """A worker's model."""

    def __init__(self, spec: TorchSpec) -> None:
        self._spec, self._trained = spec, _Trained(spec)

    def load(self, state: Sequence[Array]) -> None:
        """Set the weights, and the optimizer's memory where steps are local."""
        self._trained.assign(state)

    def learn(self, batch: dict[str, Array], seed: int) -> tuple[Array, ...]:
        """Compute a gradient, and take a step where steps are local."""
        import torch

        # So that a repeated task computes the same, with dropout as well.
        torch.manual_seed(seed)
        trained = self._trained
        trained.model.train()
        trained.model.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        if self._spec.is_local:
            trained.optimizer.step()
        return _metrics(loss, batch)

    def learned(self) -> Sequence[Array]:
        """Return the gradients and the weights that are not trained; or all."""
        trained = self._trained
        if self._spec.is_local:
            return [*trained.weights(), *trained.memory()]
        gradients = [
            # A parameter that the loss of these rows does not depend on has no gradient.
            np.zeros(tuple(p.shape), _array(p).dtype) if p.grad is None else _array(p.grad)
            for p in trained.trainable
        ]
        return [*gradients, *(_array(tensor) for tensor in trained.others)]

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
        self._is_local = spec.is_local
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
        """Compute the loss of some rows, and look at the shapes that it compares."""
        import torch

        # Several rows: a single one is compared with no other.
        rows = {name: np.repeat(array, 3, axis=0) for name, array in sample.items()}
        tensors, model, spec = _tensors_of(rows), self._trained.model, self._trained.spec
        with torch.random.fork_rng(devices=[]), torch.no_grad(), unmixed("loss_fn", tensors):
            _loss(spec, model.eval(), tensors)
        model.train()

    def state(self) -> list[Array]:
        """Return what workers need."""
        trained = self._trained
        return [*trained.weights(), *(trained.memory() if self._is_local else ())]

    def apply(self, found: Sum) -> None:
        """Take a step by the averaged gradients; or set the averaged weights."""
        import torch

        assert found.vector is not None
        trained = self._trained
        if self._is_local:
            places = found.exact[-1]
            trained.assign(unpack(found.vector, found.exact, trained.all_like(places)))
            return
        learned = unpack(found.vector, found.exact, trained.weights())
        for parameter, gradient in zip(trained.trainable, learned, strict=False):
            parameter.grad = torch.from_numpy(np.array(gradient))
        with torch.no_grad():
            for tensor, array in zip(
                trained.others, learned[len(trained.trainable) :], strict=True
            ):
                tensor.copy_(torch.from_numpy(np.array(array)))
        trained.optimizer.step()

    def metrics(self, states: Sequence[Array]) -> dict[str, float]:
        """Return the mean loss by its sum over rows."""
        return {"loss": float(states[0][0] / states[0][1])}

    def save(self) -> list[Array]:
        """Return all that a checkpoint needs."""
        return [*self._trained.weights(), *self._trained.memory()]

    def restore(self, saved: Sequence[Array]) -> None:
        """Continue from what `save` returned."""
        self._trained.assign(saved)


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
