"""`KerasEstimator`: trains a Keras model on several nodes, for those who want no `train_fn`.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import cloudpickle
import msgspec
from pyspark.ml.base import Estimator
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame, SparkSession

from sparkdl.core.errors import ConfigError, ResultError
from sparkdl.core.spelling import did_you_mean
from sparkdl.ml.estimators.estimator import launch_options
from sparkdl.ml.estimators.keras_check import check_rows, check_schema
from sparkdl.ml.estimators.keras_describe import described
from sparkdl.ml.estimators.keras_model import as_config, as_content, check_callbacks
from sparkdl.ml.estimators.keras_train import Callbacks, KerasTask, train
from sparkdl.ml.estimators.params import (
    HasBatchSize,
    HasEpochs,
    HasInputMapping,
    HasModelDir,
    HasOutputMapping,
    HasScoring,
    HasTraining,
)
from sparkdl.ml.estimators.persistence import CODE, Saved, Storage, load_code, save_code
from sparkdl.ml.estimators.source import Signature
from sparkdl.ml.estimators.summary import TrainingSummary
from sparkdl.ml.estimators.training import Training
from sparkdl.ml.jobs.fit import check_mode, fit_keras
from sparkdl.ml.jobs.loop import Plan
from sparkdl.ml.scoring.model import SCORE_ROWS, HasColumns, KerasModel

_KERAS = ("optimizer", "loss", "metrics")
_BATCH_ROWS = 32
_MODEL = "model.keras"
Trained = tuple[bytes, Signature, TrainingSummary]


class KerasEstimator(
    Estimator[KerasModel],
    HasColumns,
    HasInputMapping,
    HasOutputMapping,
    HasScoring,
    HasBatchSize,
    HasEpochs,
    HasModelDir,
    HasTraining,
    Saved,
    MLWritable,
    MLReadable[Any],
    params=[
        *("num_workers", "label_col", *_KERAS, "learning_rate", "shuffle"),
        *("mode", "sync_every", "aggregation"),
    ],
):
    """Fits a Keras 3 model on `num_workers` nodes, under a strategy that keeps them in step.

    `KerasEstimator(model, loss="mse", num_workers=2, epochs=5).fit(df)` returns a `KerasModel`.
    Every row is used once an epoch. `batch_size` is what one node sees in a step. Parameters are
    those of the table in docs/spark-ml.md; `weight_col`, `validation_indicator_col` and the early
    stopping do as they say without further ado. With `mode="jobs"` there are no nodes: see
    docs/jobs.md.

    Args:
        model: a Keras model that tells its inputs, or a function without arguments that makes one.
            Its loss, optimizer and metrics count if it is compiled and `loss` is not set.
        callbacks: see `setCallbacks`.
        params: parameters by name. `optimizer`, `loss` and `metrics` may be objects of Keras.

    Raises:
        ConfigError: if `model` is neither, or is not compiled and there is no `loss`; if there is
            no such parameter, or it cannot have that value.
    """

    def __init__(self, model: Any = None, *, callbacks: Any = (), **params: Any) -> None:
        super().__init__()
        self._set_table_defaults(batch_size=_BATCH_ROWS)
        self._made: bytes | Callable[[], Any] | None = None
        self._callbacks: Callbacks = ()
        if unknown := [name for name in params if not self.hasParam(name)]:
            known = ["model", "callbacks", *(param.name for param in self.params)]
            raise ConfigError(
                f"KerasEstimator has no parameter {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(known)}{did_you_mean(unknown[0], known)}"
            )
        self._set(**params)
        self.setCallbacks(callbacks)
        if model is not None:
            self.setModel(model)
            if not (callable(self._made) or model.compiled or self.getLoss()):
                raise ConfigError("the model has no loss: set loss=, or compile the model")

    def _set(self, **params: Any) -> KerasEstimator:
        for name in _KERAS:
            if name in params:
                params[name] = as_config(params[name])
        found: KerasEstimator = super()._set(**params)
        return found

    def setModel(self, model: Any) -> KerasEstimator:
        """Set the model: a Keras model, or a function that makes one.

        Raises:
            ConfigError: if it is neither.
        """
        if hasattr(model, "get_weights") and hasattr(model, "save"):
            if not getattr(model, "inputs", None):
                raise ConfigError(
                    f"the {type(model).__name__} {model.name!r} does not tell its inputs: begin it "
                    "with a keras.Input, or train it with TFEstimator and a train_fn"
                )
            self._made = as_content(model)
        elif callable(model):
            self._made = model
        else:
            raise ConfigError(
                f"model is a {type(model).__name__}; give a Keras model or a function without "
                "arguments that makes one"
            )
        return self

    def setCallbacks(self, callbacks: Callbacks) -> KerasEstimator:
        """Set callbacks of Keras: a list, or a function without arguments that makes it.

        Every node has its own, after those that parameters ask for (early stopping, TensorBoard).
        With `mode="jobs"` they run on the driver and are told of epochs, not of batches.

        Raises:
            ConfigError: if they are none, or cannot travel to the nodes.
        """
        if not callable(callbacks):
            check_callbacks(callbacks)
        try:
            cloudpickle.dumps(callbacks)
        except Exception as error:
            raise ConfigError(
                f"callbacks cannot travel to the nodes: {error}. Give a function that makes them"
            ) from error
        self._callbacks = callbacks
        return self

    def getCallbacks(self) -> Callbacks:
        """Return what `setCallbacks` was given."""
        return self._callbacks

    def _fit(self, dataset: DataFrame) -> KerasModel:
        check_mode(self)
        task = self._task()
        check_schema(task, None, dataset.schema)  # before anything that takes time
        is_made_here = self.getMode() == "jobs"
        inputs = described(task.model, task.optimizer, task.loss, task.metrics, is_made_here)
        by_column = check_schema(task, inputs, dataset.schema)
        training = Training(
            map_fun=train,
            args=task,
            nodes=self.getNumWorkers(),
            epochs=task.epochs,
            columns=task.columns,
            check=partial(check_rows, task, by_column, self.getNumWorkers()),
            refuses_nulls=True,
            validation_col=self.getValidationIndicatorCol(),
            return_timeout_s=self.getShutdownTimeout(),
            cache=self.getCache(),
            options=launch_options(_Values(self)),
        )
        train_it = self._fit_in_jobs if self.getMode() == "jobs" else self._fit_on_nodes
        content, signature, summary = train_it(dataset, task, training)
        model = self._copyValues(KerasModel(content, signature))
        model.clear(model.batch_size)  # what trains well need not score well
        model._setDefault(batch_size=SCORE_ROWS)
        model._summary = replace(summary, results=())
        return model

    def _fit_on_nodes(self, dataset: DataFrame, _task: KerasTask, training: Training) -> Trained:
        summary = training.run(dataset)
        if not summary.results:
            raise ResultError("the chief's model did not reach the driver; see the log above")
        chief: dict[str, Any] = summary.results[0]
        content = chief.get("content") or _read(dataset.sparkSession, chief["path"])
        return content, msgspec.json.decode(chief["signature"], type=Signature), summary

    def _fit_in_jobs(self, dataset: DataFrame, task: KerasTask, training: Training) -> Trained:
        plan = Plan(
            partitions=self.getNumWorkers(),
            batch_size=task.batch_size,
            epochs=task.epochs,
            sync_every=self.getSyncEvery(),
            aggregation=self.getAggregation(),
            shuffle=task.shuffle,
            seed=task.seed or 0,
            retries=self.getMaxRestarts(),
            checkpoint_dir=self.getCheckpointDir(),
        )
        return fit_keras(task, training, plan, dataset)

    def _task(self) -> KerasTask:
        if self._made is None:
            raise ConfigError("KerasEstimator has no model: KerasEstimator(model=…)")
        return KerasTask(
            model=self._made,
            features=self.getInputMapping() or {self.getFeaturesCol(): ""},
            label=self.getLabelCol(),
            weight=self.getWeightCol(),
            validates=self.getValidationIndicatorCol() is not None,
            batch_size=self.getBatchSize(),
            epochs=self.getEpochs(),
            optimizer=self.getOptimizer(),
            loss=self.getLoss(),
            metrics=self.getMetrics(),
            learning_rate=self.getLearningRate(),
            shuffle=self.getShuffle(),
            seed=self.getSeed(),
            patience=self.getEarlyStoppingPatience(),
            monitor=self.getEarlyStoppingMonitor(),
            min_delta=self.getEarlyStoppingMinDelta(),
            log_dir=self.getLogDir(),
            model_dir=self.getModelDir(),
            saves=self.getCheckpointDir() is not None,
            name=self.uid,
            callbacks=self._callbacks,
        )

    def _save_files(self, storage: Storage) -> None:
        is_content = isinstance(self._made, bytes)
        if isinstance(self._made, bytes):
            storage.write(self._made, _MODEL)
        if not is_content or self._callbacks:
            save_code(storage, None if is_content else self._made, self._callbacks)

    @classmethod
    def _load_files(cls, storage: Storage, metadata: dict[str, Any]) -> KerasEstimator:
        estimator = cls()
        content = storage.read(_MODEL)
        if content is None or storage.read(CODE) is not None:
            estimator._made, *callbacks = load_code(storage)
            estimator.setCallbacks(callbacks[0] if callbacks else ())
        estimator._made = estimator._made if content is None else content
        return estimator


def _read(spark: SparkSession, path: str) -> bytes:
    folder, _, name = path.rpartition("/")
    content = Storage(spark, folder if "://" in folder else f"file://{folder}").read(name)
    if content is None:
        raise ResultError(
            f"the chief saved its model as {path}, which the driver cannot see: model_dir must be "
            "on storage that nodes and driver share"
        )
    return content


class _Values:
    """A stage's parameters as attributes."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return self._stage.getOrDefault(name)
