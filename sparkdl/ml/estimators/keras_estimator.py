"""`KerasEstimator`: trains a Keras model on several nodes, without a `train_fn`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pyspark.sql import DataFrame

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.columns import inputs_by_column
from sparkdl.ml.estimators.keras_train import (
    NO_LOSS,
    KerasTask,
    ModelSpec,
    check_inputs,
    inputs_of,
    outputs_of,
    train,
)
from sparkdl.ml.estimators.network import NetworkEstimator
from sparkdl.ml.estimators.training import check_fits, check_labels, check_schema
from sparkdl.ml.jobs.fit import check_mode, fit_keras
from sparkdl.ml.jobs.work import Plan
from sparkdl.ml.model_file import ModelFile
from sparkdl.ml.scoring.keras_objects import as_config, registered, save_checked
from sparkdl.ml.scoring.model import KerasModel
from sparkdl.ml.scoring.source import Signature


class KerasEstimator(
    NetworkEstimator[KerasModel], params=["optimizer", "loss", "metrics", "loss_weights", "mode"]
):
    """Fits a Keras 3 model on `num_workers` nodes, under a strategy that keeps them in step.

    `KerasEstimator(model, loss="mse", num_workers=2, epochs=5).fit(df)` returns a `KerasModel`.
    Every row is used once an epoch. `batch_size` is what one node sees in a step. Parameters are
    those of the table in docs/spark-ml.md. With `mode="jobs"` there are no nodes.

    Args:
        model: a Keras model with known inputs, or a function without arguments that makes one.
            Its loss, optimizer and metrics count if it is compiled and `loss` is not set.
        callbacks: see `setCallbacks`.
        custom_objects: see `setCustomObjects`.
        params: parameters by name. `optimizer`, `loss` and `metrics` may be objects of Keras, and
            your own functions and classes.

    Raises:
        ConfigError: if `model` is neither, or is not compiled and there is no `loss`; if a
            parameter is unknown or its value invalid.
    """

    __module__ = "sparkdl"
    _own = ("_objects", "_signature")
    _format = "keras"
    _objects: Mapping[str, Any] = {}
    _signature: Signature | None = None
    """Of a model of the driver; one that a function makes is known to the nodes alone."""

    def __init__(
        self,
        model: Any = None,
        *,
        callbacks: Any = (),
        custom_objects: Mapping[str, Any] | None = None,
        **params: Any,
    ) -> None:
        self.setCustomObjects(custom_objects or {})
        super().__init__(model, callbacks=callbacks, **params)
        if isinstance(self._made, ModelFile) and not (model.compiled or self.getLoss()):
            raise ConfigError(NO_LOSS)

    def setModel(self, model: Any) -> KerasEstimator:
        """Set the model: a Keras model, or a function that makes one.

        Raises:
            ConfigError: if it is neither, or a model that cannot be made again from its file, with
                the same outputs.
        """
        if hasattr(model, "get_weights") and hasattr(model, "save"):
            if type(model).__module__.partition(".")[0] == "tf_keras":
                raise ConfigError(
                    "model is of tf_keras, and KerasEstimator trains Keras 3: make it of keras, "
                    "or train it with TFEstimator or sparkdl.horovod.spark.keras.KerasEstimator"
                )
            check_inputs(model)
            write = partial(save_checked, model=model, objects=self._known())
            self._made = ModelFile("keras", write)
            outputs = outputs_of(model) if model.outputs else ()
            self._signature = Signature(inputs_of(model), outputs)
        elif callable(model):
            self._made, self._signature = model, None
        else:
            raise ConfigError(
                f"model is a {type(model).__name__}; give a Keras model or a function without "
                "arguments that makes one"
            )
        return self

    def setCustomObjects(self, objects: Mapping[str, Any]) -> KerasEstimator:
        """Set classes and functions that the model's file names, by these names.

        Those that the program has registered with Keras are found without this.
        """
        self._objects = {**self._objects, **objects}
        return self

    def getCustomObjects(self) -> dict[str, Any]:
        """Return what travels with the model, by name."""
        return dict(self._objects)

    def _known(self) -> dict[str, Any]:
        return {**registered(), **self._objects}

    def _fitted(self, dataset: DataFrame) -> KerasModel:
        check_mode(self)
        task = self._task()
        check_schema(task.columns, dataset.schema, task.sparse)  # before anything that takes time
        if (known := self._signature) is not None:
            by_column = inputs_by_column(task.columns.features, known.inputs)
            check_fits(by_column, dataset.schema)
            check_labels(task.columns, known.outputs, dataset.schema)
        training = self._training(train, task)
        if self.getMode() == "jobs":
            nodes, rows = self.getNumWorkers(), self.getBatchSize()
            plan = Plan(nodes, rows, task.epochs, task.shuffle, task.seed or 0)
            file, signature, summary = fit_keras(task, training, plan, dataset)
        else:
            file, signature, summary = self._trained(dataset, training)
        return self._with_values(KerasModel(file, signature, task.model_spec.objects), summary)

    def _task(self) -> KerasTask:
        self._check_made()
        return KerasTask(
            model_spec=ModelSpec(
                self._made,
                optimizer=as_config(self.getOptimizer()),
                loss=as_config(self.getLoss()),
                metrics=as_config(self.getMetrics()),
                loss_weights=self.getLossWeights(),
                objects=self._known(),
            ),
            **self._task_fields(),
        )
