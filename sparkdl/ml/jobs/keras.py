"""Keras models in a training as Spark jobs: the workers', and the driver's. Any backend.

Runs in: driver, feeder
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.columns import by_tensor
from sparkdl.ml.estimators.keras_model import (
    inputs_of,
    keras_inputs_by_column,
    outputs_of,
)
from sparkdl.ml.estimators.keras_train import (
    KerasTask,
    arranged,
    callbacks_of,
    class_columns,
    own_callbacks,
)
from sparkdl.ml.jobs.torch import share_threads
from sparkdl.ml.jobs.work import Column, Master
from sparkdl.ml.scoring.share import task_share
from sparkdl.ml.scoring.source import Signature, Tensor
from sparkdl.ml.scoring.tensorflow import prepare_worker
from sparkdl.values.ndarrays import Array

if TYPE_CHECKING:
    from pyspark import Broadcast
_AVERAGES = ("sum_over_batch_size", "mean")


@dataclass(frozen=True)
class KerasSpec:
    """Makes a worker's model.

    Attributes:
        task: without the model where `content` has it.
        backend: Keras' on the driver.
    """

    task: KerasTask
    content: Broadcast[bytes] | None
    backend: str

    def learner(self) -> KerasLearner:
        """Return the worker's model.

        Raises:
            ConfigError: if the worker's Keras has another backend.
        """
        import keras

        if keras.backend.backend() != self.backend:
            raise ConfigError(
                f"Keras runs on {self.backend} at the driver and on {keras.backend.backend()} at "
                "the executors: set spark.executorEnv.KERAS_BACKEND to the driver's"
            )
        # As many threads as the task has cores; frameworks take all cores otherwise.
        if self.backend == "tensorflow":
            prepare_worker(task_share())
        elif self.backend == "torch":
            share_threads()
        recipe = self.task.recipe
        if self.content is not None and self.content.value is not None:
            recipe = replace(recipe, made=self.content.value)
        return KerasLearner(self.task, recipe.model())


class KerasLearner:
    """A worker's model: computes gradients by the model's own `train_on_batch`.

    Loss, metrics, regularisation, row weights and the model's own `train_step` are therefore
    Keras'. A stand-in for the optimizer keeps the gradients.
    """

    def __init__(self, task: KerasTask, model: Any) -> None:
        self._task, self._model = task, model
        model.optimizer = _keeper(model.optimizer.name)
        # Built now, so that its variables exist before `load` sets them.
        model.optimizer.build(model.trainable_variables)
        # Each random layer of Keras has such a variable, from which it draws.
        self._seeds = [v for v in model.variables if "seed_generator_state" in v.name]

    def load(self, state: Sequence[Array]) -> None:
        """Set the weights."""
        assign(self._model.weights, state)

    def learn(
        self, batch: dict[str, Array], seed: int
    ) -> tuple[Sequence[Array], tuple[Array, ...]]:
        """Return the gradients with the weights that are not trained, and the metrics' states."""
        for place, variable in enumerate(self._seeds):
            # Half the range, so that the numbers fit into signed types, too.
            state = np.random.SeedSequence([seed, place]).generate_state(2) >> 1
            variable.assign(state.astype(str(variable.dtype)))  # its type differs by backend
        if backend() == "torch":
            import torch

            torch.manual_seed(seed)  # which Keras' dropout draws from there
        self._model.reset_metrics()
        self._model.train_on_batch(*batch_of(self._task, self._model, batch))
        learned = [*self._model.optimizer.gradients, *self._model.non_trainable_weights]
        return as_arrays(learned), as_arrays(self._model.metrics_variables)

    def evaluate(self, batch: dict[str, Array]) -> tuple[Array, ...]:
        """Evaluate some rows."""
        self._model.reset_metrics()
        self._model.test_on_batch(*batch_of(self._task, self._model, batch))
        return as_arrays(self._model.metrics_variables)


def batch_of(task: KerasTask, model: Any, batch: Mapping[str, Array]) -> tuple[Any, ...]:
    """Return `(x, y)` or `(x, y, weight)`, as the model's methods take them."""
    columns = task.columns
    weight = () if columns.weight is None else (batch[columns.weight],)
    return (*arranged(columns, model, batch, _joined), *weight)


def _joined(columns: list[Array], tensor: Tensor) -> Array:
    if len(columns) == 1:
        return columns[0]
    values = np.stack(columns, axis=1)
    dims = tensor.shape[1:] if tensor.shape else (None,)
    return values if None in dims else values.reshape(-1, *(n or 0 for n in dims))


def backend() -> str:
    """Return the name of Keras' backend."""
    import keras

    return str(keras.backend.backend())


def signature_of(model: Any) -> Signature:
    """Return what a Keras model takes and gives, as `predict.keras_predictor` finds by TensorFlow.

    Raises:
        ConfigError: if its outputs are unknown.
    """
    return Signature(inputs_of(model), outputs_of(model))


def as_arrays(variables: Sequence[Any]) -> tuple[Array, ...]:
    """Return the values of Keras' variables."""
    import keras

    # A copy: on the CPU some backends share the memory, which the next step changes.
    return tuple(np.array(keras.ops.convert_to_numpy(variable)) for variable in variables)


def assign(variables: Sequence[Any], values: Sequence[Array]) -> None:
    """Set Keras' variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _keeper(name: str) -> Any:
    """Return an optimizer that changes nothing and keeps the gradients it is given."""
    import keras

    class Keeper(keras.optimizers.Optimizer):  # type: ignore[misc]
        def build(self, variables: Any) -> None:
            if not self.built:
                super().build(variables)
                self.gradients = self.add_optimizer_variables(variables, "gradient")

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            place = self._get_variable_index(variable)
            self.assign(self.gradients[place], keras.ops.convert_to_tensor(gradient))

    return Keeper(learning_rate=0.0, name=name)


class KerasMaster(Master):
    """The driver's model: the weights, and the optimizer with all that it remembers.

    Raises:
        ConfigError: if the model cannot be trained so; it says why.
    """

    def __init__(self, task: KerasTask) -> None:
        import keras

        # Before the model is made, whose initial weights it decides.
        if task.seed is not None:
            keras.utils.set_random_seed(task.seed)
        self.task, self.model = task, task.recipe.model()
        _check(self.model)
        self._list = keras.callbacks.CallbackList(
            [*callbacks_of(task, is_chief=True), *own_callbacks(task)],
            add_history=True,
            model=self.model,
            epochs=task.epochs,
        )

    def columns(self) -> tuple[Column, ...]:
        """Return the columns to store, and their inputs and dtypes."""
        columns = self.task.columns
        by_column = keras_inputs_by_column(columns.features, inputs_of(self.model))
        parts = {name for name, several in by_tensor(by_column).items() if len(several) > 1}
        found = [
            Column(name, replace(tensor, shape=(None,)) if tensor.name in parts else tensor)
            for name, tensor in by_column.items()
        ]
        classes = class_columns(self.task, self.model)
        others = [Column(name, has_classes=name in classes) for name in columns.labels]
        if columns.weight:
            others.append(Column(columns.weight, is_weight=True))
        # One column may be several things; the first, with the model's input, says its type.
        by_name = {column.name: column for column in found}
        for each in others:
            same = by_name.setdefault(each.name, each)
            by_name[each.name] = replace(
                same,
                has_classes=same.has_classes or each.has_classes,
                is_weight=same.is_weight or each.is_weight,
            )
        return tuple(by_name.values())

    def begin(self, sample: dict[str, Array]) -> None:
        """Build all, from one row."""
        # A batch through the model builds layers, loss and metrics without a training step.
        self.model.test_on_batch(*batch_of(self.task, self.model, sample))
        self.model.optimizer.build(self.model.trainable_variables)
        self._list.on_train_begin()

    def state(self) -> list[Array]:
        """Return what workers need."""
        return list(as_arrays(self.model.weights))

    def apply(self, learned: Sequence[Array]) -> None:
        """Take a step by the averaged gradients."""
        import keras

        trained = self.model.trainable_variables
        pairs = zip(learned, trained, strict=False)
        gradients = [keras.ops.convert_to_tensor(each, variable.dtype) for each, variable in pairs]
        self.model.optimizer.apply(gradients, trained)
        assign(self.model.non_trainable_weights, learned[len(trained) :])

    def metrics(self, states: Sequence[Array]) -> dict[str, float]:
        """Return the values that metrics have by the sum of their states."""
        self.model.reset_metrics()
        assign(self.model.metrics_variables, states)
        return {name: float(value) for name, value in self.model.get_metrics_result().items()}

    def epoch_begins(self, epoch: int) -> None:
        """Call the callbacks."""
        self._list.on_epoch_begin(epoch)

    def epoch_ended(self, epoch: int, logs: Mapping[str, float]) -> bool:
        """Call the callbacks; return whether to stop."""
        self._list.on_epoch_end(epoch, dict(logs))
        return bool(self.model.stop_training)

    def end(self) -> None:
        """Call the callbacks."""
        self._list.on_train_end()


def _check(model: Any) -> None:
    import keras

    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", _AVERAGES[0])
        if reduction not in _AVERAGES:
            raise ConfigError(
                f"the loss {loss.name!r} has reduction={reduction!r}: the gradients of partitions "
                f"are averaged by rows, so it must be {_AVERAGES[0]!r}"
            )
