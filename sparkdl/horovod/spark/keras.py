"""`import sparkdl.horovod.spark.keras`: Horovod's `KerasEstimator` and `KerasModel`.

Runs in: driver, child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/keras/estimator.py
"""

from __future__ import annotations

import copy
from functools import partial
from types import FunctionType
from typing import Any

from pyspark.sql import DataFrame

from sparkdl.core.errors import ConfigError
from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.keras.callbacks import Broadcast, MetricAverage, Schedule, Warmup
from sparkdl.horovod.spark.common.estimator import (
    Fit,
    HorovodEstimator,
    HorovodModel,
    inputs_by_column,
)
from sparkdl.horovod.spark.common.params import row
from sparkdl.ml.estimators import keras_estimator as ml
from sparkdl.ml.estimators.keras_train import ModelSpec, inputs_of
from sparkdl.ml.model_file import ModelFile
from sparkdl.ml.scoring import model as scoring
from sparkdl.ml.scoring.keras_objects import (
    as_config,
    from_config,
    loaded,
    registered,
    saved,
    scope,
)
from sparkdl.ml.scoring.source import Signature
from sparkdl.ml.scoring.tensorflow import keras_predictor

__all__ = ["KerasEstimator", "KerasModel"]
__path__: list[str] = []
"""Makes this a package, as Horovod's is, so that imports of its modules raise advice."""
__getattr__ = partial(missing_name, __name__)

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


class KerasEstimator(_KerasSaved, HorovodEstimator, params=[_CUSTOM]):
    """Fits a Keras model to a DataFrame, by `sparkdl.KerasEstimator`.

    The learning rate is multiplied by the number of processes. `fit` returns a `KerasModel` with
    Keras' history: a list of numbers for each metric. The model must know the shapes of its inputs.

    Args:
        kwargs: parameters by name, see `explainParams()`.
    """

    _prefix = "keras"

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

        config = keras.optimizers.serialize(
            keras.optimizers.get(self.getOptimizer() or self.getModel().optimizer)
        )
        optimizer, own = (keras.optimizers.deserialize(config) for _ in range(2))
        # Of numbers alone: a schedule is not multiplied.
        rate = optimizer.get_config()["learning_rate"]
        rate = None if isinstance(rate, dict) else float(rate) * fit.num_proc
        if rate is not None:
            optimizer.learning_rate = rate
        compiled = {
            "optimizer": optimizer,
            "loss": named(self.getLoss()),
            "loss_weights": self.getLossWeights(),
            "metrics": named(self.getMetrics()) or None,
        }
        objects = known_objects({**compiled, "custom_objects": self.getCustomObjects()})
        estimator = ml.KerasEstimator(custom_objects=objects, **fit.settings)
        estimator._set(**{name: value for name, value in compiled.items() if value is not None})
        estimator.setModel(self.getModel())
        store = self.getStore()
        logs = f"{store.folder(fit.common['run_id'])}/logs" if store else None
        estimator.setCallbacks(translated(self.getCallbacks(), rate, logs))
        signature = Signature(inputs_of(self.getModel()), ())
        names = self.getFeatureCols()
        estimator.setInputMapping(inputs_by_column(fit.features, signature, names))
        fitted = estimator.fit(fit.rows)
        model = fitted.getModel()
        model.compile(**{**compiled, "optimizer": own})
        # Or Keras could not load it from a file.
        own.build(model.trainable_variables)
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


def translated(callbacks: Any, rate: float | None, logs: str | None) -> list[Any]:
    """Return Keras' callbacks without Horovod's that a strategy makes superfluous."""
    import keras

    found = []
    for each in callbacks:
        if isinstance(each, Warmup):
            raise ConfigError(
                "callbacks has a LearningRateWarmupCallback, which works only in "
                "horovod.spark.run: give a keras.callbacks.LearningRateScheduler"
            )
        own = copy.copy(each)
        if isinstance(each, Schedule) and rate is not None:
            own.initial_lr = rate
        if isinstance(each, keras.callbacks.TensorBoard) and logs:
            own.log_dir = logs
        found += [] if isinstance(each, Broadcast | MetricAverage) else [own]
    return found


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
        file = ModelFile("keras", partial(ModelSpec(dict).save, model))
        signature = keras_predictor(model).signature
        return scoring.KerasModel(file, signature, self.getCustomObjects())
