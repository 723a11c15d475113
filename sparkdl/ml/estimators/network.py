"""The base class of the Keras, PyTorch and Lightning estimators."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from sparkdl.core.errors import ConfigError, ResultError
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.core.texts import did_you_mean
from sparkdl.driver.handle import Cluster
from sparkdl.feed.transfer.files import SentFile
from sparkdl.ml.estimators.columns import Callbacks, Columns, Task
from sparkdl.ml.estimators.estimator import ClusterEstimator, M, launch_options
from sparkdl.ml.estimators.training import Training
from sparkdl.ml.model_file import ModelFile, fetch_file
from sparkdl.ml.params import COLUMNS, SCORING, TRAINING
from sparkdl.ml.persistence import Contents, copy_path, packed_code, unpacked_code
from sparkdl.ml.scoring.columns import check_types
from sparkdl.ml.scoring.inputs import as_mapping
from sparkdl.ml.scoring.keras_objects import as_config, from_config
from sparkdl.ml.scoring.model import MODEL
from sparkdl.ml.scoring.predict import SCORE_ROWS
from sparkdl.ml.scoring.source import Format, Signature
from sparkdl.ml.summary import TrainingSummary

Trained = tuple[ModelFile, Signature, TrainingSummary]
_PICKLED = ("optimizer", "loss", "metrics", "trainer_args", "tokenizer", "lora")
"""Parameters whose values may be objects; they are saved like the user's functions."""


class NetworkEstimator(
    ClusterEstimator[M],
    params=[
        *("input_mapping", "batch_size", "epochs", "model_dir", "num_workers", "label_col"),
        *("shuffle", "seed", "weight_col", *TRAINING, *SCORING, *COLUMNS),
    ],
):
    """An estimator: every node gets a `Task`, and the chief returns the trained model."""

    _own: tuple[str, ...] = ()
    """Attributes that are saved beside the model and the callbacks."""
    _made: Any = None
    """A `ModelFile`, or what makes the model on each node."""
    _callbacks: Callbacks = ()
    _format: Format = "module"
    _hook = "on_epoch_end"
    """A method that each callback of the framework has."""
    _defaults: Mapping[str, Any] = {}
    """Defaults other than those of the table."""

    def __init__(self, model: Any = None, *, callbacks: Any = (), **params: Any) -> None:
        super().__init__()
        self._set_table_defaults(batch_size=32, **self._defaults)
        if unknown := [name for name in params if not self.hasParam(name)]:
            known = ["model", "callbacks", *(param.name for param in self.params)]
            advice = did_you_mean(unknown[0], known)
            raise ConfigError(
                f"{type(self).__name__} has no parameter {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(known)}{advice}"
            )
        self._set(**params)
        self.setCallbacks(callbacks)
        if model is not None:
            self.setModel(model)

    @abstractmethod
    def setModel(self, model: Any) -> Any: ...

    def setCallbacks(self, callbacks: Callbacks) -> Any:
        """Set callbacks of the framework: a list, or a function without arguments that makes it.

        Every node has its own copies. With `mode="jobs"` they run on the driver, once an epoch and
        not for each batch.

        Raises:
            ConfigError: if they are not callbacks, or cannot be pickled.
        """
        listed = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
        for each in () if callable(callbacks) else listed:
            if isinstance(each, type) or not hasattr(each, self._hook):
                raise ConfigError(
                    f"callbacks={each!r}: give a list of the framework's callbacks, or a function "
                    "without arguments that makes it"
                )
        try:
            # Tried here, so that the error names the callbacks, and not the whole task.
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

    def _check_made(self) -> None:
        if self._made is None:
            name = type(self).__name__
            raise ConfigError(f"{name} has no model: give it one, {name}(model=…)")

    def _task_fields(self) -> dict[str, Any]:
        outputs = self.getOutputMapping().values() or [self.getPredictionCol()]
        check_types(self.getOutputTypes(), outputs)  # or the model's first transform would fail
        return {
            "columns": self._columns(),
            "batch_size": None if self._has_order else self.getBatchSize(),
            "epochs": self.getEpochs(),
            "name": self.uid,
            "validates": self.getValidationIndicatorCol() is not None,
            "shuffle": self.getShuffle() and not self._has_order,  # the driver shuffles then
            "seed": self.getSeed(),
            "sparse": self.getSparse(),
            "model_dir": self.getModelDir(),
            "saves": self.getCheckpointDir() is not None,
            "callbacks": self._callbacks,
        }

    @property
    def _has_order(self) -> bool:
        """Whether rows have a fixed order; then the size of its batches alone counts."""
        feeding = self.getFeeding()
        if feeding is None or feeding.global_batch_size is None:
            return False
        if self.isSet("batch_size"):
            raise ConfigError(
                f"batch_size={self.getBatchSize()} and Feeding(global_batch_size="
                f"{feeding.global_batch_size}) are both set: leave batch_size out"
            )
        return True

    def _columns(self) -> Columns:
        return Columns(
            features=self.getInputMapping() or as_mapping(self.getFeaturesCol()),
            labels=as_mapping(self.getLabelCol()),
            weight=self.getWeightCol(),
        )

    def _training(self, map_fun: Callable[[Any, Any], Any], task: Task, **options: Any) -> Training:
        is_shuffled = self._has_order and self.getShuffle()
        return Training(
            map_fun=map_fun,
            args=task,
            nodes=self.getNumWorkers(),
            epochs=task.epochs,
            columns=task.columns.names,
            validation_col=self.getValidationIndicatorCol(),
            least_rows=self.getNumWorkers(),
            refuses_nulls=True,
            order={"shuffle": "global", "seed": task.seed or 0} if is_shuffled else {},
            options={**launch_options(self._values()), **options},
        )

    def _trained(self, dataset: DataFrame, training: Training) -> Trained:
        fetched: list[ModelFile] = []

        def take(cluster: Cluster, chief: Mapping[str, Any]) -> None:
            if "file" in chief:
                sent = msgspec.convert(chief["file"], SentFile)
                spec = cluster._feeds.feed_spec(DEFAULT_FEED, None)
                fetch = partial(fetch_file, spec, spec.targets[0].uri, sent)
                fetched.append(ModelFile(self._format, fetch, sent.sha256))

        if isinstance(self._made, ModelFile):
            source = self._made.source_for_tasks(dataset.sparkSession)
            training = replace(training, args=training.args.with_made(source))
        summary = training.run(dataset, take)
        if not summary.results:
            raise ResultError("the chief's model did not reach the driver; see the log above")
        chief: dict[str, Any] = summary.results[0]
        if not fetched and "content" in chief:
            fetched = [ModelFile.of(chief["content"], self._format)]
        elif not fetched:
            copy = partial(_copy, dataset.sparkSession, chief["path"])
            fetched = [ModelFile(self._format, copy)]
        return fetched[0], msgspec.json.decode(chief["signature"], type=Signature), summary

    def _with_values(self, model: M, summary: TrainingSummary) -> M:
        """Return a trained model with this estimator's parameters and its summary."""
        model = self._copyValues(model)
        model.clear(model.batch_size)  # what trains well need not score well
        model._setDefault(batch_size=SCORE_ROWS)
        # The results are where the model was, on the chief's node.
        model._summary = replace(summary, results=())
        return model

    def _to_save(self) -> dict[str, Any]:
        # JSON cannot hold them, so `_contents` pickles them.
        return {name: value for name, value in super()._to_save().items() if name not in _PICKLED}

    def _contents(self, spark: SparkSession) -> Contents:
        params = {name: x for name, x in super()._to_save().items() if name in _PICKLED}
        state = {name: getattr(self, name) for name in ("_made", "_callbacks", *self._own)}
        files = {}
        if isinstance(self._made, ModelFile):
            files[MODEL] = state.pop("_made")
        return {**packed_code(state, as_config(params)), **files}

    @classmethod
    def _restored(cls, contents: Contents, metadata: dict[str, Any]) -> Any:
        estimator = cls()
        state, params = unpacked_code(contents)
        vars(estimator).update(state)
        if MODEL in contents:
            estimator._made = ModelFile.moved(contents[MODEL], cls._format)
        estimator._set(**from_config(params))
        return estimator


def _copy(spark: SparkSession, path: str, target: Path) -> None:
    try:
        copy_path(spark, path, target)
    except (OSError, PySparkException) as error:
        raise ResultError(
            f"the chief saved its model as {path}, which the driver cannot see: model_dir must be "
            "on storage that nodes and driver share"
        ) from error
