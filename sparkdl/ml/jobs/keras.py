"""Keras models in a training as Spark jobs: the workers', and the driver's.

Runs in: driver, feeder
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.keras_train import Fitting, KerasTask, arranged
from sparkdl.ml.scoring.share import task_share
from sparkdl.ml.scoring.tensorflow import check_backend, prepare_worker
from sparkdl.values.ndarrays import Array

if TYPE_CHECKING:
    from pyspark import Broadcast

    from sparkdl.ml.scoring.source import ModelSource
_AVERAGES = ("sum_over_batch_size", "mean")


class KerasLearner:
    """A worker's model: computes gradients by the model's own `train_on_batch`.

    Loss, metrics, regularisation, row weights and the model's own `train_step` are therefore
    Keras'. A stand-in for the optimizer keeps the gradients.

    Args:
        task: without the model where `content` has it.
    """

    def __init__(self, task: KerasTask, content: Broadcast[ModelSource | None] | None) -> None:
        check_backend()
        # As many threads as the task has cores; TensorFlow takes all cores otherwise.
        prepare_worker(task_share())
        model_spec = task.model_spec
        if content is not None and content.value is not None:
            model_spec = replace(model_spec, made=content.value)
        self._task, self._model = task, model_spec.model()
        self._model.optimizer = _gradient_recorder(self._model.optimizer.name)
        # Built now, so that its variables exist before `load` sets them.
        self._model.optimizer.build(self._model.trainable_variables)
        # Each random layer of Keras has such a variable, from which it draws.
        self._seeds = [v for v in self._model.variables if "seed_generator_state" in v.name]

    def load(self, state: Sequence[Array]) -> None:
        assign(self._model.weights, state)

    def learn(
        self, batch: dict[str, Array], seed: int
    ) -> tuple[Sequence[Array], tuple[Array, ...]]:
        """Return the gradients with the weights that are not trained, and the metrics' states."""
        for index, variable in enumerate(self._seeds):
            # Half the range, so that the numbers fit into signed types, too.
            state = np.random.SeedSequence([seed, index]).generate_state(2) >> 1
            variable.assign(state.astype(str(variable.dtype)))
        self._model.reset_metrics()
        self._model.train_on_batch(*batch_of(self._task, self._model, batch))
        learned = [*self._model.optimizer.gradients, *self._model.non_trainable_weights]
        return as_arrays(learned), as_arrays(self._model.metrics_variables)

    def evaluate(self, batch: dict[str, Array]) -> tuple[Array, ...]:
        self._model.reset_metrics()
        self._model.test_on_batch(*batch_of(self._task, self._model, batch))
        return as_arrays(self._model.metrics_variables)


def batch_of(task: KerasTask, model: Any, batch: Mapping[str, Array]) -> tuple[Any, ...]:
    """Return `(x, y)` or `(x, y, weight)`, as the model's methods take them."""
    fits = Fitting.of(task, model)
    weight = task.columns.weight
    return (*arranged(model, fits(batch)), *([batch[weight]] if weight else []))


def as_arrays(variables: Sequence[Any]) -> tuple[Array, ...]:
    import keras

    # A copy: on the CPU the memory may be shared, and the next step changes it.
    return tuple(np.array(keras.ops.convert_to_numpy(variable)) for variable in variables)


def assign(variables: Sequence[Any], values: Sequence[Array]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _gradient_recorder(name: str) -> Any:
    """Return an optimizer that changes nothing and keeps the gradients it is given."""
    import keras

    class GradientRecorder(keras.optimizers.Optimizer):  # type: ignore[misc]
        def build(self, variables: Any) -> None:
            if not self.built:
                super().build(variables)
                self.gradients = self.add_optimizer_variables(variables, "gradient")

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            index = self._get_variable_index(variable)
            self.assign(self.gradients[index], keras.ops.convert_to_tensor(gradient))

    return GradientRecorder(learning_rate=0.0, name=name)


class KerasMaster:
    """The driver's model: the weights, and the optimizer with all that it remembers."""

    def __init__(self, task: KerasTask) -> None:
        import keras

        check_backend()
        # Before the model is made, whose initial weights it decides.
        if task.seed is not None:
            keras.utils.set_random_seed(task.seed)
        self.task, self.model = task, task.model_spec.model()
        for loss in keras.tree.flatten(self.model.loss):
            reduction = getattr(loss, "reduction", _AVERAGES[0])
            if reduction not in _AVERAGES:
                raise ConfigError(
                    f"the loss {loss.name!r} has reduction={reduction!r}: the gradients of "
                    f"partitions are averaged by rows, so it must be {_AVERAGES[0]!r}"
                )
        self.callbacks = keras.callbacks.CallbackList(
            task.made_callbacks(), add_history=True, model=self.model, epochs=task.epochs
        )

    def begin(self, sample: dict[str, Array]) -> None:
        """Build all, from one row `[1, …]`."""
        # A batch through the model builds layers, loss and metrics without a training step.
        self.model.test_on_batch(*batch_of(self.task, self.model, sample))
        self.model.optimizer.build(self.model.trainable_variables)
        self.callbacks.on_train_begin()

    def apply(self, learned: Sequence[Array]) -> None:
        """Take one step by the average of what workers have learned."""
        import keras

        trained = self.model.trainable_variables
        pairs = zip(learned, trained, strict=False)
        gradients = [keras.ops.convert_to_tensor(each, variable.dtype) for each, variable in pairs]
        self.model.optimizer.apply(gradients, trained)
        assign(self.model.non_trainable_weights, learned[len(trained) :])

    def metrics(self, states: Sequence[Array]) -> dict[str, float]:
        """Return values from the sums of the metrics' states."""
        self.model.reset_metrics()
        assign(self.model.metrics_variables, states)
        return {name: float(value) for name, value in self.model.get_metrics_result().items()}
