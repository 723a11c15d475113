"""The base classes of Horovod's estimators and models: `fit` and `transform`.

Runs in: driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/common/estimator.py
"""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_all_start_methods
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from pyspark.ml import Estimator, Model
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DoubleType,
    IntegralType,
    StructField,
    StructType,
)

from sparkdl.core.errors import ConfigError, InferenceError
from sparkdl.core.scratch import scratch_folder
from sparkdl.horovod.spark.common import util
from sparkdl.horovod.spark.common.backend import SparkBackend
from sparkdl.horovod.spark.common.params import EstimatorParams, ModelParams
from sparkdl.horovod.spark.common.work import Work
from sparkdl.ml.estimators.persistence import Contents, Saved, packed_code, unpacked_code
from sparkdl.ml.estimators.training import warn_of_no_numbers
from sparkdl.ml.scoring.predict import predict

_SCORE_ROWS = 256


class _Saved(Saved):
    """Saves all parameters but backend and store, which belong to a run of a program."""

    def _to_save(self) -> dict[str, Any]:
        return {}

    def _contents(self, spark: SparkSession) -> Contents:
        values = super()._to_save()
        values = {n: x for n, x in values.items() if n not in ("backend", "store")}
        return packed_code(self._packed(values))

    @classmethod
    def _restored(cls, contents: Contents, metadata: dict[str, Any]) -> Any:
        (values,) = unpacked_code(contents)
        return cls()._set(**cls._unpacked(values))  # type: ignore[attr-defined]

    @classmethod
    def _packed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return parameters as they can be pickled."""
        return values

    @classmethod
    def _unpacked(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Undo `_packed`."""
        return values


class HorovodEstimator(Estimator[Any], EstimatorParams, _Saved):
    """Fits a model to a DataFrame, in processes that a backend runs."""

    _prefix = ""
    _unused: tuple[str, ...] = ()
    """Horovod's parameters for all frameworks that this one does not use."""

    def fit_on_parquet(
        self, params: Mapping[Any, Any] | None = None, dataset_idx: int | None = None
    ) -> Any:
        """Fit to Parquet files that are in the store, without a DataFrame.

        They are in `store.get_train_data_path(dataset_idx)`, and if `validation` is set in
        `store.get_val_data_path(dataset_idx)`.

        Args:
            params: parameters for this fit.

        Raises:
            ConfigError: if there are none, or something cannot work.
            NodeFailedError: if a process failed.
        """
        chosen = self.copy(dict(params)) if params else self
        chosen._check_params()
        backend = chosen._get_or_create_backend()
        columns = chosen.getLabelCols(), chosen.getFeatureCols(), chosen.getSampleWeightCol()
        found = util.get_simple_meta_from_parquet(chosen._store(), *columns, dataset_idx)
        return chosen._fit_on_prepared_data(backend, *found, dataset_idx)

    def _fit(self, df: DataFrame) -> Any:
        self._check_params()
        backend = self._get_or_create_backend()
        store = self._store()
        with util.prepare_data(
            backend.num_processes(),
            store,
            df,
            label_columns=self.getLabelCols(),
            feature_columns=self.getFeatureCols(),
            validation=self.getValidation(),
            sample_weight_col=self.getSampleWeightCol(),
            partitions_per_process=self.getPartitionsPerProcess(),
            verbose=self.getVerbose(),
        ) as index:
            return self._fit_on_prepared_data(backend, *util.prepared(store, index), index)

    def _store(self) -> Any:
        store = self.getStore()
        if store is None:
            raise ConfigError("store is not set: give store=Store.create(folder)")
        return store

    def _get_or_create_backend(self) -> Any:
        backend = self.getBackend()
        if backend is None:
            return SparkBackend(self.getNumProc(), verbose=self.getVerbose())
        if self.getNumProc() is not None:
            raise ConfigError(
                'At most one of parameters "backend" and "num_proc" may be specified: leave out '
                "num_proc, which the backend has"
            )
        return backend

    def _has_checkpoint(self, run_id: str) -> bool:
        path = self._checkpoint_path(run_id)
        return path is not None and bool(self._store().exists(path))

    def _checkpoint_path(self, run_id: str) -> str | None:
        folder = self._store().get_checkpoint_path(run_id)
        return folder and f"{folder}/{self._store().get_checkpoint_filename()}"

    def _check_params(self) -> None:
        """Check what can be checked before any rows are written."""
        if self.getModel() is None:
            raise ConfigError("Model parameter is required: give model=")
        for name in ("feature_cols", "label_cols"):
            if not self.getOrDefault(name):
                raise ConfigError(f"{name} is not set: name the columns, {name}=[…]")
        util.check_validation(self.getValidation())
        if self.getOrDefault("data_module") is not None:
            raise ConfigError(
                f"data_module={self.getOrDefault('data_module')!r}: must be None, because Parquet "
                "files are read in one way alone. Leave it out, and use transformation_fn"
            )
        if self.getShufflingBufferSize() is not None:
            warnings.warn(
                "shuffle_buffer_size is deprecated, use shuffle", DeprecationWarning, stacklevel=2
            )
        if idle := [name for name in self._unused if self.isSet(name)]:
            warnings.warn(
                f"{type(self).__name__} does not use {', '.join(idle)}: leave out what has no "
                "effect",
                stacklevel=2,
            )
        method = self.getMpStartMethod()
        if method is not None and method not in get_all_start_methods():
            raise ConfigError(
                f"mp_start_method={method!r} must be one of {', '.join(get_all_start_methods())}"
            )
        for name in ("epochs", "batch_size"):
            if self.getOrDefault(name) < 1:
                raise ConfigError(f"{name}={self.getOrDefault(name)} must be at least 1")

    def _check_metadata_compatibility(self, metadata: util.Metadata) -> None:
        """Check that the columns fit the model."""

    def _fit_on_prepared_data(
        self,
        backend: Any,
        train_rows: int,
        val_rows: int,
        metadata: util.Metadata,
        avg_row_size: float,
        dataset_idx: int | None = None,
    ) -> Any:
        self._check_metadata_compatibility(metadata)
        store = self._store()
        unique = uuid.uuid4().hex
        run_id = self.getRunId() or f"{self._prefix}_{int(time.time())}_{unique[:6]}"
        # Unique, because runs may have one name, and two fits may run at once.
        folder = f"{store.get_runs_path()}/_model-{unique}"
        has_val = self.getValidation() is not None and self.getValidation() != 0.0
        columns = [*self.getFeatureCols(), *self.getLabelCols()]
        columns += filter(None, [self.getSampleWeightCol()])
        train, val = util.sources(store, dataset_idx, columns, has_val)
        if train.num_rows != train_rows:
            raise ConfigError(
                f"the store has {train.num_rows} training rows, and {train_rows} were prepared: "
                "another program writes into it; give each program a store of its own"
            )
        dirs = store.get_train_data_path(dataset_idx), store.get_val_data_path(dataset_idx)
        apart = {"model", "optimizer", "store", "backend"}
        params = {p.name: self.getOrDefault(p) for p in self.params if p.name not in apart}
        work = Work(store, run_id, folder, dirs, train, val, SimpleNamespace(**params))
        try:
            with scratch_folder() as scratch:
                self._write_start(scratch / "start", run_id)
                work.send(scratch / "start", "start")
            results = backend.run(self._trainer(work), env=self._env())
            warn_of_no_numbers(_losses(results[0]))
            with work.received("result") as file:
                return self._create_model(results[0], file, run_id, metadata)
        finally:
            # The models in it have been read by now, or nobody will read them.
            store.delete(folder)

    def _env(self) -> dict[str, str]:
        return {}

    def _write_start(self, file: Path, run_id: str) -> None:
        """Write the model as the processes begin with it."""
        raise NotImplementedError

    def _trainer(self, work: Work) -> Callable[[], Any]:
        """Return what each process calls; rank 0 returns the history."""
        raise NotImplementedError

    def _create_model(self, history: Any, file: Path, run_id: str, metadata: util.Metadata) -> Any:
        """Return the fitted stage.

        Args:
            file: what rank 0 sent as `result`.
        """
        raise NotImplementedError


class HorovodModel(Model, ModelParams, _Saved):
    """Adds the model's outputs to a DataFrame, one column for each label: `<label>__output`.

    A column has the label's type, a vector where the label is one or the output has several
    numbers.
    """

    def _transform(self, df: DataFrame) -> DataFrame:
        if self.getModel() is None:
            raise ConfigError("model is not set: call setModel(model) before transform")
        labels, names = self.getLabelColumns(), self.getOutputCols()
        if len(labels) != len(names):
            raise ConfigError(
                f"outputCols={names} must have one name for each label: {', '.join(labels)}"
            )
        widths, call = self._scoring(df)
        if len(widths) < len(names):
            raise ConfigError(
                f"the model has {len(widths)} outputs, and needs one for each label: "
                f"{', '.join(labels)}"
            )
        metadata = self._get_metadata() or {}
        kinds = [metadata[name]["spark_data_type"] if name in metadata else DoubleType
                 for name in labels]  # fmt: skip
        fields = [
            StructField(name, util.model_type(kind, width), nullable=True)
            for name, kind, width in zip(names, kinds, widths, strict=False)
        ]
        make = Scoring(call, self.getFeatureColumns(), fields)
        # A column may feed several inputs, and goes to the workers once.
        features = list(dict.fromkeys(self.getFeatureColumns()))
        return predict(df, make, features, StructType(fields), batch_size=_SCORE_ROWS)

    def _scoring(self, df: DataFrame) -> tuple[list[int], Callable[[], Callable[..., list[Any]]]]:
        """Return the numbers of each output, and what makes the function that computes them."""
        raise NotImplementedError


def _losses(history: Any) -> list[float]:
    """Return the losses by epoch of Keras or PyTorch; Lightning's history has the last values."""
    if isinstance(history, Mapping):
        losses = history.get("loss", ())
        return list(losses) if isinstance(losses, (list, tuple)) else [losses]
    return [epoch["train"]["loss"] for epoch in history or ()]


def _column(kind: DataType, output: Any, rows: int) -> Any:
    """Return an output of the model [rows, …] as a column of this type."""
    array = np.asarray(output)
    if array.shape[:1] != (rows,):
        raise InferenceError(
            f"the model gave {list(array.shape)} for {rows} rows: its first dimension must be the "
            "rows"
        )
    if isinstance(kind, VectorUDT):
        return array.reshape(rows, -1).astype(np.float64)
    if not isinstance(kind, BooleanType | IntegralType):
        return array.reshape(rows)
    # Rounded, because a cast would cut 0.99 to 0.
    return np.rint(array.reshape(rows)).astype(bool if isinstance(kind, BooleanType) else np.int64)


@dataclass(frozen=True)
class Scoring:
    """Makes, in a worker of Spark, the function that scores batches of columns.

    Attributes:
        make: returns a function of the inputs that returns the outputs.
    """

    make: Callable[[], Callable[..., list[Any]]]
    features: list[str]
    results: list[StructField]

    def __call__(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """Load the model; return the function."""
        call = self.make()

        def score(columns: Mapping[str, Any]) -> dict[str, Any]:
            inputs = [columns[name] for name in self.features]
            outputs = call(*inputs)
            rows = len(inputs[0])
            return {
                field.name: _column(field.dataType, output, rows)
                for field, output in zip(self.results, outputs, strict=False)
            }

        return score
