"""The driver's Keras model in a training as Spark jobs: weights, optimizer, callbacks.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparkdl.core.errors import ConfigError
from sparkdl.feed.values.ndarrays import Array
from sparkdl.ml.estimators.keras_model import inputs_by_column, inputs_of
from sparkdl.ml.estimators.keras_train import KerasTask, callbacks_of, make_model, own_callbacks
from sparkdl.ml.jobs.keras import arranged, as_arrays, assign
from sparkdl.ml.jobs.rows import Column
from sparkdl.ml.jobs.sums import Sum, unpack

_AVERAGES = ("sum_over_batch_size", "mean")


class KerasMaster:
    """The driver's model: the weights, and the optimizer with all that it remembers.

    Raises:
        ConfigError: if the model cannot be trained so; it says why.
    """

    def __init__(self, task: KerasTask, is_local: bool) -> None:
        import keras

        if task.seed is not None:
            keras.utils.set_random_seed(task.seed)
        self.task, self.model, self._is_local = task, make_model(task), is_local
        _check(self.model)
        self._callbacks = callbacks_of(task, is_chief=True)
        self._list = keras.callbacks.CallbackList(
            [*self._callbacks, *own_callbacks(task)],
            add_history=True,
            model=self.model,
            epochs=task.epochs,
        )

    def columns(self) -> tuple[Column, ...]:
        """Return which columns are kept, and as what."""
        by_column = inputs_by_column(self.task.features, inputs_of(self.model))
        found = [Column(name, tensor) for name, tensor in by_column.items()]
        found.append(Column(self.task.label))
        if self.task.weight:
            found.append(Column(self.task.weight, dtype="float32"))
        return tuple({column.name: column for column in reversed(found)}.values())

    def begin(self, sample: dict[str, Array]) -> None:
        """Build all, from one row."""
        self.model.test_on_batch(*arranged(self.task, self.model, sample))
        self.model.optimizer.build(self.model.trainable_variables)
        self._list.on_train_begin()

    def state(self) -> list[Array]:
        """Return what workers need."""
        own = self.model.optimizer.variables if self._is_local else []
        return list(as_arrays([*self.model.weights, *own]))

    def apply(self, found: Sum) -> None:
        """Take a step by the averaged gradients; or take over the averaged weights."""
        import keras

        assert found.vector is not None
        if self._is_local:
            variables = [*self.model.weights, *self.model.optimizer.variables]
            assign(variables, unpack(found.vector, found.exact, self.state()))
            return
        like = as_arrays([*self.model.trainable_weights, *self.model.non_trainable_weights])
        learned = unpack(found.vector, found.exact, like)
        count = len(self.model.trainable_weights)
        gradients = [keras.ops.convert_to_tensor(each) for each in learned[:count]]
        self.model.optimizer.apply(gradients, self.model.trainable_variables)
        assign(self.model.non_trainable_weights, learned[count:])

    def metrics(self, states: Sequence[Array]) -> dict[str, float]:
        """Return the values that metrics have by the sum of their states."""
        self.model.reset_metrics()
        assign(self.model.metrics_variables, states)
        return {name: float(value) for name, value in self.model.get_metrics_result().items()}

    def epoch_begins(self, epoch: int) -> None:
        """Tell the callbacks."""
        self._list.on_epoch_begin(epoch)

    def epoch_ended(self, epoch: int, logs: Mapping[str, float]) -> bool:
        """Tell the callbacks; return whether to stop."""
        self._list.on_epoch_end(epoch, dict(logs))
        return bool(self.model.stop_training)

    def end(self) -> None:
        """Tell the callbacks that the training has ended."""
        self._list.on_train_end()

    def config(self) -> str:
        """Return what the model is made of, as JSON; without its weights."""
        return str(self.model.to_json())

    def save(self) -> list[Array]:
        """Return all that a checkpoint needs, of the early stopping too."""
        found = list(as_arrays([*self.model.weights, *self.model.optimizer.variables]))
        for stopping in self._stopping():
            has_best = stopping.best is not None and stopping.best_weights is not None
            numbers = [stopping.best if has_best else np.nan, stopping.wait, stopping.best_epoch]
            found += [np.array(numbers, np.float64), *(stopping.best_weights or ())]
        return found

    def restore(self, saved: Sequence[Array]) -> None:
        """Go on from what `save` returned."""
        variables = [*self.model.weights, *self.model.optimizer.variables]
        assign(variables, saved[: len(variables)])
        rest = list(saved[len(variables) :])
        for stopping in self._stopping():
            best, wait, best_epoch = rest.pop(0)
            stopping.wait, stopping.best_epoch = int(wait), int(best_epoch)
            if not np.isnan(best):
                stopping.best, stopping.best_weights = float(best), rest
            stopping._set_monitor_op()

    def _stopping(self) -> list[Any]:
        return [each for each in self._callbacks if hasattr(each, "best_weights")]


def final_copy(model: Any) -> Any:
    """Return a copy without optimizer, which may be twice the size of the weights."""
    import keras

    copy = keras.models.model_from_json(model.to_json())
    copy.set_weights(model.get_weights())
    return copy


def _check(model: Any) -> None:
    import keras

    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", _AVERAGES[0])
        if reduction not in _AVERAGES:
            raise ConfigError(
                f"the loss {loss.name!r} has reduction={reduction!r}: the gradients of partitions "
                f"are averaged by rows, so it must be {_AVERAGES[0]!r}"
            )
