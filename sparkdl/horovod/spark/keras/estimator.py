"""`KerasEstimator` and `KerasModel`, as Horovod has them.

Runs in: driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/keras/estimator.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from pyspark.ml.param import TypeConverters
from pyspark.sql import DataFrame

from sparkdl.core.errors import ConfigError
from sparkdl.core.scratch import scratch_folder
from sparkdl.horovod.spark.common import util
from sparkdl.horovod.spark.common.estimator import HorovodEstimator, HorovodModel
from sparkdl.horovod.spark.common.params import EstimatorParams as EstimatorParams
from sparkdl.horovod.spark.common.params import Row
from sparkdl.horovod.spark.common.work import Work
from sparkdl.horovod.spark.keras.models import (
    KerasScoring,
    OptimizerState,
    known_objects,
    library_of,
    shapes_of,
)
from sparkdl.horovod.spark.keras.remote import KerasTrainer
from sparkdl.ml.estimators.keras_objects import loaded, named_objects, saved

_log = logging.getLogger(__name__)
_CUSTOM = Row("custom_objects", {}, "classes and functions that Keras does not know, by name")
OWN = (
    _CUSTOM,
    Row("checkpoint_callback", None, "what saves the model; after each epoch, if it is not set"),
    Row("backend_env", None, "variables to set in each process"),
    Row(
        "tensorflow_dataset_prefetch_buffer_size",
        None,
        "accepted: batches are always made ready ahead",
        TypeConverters.toInt,
    ),
)
_SUFFIXES = (".keras", ".h5")


class _KerasSaved:
    """Models travel as `.keras` files with their custom objects; optimizers as their values."""

    @classmethod
    def _packed(cls, values: dict[str, Any]) -> dict[str, Any]:
        found = dict(values)
        if (model := values.get("model")) is not None:
            library = library_of(model)
            known = known_objects(*map(values.get, ("custom_objects", "optimizer")))
            content, objects = saved(model, known)
            found["model"] = library, {**known, **objects}, content
            if values.get("optimizer") is not None:
                found["optimizer"] = OptimizerState.of(values["optimizer"], library)
        return found

    @classmethod
    def _unpacked(cls, values: dict[str, Any]) -> dict[str, Any]:
        found = dict(values)
        if "model" in values:
            library, known, content = values["model"]
            model = found["model"] = loaded(content, known, library, compiles=True)
            if isinstance(state := values.get("optimizer"), OptimizerState):
                optimizer = found["optimizer"] = state.optimizer(library, known)
                state.restore(optimizer, model.trainable_variables)
        return found


class KerasEstimator(_KerasSaved, HorovodEstimator, params=OWN):
    """Fits a Keras model to a DataFrame, in processes that average their gradients.

    The learning rate is multiplied by the number of processes. `fit` returns a `KerasModel` with
    Keras' history: a list of numbers for each measure. Models of Keras 3 on TensorFlow and of
    tf_keras; they must know the shapes of their inputs.

    Args:
        kwargs: parameters by name, see `explainParams()`.
    """

    _prefix = "keras"

    def get_model_shapes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the shapes of the model's inputs and outputs, -1 where any size is possible."""
        model = self.getModel()
        return shapes_of(model.inputs), shapes_of(model.outputs)

    def _check_params(self) -> None:
        super()._check_params()
        library_of(self.getModel())
        if self.getLoss() is None:
            raise ConfigError("Loss parameter is required for the model to compile: give loss=")
        if not (self.getOptimizer() or getattr(self.getModel(), "optimizer", None)):
            raise ConfigError(
                "Optimizer must be provided either as a parameter or as part of a compiled "
                "model: give optimizer="
            )
        if getattr(self.getCheckpointCallback(), "save_weights_only", False):
            raise ConfigError(
                "checkpoint_callback has save_weights_only=True: the estimator needs whole models"
            )

    def _check_metadata_compatibility(self, metadata: util.Metadata) -> None:
        inputs, outputs = self.get_model_shapes()
        # A label may be the number of a class, whatever size the output has.
        shapes = inputs, [[-1, -1]] * len(outputs), self.getLabelShapes()
        util.check_shape_compatibility(
            metadata, self.getFeatureCols(), self.getLabelCols(), *shapes
        )

    def _env(self) -> dict[str, str]:
        own = {} if library_of(self.getModel()) == "keras" else {"TF_USE_LEGACY_KERAS": "1"}
        return {**own, **(self.getBackendEnv() or {})}

    def _checkpoint_path(self, run_id: str) -> str | None:
        folder = self._store().get_checkpoint_path(run_id)
        return folder and f"{folder}/{self._checkpoint_name()}"

    def _checkpoint_name(self) -> str:
        """Return the checkpoint's file name, whose suffix gives Keras its format."""
        name: str = self._store().get_checkpoint_filename()
        return name if name.endswith(_SUFFIXES) else f"{name}.keras"

    def _write_start(self, file: Path, run_id: str) -> None:
        model, library = self.getModel(), library_of(self.getModel())
        optimizer = self.getOptimizer() or getattr(model, "optimizer", None)
        if self._has_checkpoint(run_id):
            model = self._load_model_from_checkpoint(run_id)
            optimizer = model.optimizer
        state = OptimizerState.of(optimizer, library)
        known = self._known()
        content, objects = saved(model, known)
        # In one pickle, so that the processes see which functions are the same.
        start = content, {**known, **objects}, state, self.getLoss(), self.getMetrics()
        with file.open("wb") as out:
            cloudpickle.dump(start, out)

    def _known(self) -> dict[str, Any]:
        """Return the classes and functions of the model and the parameters, by name."""
        given = self.getCustomObjects(), self.getLoss(), self.getMetrics(), self.getOptimizer()
        with named_objects(self.getModel()) as objects:
            return {**known_objects(*given), **objects}

    def _load_model_from_checkpoint(self, run_id: str) -> Any:
        path = self._checkpoint_path(run_id)
        assert path is not None, "_has_checkpoint"
        if self.getVerbose():
            util.say(f"Resuming training from last checkpoint: {path}")
        library = library_of(self.getModel())
        with scratch_folder() as folder:
            local = folder / self._checkpoint_name()
            self._store().download(path, local)
            return loaded(local, self._known(), library, compiles=True)

    def _trainer(self, work: Work) -> Callable[[], Any]:
        library = library_of(self.getModel())
        return KerasTrainer(work, library, *self.get_model_shapes(), self._checkpoint_name())

    def _create_model(self, history: Any, file: Path, run_id: str, metadata: util.Metadata) -> Any:
        path = file.rename(file.with_name(self._checkpoint_name()))
        known, library = self._known(), library_of(self.getModel())
        try:
            model = loaded(path, known, library, compiles=True)
        except ConfigError as error:
            # The weights are worth more than the optimizer's state.
            model = loaded(path, known, library)
            _log.warning("The trained model is not compiled: %s", error)
        return KerasModel(
            history=history,
            model=model,
            feature_columns=self.getFeatureCols(),
            label_columns=self.getLabelCols(),
            custom_objects=known,
            run_id=run_id,
            _metadata=metadata,
            _floatx=import_module(library).backend.floatx(),
        )


class KerasModel(
    _KerasSaved,
    HorovodModel,
    params=(_CUSTOM, Row("_floatx", None, "Keras' default dtype", TypeConverters.toString)),
):
    """Adds the outputs of a Keras model to a DataFrame.

    `getModel()` returns the model, `getHistory()` what its training measured.

    Args:
        kwargs: parameters by name, see `explainParams()`.
    """

    def _get_floatx(self) -> str | None:
        found: str | None = self.getOrDefault("_floatx")
        return found

    def _scoring(self, df: DataFrame) -> tuple[list[int], Callable[[], Callable[..., list[Any]]]]:
        model = self.getModel()
        scoring = KerasScoring.of(model, self.getCustomObjects())
        return [abs(int(np.prod(shape))) for shape in shapes_of(model.outputs)], scoring
