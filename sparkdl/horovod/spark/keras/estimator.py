"""`KerasEstimator` and `KerasModel`, as Horovod has them.

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/keras/estimator.py
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from pyspark.sql import DataFrame

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.keras.callbacks import Broadcast, MetricAverage, Schedule, Warmup, number
from sparkdl.horovod.spark.common.estimator import (
    Checkpoint,
    Fit,
    HorovodEstimator,
    HorovodModel,
    inputs_by_column,
)
from sparkdl.horovod.spark.common.params import row
from sparkdl.ml.estimators import keras_estimator as ml
from sparkdl.ml.estimators.keras_model import Recipe, as_config, from_config, inputs_of
from sparkdl.ml.scoring import model as scoring
from sparkdl.ml.scoring.keras_objects import loaded, registered, saved, scope
from sparkdl.ml.scoring.source import Signature
from sparkdl.ml.scoring.tensorflow import keras_predictor
from sparkdl.node.context import current

_CUSTOM = row("custom_objects", "classes and functions that Keras does not know, by name", {})
_CONFIGS = ("optimizer", "loss", "metrics")


class _KerasSaved:
    """Models travel as `.keras` files; optimizers, losses and metrics as their configurations."""

    @classmethod
    def _packed(cls, values: dict[str, Any]) -> dict[str, Any]:
        found = {n: as_config(named(x)) if n in _CONFIGS else x for n, x in values.items()}
        if (model := values.get("model")) is not None:
            found["model"] = saved(model)
        return {**found, "custom_objects": known_objects(values)}

    @classmethod
    def _unpacked(cls, values: dict[str, Any]) -> dict[str, Any]:
        objects = values["custom_objects"]
        with scope(objects):
            found = {n: from_config(x) if n in _CONFIGS else x for n, x in values.items()}
        if content := values.get("model"):
            found["model"] = loaded(content, objects, compiles=True)
        return found


class KerasEstimator(
    _KerasSaved,
    HorovodEstimator,
    params=[_CUSTOM, row("checkpoint_callback", "a ModelCheckpoint: save_best_only counts")],
):
    """Fits a Keras model to a DataFrame, by `sparkdl.KerasEstimator`.

    The learning rate is multiplied by the number of processes. `fit` returns a `KerasModel` with
    Keras' history: a list of numbers for each metric. The model must know the shapes of its inputs.

    Args:
        kwargs: parameters by name, see `explainParams()`.
    """

    _prefix, _suffix = "keras", ".keras"

    def _check_params(self) -> None:
        super()._check_params()
        if self.getLoss() is None:
            raise ConfigError("Loss parameter is required for the model to compile: give loss=")
        if not (self.getOptimizer() or getattr(self.getModel(), "optimizer", None)):
            raise ConfigError(
                "Optimizer must be provided either as a parameter or as part of a compiled "
                "model: give optimizer="
            )

    def _fitted(self, fit: Fit) -> KerasModel:
        import keras

        optimizer = keras.optimizers.get(self.getOptimizer() or self.getModel().optimizer)
        # Of numbers alone: a schedule is not multiplied.
        rate = optimizer.get_config()["learning_rate"]
        rate = None if isinstance(rate, dict) else float(rate) * fit.num_proc
        compiled = {
            "optimizer": optimizer,
            "loss": named(self.getLoss()),
            "loss_weights": self.getLossWeights(),
            "metrics": named(self.getMetrics()) or None,
        }
        objects = known_objects({**compiled, "custom_objects": self.getCustomObjects()})
        estimator = ml.KerasEstimator(custom_objects=objects, **fit.settings)
        for name, value in compiled.items():
            if value is not None:
                estimator._set(**{name: value})
        last = fit.checkpoint.read() if fit.checkpoint else None
        if last is None:
            estimator.setModel(self.getModel())
        else:
            # With the state of its optimizer, which a new compilation would not have.
            estimator.clear(estimator.loss)
            estimator.setModel(loaded(last, objects, compiles=True))
        callbacks = translated(self.getCallbacks(), rate)
        callbacks += _best(self.getCheckpointCallback(), self.getEpochs())
        if fit.checkpoint:
            callbacks.append(_saver(fit.checkpoint, fit.num_proc))
        logs = f"{fit.checkpoint.folder}/logs" if fit.checkpoint else None
        estimator.setCallbacks(OnNode(callbacks, logs))
        if rate is not None:
            estimator.setLearningRate(rate)
        signature = Signature(inputs_of(self.getModel()), ())
        names = self.getFeatureCols()
        estimator.setInputMapping(inputs_by_column(fit.features, signature, names))
        fitted = estimator.fit(fit.rows)
        model = fitted.getModel()
        again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        model.compile(**{**compiled, "optimizer": again})
        # Or Keras could not load it from a file.
        again.build(model.trainable_variables)
        return KerasModel(history=fitted.history, model=model, custom_objects=objects, **fit.common)


def known_objects(values: dict[str, Any]) -> dict[str, Any]:
    """Return custom objects by name: given, registered, and those of the compilation."""
    import keras

    given = keras.tree.flatten([named(values.get(name)) for name in _CONFIGS])
    kinds = [each if hasattr(each, "__name__") else type(each) for each in given]
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("keras", "builtins")]
    found = {**registered(), **{kind.__name__: kind for kind in own}}
    return {**found, **(values.get("custom_objects") or {})}


def named(value: Any) -> Any:
    """Return functions with a name, by which Keras finds them: a lambda has none."""
    if isinstance(value, list | tuple):
        return [named(each) for each in value]
    if isinstance(value, dict):
        return {name: named(each) for name, each in value.items()}
    if not isinstance(value, FunctionType) or value.__name__ != "<lambda>":
        return value
    code = value.__code__
    name = f"lambda_{code.co_firstlineno}_{abs(hash(code)) % 10**6}"
    return FunctionType(code, value.__globals__, name, value.__defaults__, value.__closure__)


def _best(saver: Any, epochs: int) -> list[Any]:
    """Return the callback that keeps the weights of the best epoch, if a ModelCheckpoint asks."""
    import keras

    if not getattr(saver, "save_best_only", False):
        return []
    # Some versions of Keras keep the mode, others the comparison that follows from it.
    mode = getattr(saver, "mode", None) or ("max" if saver.monitor_op(1, 0) else "min")
    stopping = keras.callbacks.EarlyStopping(
        saver.monitor, patience=epochs, mode=mode, restore_best_weights=True
    )
    return [stopping]


@dataclass(frozen=True)
class OnNode:
    """Gives a node its callbacks: TensorBoard's is the chief's, and writes into the run."""

    callbacks: list[Any]
    logs: str | None

    def __call__(self) -> list[Any]:
        """Return them."""
        import keras

        boards = [e for e in self.callbacks if isinstance(e, keras.callbacks.TensorBoard)]
        for each in boards if self.logs else ():
            each.log_dir = self.logs
        return [e for e in self.callbacks if _is_chief() or e not in boards]


def _is_chief() -> bool:
    ctx = current()
    return ctx is not None and ctx.is_chief


def translated(callbacks: Any, rate: float | None) -> list[Any]:
    """Return Keras' callbacks without Horovod's that a strategy makes superfluous.

    Args:
        rate: with which Horovod's schedules begin.

    Raises:
        ConfigError: for a warm-up, which asks Horovod for the number of processes.
    """
    found = []
    for each in callbacks:
        if isinstance(each, Warmup):
            raise ConfigError(
                "callbacks has a LearningRateWarmupCallback, which works in horovod.spark.run "
                "alone: give a keras.callbacks.LearningRateScheduler"
            )
        if isinstance(each, Schedule) and rate is not None:
            each = copy.copy(each)
            each.initial_lr = rate
        found += [] if isinstance(each, Broadcast | MetricAverage) else [each]
    return found


def _saver(checkpoint: Checkpoint, num_proc: int) -> Any:
    """Return the callback that saves the model after each epoch, at the rate of one process."""
    import keras

    class Saver(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            optimizer = self.model.optimizer
            is_number = not isinstance(optimizer.get_config()["learning_rate"], dict)
            rate = number(optimizer.learning_rate) if is_number else None
            if rate is not None:
                # Another number of processes can thus continue the run.
                optimizer.learning_rate = rate / num_proc
            content = saved(self.model)  # on all nodes
            if rate is not None:
                optimizer.learning_rate = rate
            if _is_chief():
                checkpoint.write(content)

    return Saver()


class KerasModel(
    _KerasSaved, HorovodModel, params=[_CUSTOM, row("_floatx", "accepted, without effect")]
):
    """Adds the outputs of a Keras model to a DataFrame.

    `getModel()` returns the model, `getHistory()` the metrics of its training.

    Args:
        kwargs: parameters by name, see `explainParams()`.
    """

    def _stage(self, inputs: DataFrame) -> Any:
        model = self.getModel()
        content, signature = Recipe(b"").packed(model), keras_predictor(model).signature
        return scoring.KerasModel(content, signature, self.getCustomObjects())
