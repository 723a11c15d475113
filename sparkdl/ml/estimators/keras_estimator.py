"""`KerasEstimator`: trains a Keras model on several nodes, without a `train_fn`.

Runs in: driver

What cannot be trained is refused before there are nodes. Types come from the schema; lengths and
nulls from the first rows, for all of them would cost a pass over the data. A null in a later row
ends the feeding, see `training.without_nulls`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec
from pyspark.ml.base import Estimator
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import MatrixUDT, VectorUDT
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from sparkdl.core.errors import ConfigError, ResultError
from sparkdl.core.spelling import did_you_mean
from sparkdl.core.tracking import tracked
from sparkdl.ml.estimators.describe import keras_inputs
from sparkdl.ml.estimators.estimator import launch_options
from sparkdl.ml.estimators.keras_model import (
    NO_LOSS,
    as_content,
    check_callbacks,
    check_inputs,
    check_size,
    inputs_by_column,
)
from sparkdl.ml.estimators.keras_train import (
    Callbacks,
    Columns,
    EarlyStopping,
    KerasTask,
    Recipe,
    train,
)
from sparkdl.ml.estimators.params import COLUMNS, SCORING, TRAINING, HasParams
from sparkdl.ml.estimators.persistence import CODE, Saved, Storage, load_code, save_code
from sparkdl.ml.estimators.source import Signature, Tensor
from sparkdl.ml.estimators.training import (
    VALIDATION,
    Training,
    TrainingSummary,
    check_columns,
    column,
    null_advice,
)
from sparkdl.ml.jobs.fit import check_mode, fit_keras
from sparkdl.ml.jobs.loop import Plan
from sparkdl.ml.scoring.columns import NUMBERS, TEXTS, input_columns, leaf_type
from sparkdl.ml.scoring.model import KerasModel
from sparkdl.ml.scoring.predict import SCORE_ROWS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sparkdl.ml.estimators.options import KerasParams

_BATCH_ROWS = 32
_MODEL = "model.keras"
Trained = tuple[bytes, Signature, TrainingSummary]
SAMPLE_ROWS = 1000
"""So many rows are looked at before the nodes start."""
Inputs = Mapping[str, Tensor]


class KerasEstimator(
    Estimator[KerasModel],
    HasParams,
    Saved,
    params=[
        *("input_mapping", "batch_size", "epochs", "model_dir", "num_workers", "label_col"),
        *("optimizer", "loss", "metrics", "learning_rate", "shuffle", "mode", "sync_every"),
        *("aggregation", *TRAINING, *SCORING, *COLUMNS),
    ],
):
    """Fits a Keras 3 model on `num_workers` nodes, under a strategy that keeps them in step.

    `KerasEstimator(model, loss="mse", num_workers=2, epochs=5).fit(df)` returns a `KerasModel`.
    Every row is used once an epoch. `batch_size` is what one node sees in a step. Parameters are
    those of the table in docs/spark-ml.md; `weight_col`, `validation_indicator_col` and the early
    stopping do as they say without further ado. With `mode="jobs"` there are no nodes: see
    docs/jobs.md.

    Args:
        model: a Keras model with known inputs, or a function without arguments that makes one.
            Its loss, optimizer and metrics count if it is compiled and `loss` is not set.
        callbacks: see `setCallbacks`.
        params: parameters by name. `optimizer`, `loss` and `metrics` may be objects of Keras.

    Raises:
        ConfigError: if `model` is neither, or is not compiled and there is no `loss`; if there is
            no such parameter, or it cannot have that value.
    """

    __module__ = "sparkdl"

    def __init__(
        self, model: Any = None, *, callbacks: Any = (), **params: Unpack[KerasParams]
    ) -> None:
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
                raise ConfigError(NO_LOSS)

    def setModel(self, model: Any) -> KerasEstimator:
        """Set the model: a Keras model, or a function that makes one.

        Raises:
            ConfigError: if it is neither.
        """
        if hasattr(model, "get_weights") and hasattr(model, "save"):
            check_inputs(model)
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
        With `mode="jobs"` they run on the driver, once an epoch and not for each batch.

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
        with tracked("fit", estimator=self, dataset=dataset) as note:
            model = self._fitted(dataset)
            note(model=model)
        return model

    def _fitted(self, dataset: DataFrame) -> KerasModel:
        check_mode(self)
        task = self._task()
        check_schema(task, None, dataset.schema)  # before anything that takes time
        is_made_here = self.getMode() == "jobs"
        recipe = task.recipe
        made = (recipe.made, recipe.optimizer, recipe.loss, recipe.metrics)
        inputs = keras_inputs(*made, is_made_here)
        by_column = check_schema(task, inputs, dataset.schema)
        training = Training(
            map_fun=train,
            args=task,
            nodes=self.getNumWorkers(),
            epochs=task.epochs,
            columns=task.columns.names,
            check=partial(check_rows, task, by_column, self.getNumWorkers()),
            refuses_nulls=True,
            validation_col=self.getValidationIndicatorCol(),
            return_timeout_s=self.getShutdownTimeout(),
            cache=self.getCache(),
            reader=self.getFeedReader(),
            options=launch_options(self._values()),
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
            recipe=Recipe(
                self._made,
                optimizer=self.getOptimizer(),
                loss=self.getLoss(),
                metrics=self.getMetrics(),
                learning_rate=self.getLearningRate(),
            ),
            columns=Columns(
                features=self.getInputMapping() or {self.getFeaturesCol(): ""},
                label=self.getLabelCol(),
                weight=self.getWeightCol(),
            ),
            batch_size=self.getBatchSize(),
            epochs=self.getEpochs(),
            name=self.uid,
            validates=self.getValidationIndicatorCol() is not None,
            shuffle=self.getShuffle(),
            seed=self.getSeed(),
            stopping=EarlyStopping(
                patience=self.getEarlyStoppingPatience(),
                monitor=self.getEarlyStoppingMonitor(),
                min_delta=self.getEarlyStoppingMinDelta(),
            ),
            tensorboard_dir=self.getTensorboardDir(),
            model_dir=self.getModelDir(),
            saves=self.getCheckpointDir() is not None,
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


def check_schema(
    task: KerasTask, inputs: tuple[Tensor, ...] | None, schema: t.StructType
) -> Inputs:
    """Check columns and their types; return which feeds which of the model's inputs, if known.

    Args:
        inputs: the model's; None if only the nodes can know.

    Raises:
        ConfigError: if they cannot be trained with; it names the column.
    """
    columns, stopping = task.columns, task.stopping
    if stopping.patience and (stopping.monitor or "").startswith("val_") and not task.validates:
        raise ConfigError(
            f"early_stopping_monitor={stopping.monitor!r} needs rows to validate with: set "
            "validation_indicator_col"
        )
    check_columns(schema.names, columns.names)
    for name in columns.features:
        if not isinstance(leaf_type(schema[name].dataType), NUMBERS | TEXTS):
            raise _wrong_type(
                schema, name, "features are numbers, vectors, text, or arrays of them"
            )
    if not isinstance(leaf_type(schema[columns.label].dataType), NUMBERS):
        advice = "labels are numbers, vectors, or arrays of them"
        if isinstance(leaf_type(schema[columns.label].dataType), TEXTS):
            advice += ": index text first, for example with pyspark.ml.feature.StringIndexer"
        raise _wrong_type(schema, columns.label, advice)
    if columns.weight and not isinstance(schema[columns.weight].dataType, t.NumericType):
        raise _wrong_type(schema, columns.weight, "weights are numbers")
    by_column = inputs_by_column(columns.features, inputs) if inputs else {}
    for name, tensor in by_column.items():
        input_columns({name: tensor.name}, Signature((tensor,), ()), schema)
    return by_column


def check_rows(task: KerasTask, inputs: Inputs, nodes: int, rows: DataFrame, feed: str) -> None:
    """Check the first rows: how many there are, nulls, lengths.

    Args:
        feed: `VALIDATION` for the rows that are validated with.

    Raises:
        ConfigError: if they cannot be trained with; it names the column.
    """
    kinds = {name: rows.schema[name].dataType for name in task.columns.names}
    wanted = [
        part.alias(f"{what}_{place}")
        for place, (name, kind) in enumerate(kinds.items())
        for what, part in (("null", _has_null(column(name), kind)), ("size", _size(name, kind)))
    ]
    found = rows.select(*wanted).take(max(SAMPLE_ROWS, nodes))
    if len(found) < nodes:
        what = "rows to validate with" if feed == VALIDATION else "rows to train on"
        marked = ", by validation_indicator_col" if task.validates else ""
        raise ConfigError(
            f"the DataFrame has {len(found)} {what}{marked}: each of the {nodes} nodes needs one "
            "at least"
        )
    for place, name in enumerate(kinds):
        _check_column(name, [(row[2 * place], row[2 * place + 1]) for row in found], inputs)


def _check_column(name: str, found: list[tuple[bool, int | None]], inputs: Inputs) -> None:
    for number, (has_null, _) in enumerate(found):
        if has_null:
            raise ConfigError(
                f"{null_advice(name)}. It is in row {number} of those that Spark gives first"
            )
    sizes = {size for _, size in found if size is not None}
    if len(sizes) > 1:
        raise ConfigError(
            f"column {name!r} holds {min(sizes)} values in some rows and {max(sizes)} in others; "
            "all rows must have as many"
        )
    if name in inputs:
        for size in sizes:
            check_size(name, size, inputs[name])


def _wrong_type(schema: t.StructType, name: str, advice: str) -> ConfigError:
    kind = schema[name].dataType.simpleString()
    return ConfigError(f"column {name!r} is of type {kind}, and {advice}")


def _has_null(values: Column, kind: t.DataType) -> Column:
    if not isinstance(kind, t.ArrayType):
        return values.isNull()
    element = kind.elementType
    return values.isNull() | f.exists(values, lambda each: _has_null(each, element))


def _size(name: str, kind: t.DataType) -> Column:
    """Return how many values a row holds; null where only the nodes can know."""
    values: Any = column(name)
    if isinstance(kind, VectorUDT):
        return f.when(values.isNotNull(), f.size(vector_to_array(values)))
    while isinstance(kind, t.ArrayType) and isinstance(kind.elementType, t.ArrayType):
        values, kind = f.flatten(values), kind.elementType
    if isinstance(kind, t.ArrayType):
        is_single = isinstance(kind.elementType, t.NumericType | t.BooleanType | TEXTS)
        return f.size(values) if is_single else f.lit(None).cast("int")
    return f.lit(None if isinstance(kind, MatrixUDT) else 1).cast("int")
