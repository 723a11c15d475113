"""The base classes of Horovod's estimators and models: they translate to those of `sparkdl.ml`.

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/common/estimator.py
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.ml import Estimator, Model
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame, SparkSession, functions as f, types as t
from pyspark.sql.pandas.types import from_arrow_schema

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.driver.executors.scored import column
from sparkdl.driver.executors.sessions import session_of
from sparkdl.horovod.spark.common.backend import SparkBackend
from sparkdl.horovod.spark.common.params import EstimatorParams, ModelParams
from sparkdl.ml.estimators.training import check_columns, without_vectors
from sparkdl.ml.persistence import Contents, Saved, packed_code, unpacked_code
from sparkdl.ml.scoring.source import Signature

_SAMPLE_ROWS = 100
"""So many rows show the types of what `transformation_fn` returns."""
_SHARES = 1_000_000
"""Into so many shares rows fall by their hash."""
_MARK = "sparkdl_validates"
_INPUT = "sparkdl_input_"


@dataclass(frozen=True)
class Fit:
    """A fit: `settings` are parameters of `sparkdl.ml`'s estimator, `common` of Horovod's model."""

    rows: DataFrame
    features: list[str]
    labels: list[str]
    num_proc: int
    settings: dict[str, Any]
    common: dict[str, Any]


class _Saved(Saved):
    """Saves all parameters but backend and store, which belong to a run of a program."""

    def _to_save(self) -> dict[str, Any]:
        return {}

    def _contents(self, spark: SparkSession) -> Contents:
        values = super()._to_save()
        return packed_code(
            self._packed({n: x for n, x in values.items() if n not in ("backend", "store")})
        )

    @classmethod
    def _restored(cls, contents: Contents, metadata: dict[str, Any]) -> Any:
        (values,) = unpacked_code(contents)
        return cls()._set(**cls._unpacked(values))  # type: ignore[attr-defined]

    @classmethod
    def _packed(cls, values: dict[str, Any]) -> dict[str, Any]:
        return values

    @classmethod
    def _unpacked(cls, values: dict[str, Any]) -> dict[str, Any]:
        return values


class HorovodEstimator(Estimator[Any], EstimatorParams, _Saved):
    """Fits a model to a DataFrame, by an estimator of `sparkdl.ml`."""

    _prefix = ""
    _is_float = False
    """Whether all numbers come as `float`, as Horovod gives them to PyTorch."""

    def fit_on_parquet(
        self, params: Mapping[Any, Any] | None = None, dataset_idx: int | None = None
    ) -> Any:
        """Fit to the Parquet files in `store.train_path`.

        If `validation` is set, those in `store.val_path` are the rows to validate with.

        Args:
            params: parameters for this fit.
            dataset_idx: refused: give the store the paths of the files.

        Raises:
            ConfigError: if a parameter is invalid, or there are no rows.
            NodeFailedError: if a process failed.
        """
        chosen = self.copy(dict(params)) if params else self.copy()
        store, spark = chosen.getStore(), session_of(None)
        if store is None:
            raise ConfigError("store is not set: give store=Store.create(folder)")
        if dataset_idx is not None:
            raise ConfigError(
                f"dataset_idx={dataset_idx}: must be None. Give Store.create(train_path=…) the "
                "folder itself"
            )
        rows = spark.read.parquet(store.train_path)
        if chosen.getValidation():
            validating = spark.read.parquet(store.val_path).withColumn(_MARK, f.lit(True))
            rows = rows.withColumn(_MARK, f.lit(False)).unionByName(validating)
            chosen.setValidation(_MARK)
        return chosen._fit(rows)

    def _fit(self, df: DataFrame) -> Any:
        self._check_params()
        names = [*self.getFeatureCols(), *self.getLabelCols()]
        names += [weight] if (weight := self.getSampleWeightCol()) else []
        mark = self._mark(df)
        if (function := self.getTransformationFn()) is not None:
            df = transformed(df, function, mark)
            mark = None if mark is None else column(_MARK)
        check_columns(df.columns, names)
        features, labels = _distinct(self.getFeatureCols()), _distinct(self.getLabelCols())
        chosen = [
            _plain(df, name, self._is_float).alias(alias)
            for alias, name in {
                **dict(zip(labels, self.getLabelCols(), strict=True)),
                **dict(zip(features, self.getFeatureCols(), strict=True)),
            }.items()
        ]
        if weight and weight not in (*features, *labels):
            chosen.append(_plain(df, weight, self._is_float).alias(weight))
        chosen += [] if mark is None else [mark.alias(_MARK)]
        num_proc = self._num_proc()
        run_id = self.getRunId() or f"{self._prefix}_{int(time.time())}_{uuid.uuid4().hex[:6]}"
        common = {
            "feature_columns": self.getFeatureCols(),
            "label_columns": self.getLabelCols(),
            "run_id": run_id,
        }
        settings = self._settings(num_proc, labels, mark is not None)
        return self._fitted(Fit(df.select(*chosen), features, labels, num_proc, settings, common))

    def _fitted(self, fit: Fit) -> Any:
        raise NotImplementedError

    def _mark(self, df: DataFrame) -> Column | None:
        """Return the condition that marks validation rows, if there are any."""
        share = self.getValidation()
        if isinstance(share, str):
            check_columns(df.columns, [share])
            is_bool = isinstance(df.schema[share].dataType, t.BooleanType)
            return f.coalesce(column(share) if is_bool else column(share) > 0, f.lit(False))
        if not share:
            return None
        # By a row's content, not its place: Spark may compute rows twice, in another order. Of the
        # rows as they were, as a transformation may be random.
        hashed = f.xxhash64(f.lit(self.getRandomSeed() or 0), *without_vectors(df))
        return f.pmod(hashed, f.lit(_SHARES)) < int(share * _SHARES)

    def _settings(self, num_proc: int, labels: list[str], is_marked: bool) -> dict[str, Any]:
        found = {
            "num_workers": num_proc,
            "batch_size": self.getBatchSize(),
            "epochs": self.getEpochs(),
            "seed": self.getRandomSeed(),
            "shuffle": self.getShuffle() and self.getShufflingBufferSize() != 0,
            "label_col": labels if len(labels) > 1 else labels[0],
            "weight_col": self.getSampleWeightCol(),
            "validation_indicator_col": _MARK if is_marked else None,
            "num_gpus": None if self.getUseGpu() else 0,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _num_proc(self) -> int:
        backend, num_proc = self.getBackend(), self.getNumProc()
        if backend is None:
            return SparkBackend(num_proc).num_processes()
        if not isinstance(backend, SparkBackend):
            raise ConfigError(
                f"backend is a {type(backend).__name__}: must be a SparkBackend. Set num_proc"
            )
        if num_proc is not None:
            raise ConfigError(
                'At most one of parameters "backend" and "num_proc" may be specified: leave out '
                "num_proc, which the backend has"
            )
        return backend.num_processes()

    def _check_params(self) -> None:
        if self.getModel() is None:
            raise ConfigError("Model parameter is required: give model=")
        for name in ("feature_cols", "label_cols"):
            if not self.getOrDefault(name):
                raise ConfigError(f"{name} is not set: name the columns, {name}=[…]")
        self.check_no_refused()
        share = self.getValidation()
        if not isinstance(share, str | float) and share:
            raise ConfigError(
                f'Param validation must be of type "float" or "str", found: {type(share)}'
            )
        if isinstance(share, float) and not 0 <= share < 1:
            raise ConfigError(f"Validation split {share} must be in the range: [0, 1)")


def _distinct(names: Sequence[str]) -> list[str]:
    return [
        name if name not in names[:index] else f"{name}#{index}" for index, name in enumerate(names)
    ]


def _plain(df: DataFrame, name: str, is_float: bool) -> Column:
    """Return a column without vectors, in the numbers that the framework is given."""
    kind, found = df.schema[name].dataType, column(name)
    if isinstance(kind, VectorUDT):
        return vector_to_array(found, "float32" if is_float else "float64")
    return found.cast(_floats(kind)) if is_float else found


def _floats(kind: t.DataType) -> t.DataType:
    if isinstance(kind, t.ArrayType):
        return t.ArrayType(_floats(kind.elementType))
    return t.FloatType() if isinstance(kind, t.NumericType | t.BooleanType) else kind


def transformed(df: DataFrame, function: Callable[[Any], Any], mark: Column | None) -> DataFrame:
    """Return the rows of a DataFrame, transformed by a pandas function, batch by batch.

    Arrays and vectors are numpy arrays there. The first rows show what types it returns.

    Args:
        mark: of validation rows. What becomes of them and of the others is marked in a column.
    """
    call, plain = Transformation(function), without_vectors(df.drop(_MARK))
    sample: Any = df.select(*plain).limit(_SAMPLE_ROWS).toPandas()
    if sample.empty:
        raise ConfigError("the DataFrame has no rows: fit needs some to learn from")
    try:
        schema = pa.Table.from_pandas(call.of(sample), preserve_index=False).schema
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise FeedTypeError(
            f"transformation_fn returned columns that Spark cannot have: {error}"
        ) from error

    def part(rows: DataFrame) -> DataFrame:
        return rows.select(*plain).mapInPandas(call, from_arrow_schema(schema))

    if mark is None:
        return part(df)
    # Apart, as the function may return other rows than it was given.
    training, validating = part(df.where(~mark)), part(df.where(mark))
    marked = validating.withColumn(_MARK, f.lit(True))
    return training.withColumn(_MARK, f.lit(False)).unionByName(marked)


@dataclass(frozen=True)
class Transformation:
    function: Callable[[Any], Any]

    def __call__(self, frames: Iterator[Any]) -> Iterator[Any]:
        return (self.of(frame) for frame in frames if len(frame))

    def of(self, frame: Any) -> Any:
        """Return what it makes of one batch, with lists in place of arrays of arrays."""
        import pandas as pd

        arrays = [name for name in frame if isinstance(frame[name].iloc[0], list | np.ndarray)]
        given = {name: [np.array(list(value)) for value in frame[name]] for name in arrays}
        found = self.function(frame.assign(**given))
        return pd.DataFrame({name: _cells(found[name]) for name in found})


def _cells(values: Any) -> Any:
    plain = np.asarray(values)
    if plain.ndim == 1 and plain.dtype != object:
        return plain
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]


class HorovodModel(Model, ModelParams, _Saved):
    """Adds the model's outputs to a DataFrame, one column for each label: `<label>__output`.

    A column is a double, or a vector where the output has several numbers.
    """

    _is_float = False

    def _transform(self, df: DataFrame) -> DataFrame:
        if self.getModel() is None:
            raise ConfigError("model is not set: call setModel(model) before transform")
        labels, names = self.getLabelColumns(), self.getOutputCols()
        features = self.getFeatureColumns()
        if len(labels) != len(names):
            raise ConfigError(
                f"outputCols={names} must have one name for each label: {', '.join(labels)}"
            )
        check_columns(df.columns, features)
        fed = [f"{_INPUT}{index}" for index in range(len(features))]
        pairs = zip(fed, features, strict=True)
        plain = [_plain(df, name, self._is_float).alias(at) for at, name in pairs]
        stage = self._stage(df.select(*plain))
        outputs = stage._signature.outputs
        if len(outputs) < len(names):
            raise ConfigError(
                f"the model has {len(outputs)} outputs, and needs one for each label: "
                f"{', '.join(labels)}"
            )
        types: dict[str, str] = {}
        for name, output in zip(names, outputs, strict=False):
            if output.shape is not None and prod(n or 0 for n in output.shape[1:]) == 1:
                types[name] = "double"
            elif output.shape is not None and len(output.shape) == 2:
                types[name] = "vector"
        stage.setInputMapping(inputs_by_column(fed, stage._signature, features))
        mapping = dict(zip((tensor.name for tensor in outputs), names, strict=False))
        stage.setOutputMapping(mapping).setOutputTypes(types).setKeep(df.columns)
        found: DataFrame = stage.transform(df.select("*", *plain))
        return found

    def _stage(self, inputs: DataFrame) -> Any:
        """Return the model of `sparkdl.ml`, with known outputs.

        Args:
            inputs: the columns of its inputs, in their order.
        """
        raise NotImplementedError


def inputs_by_column(
    columns: Sequence[str], signature: Signature, names: Sequence[str]
) -> dict[str, str]:
    inputs = [tensor.name for tensor in (*signature.inputs, *signature.optional)]
    if not len(signature.inputs) <= len(columns) <= len(inputs):
        raise ConfigError(
            f"Feature column count {len(columns)} must equal model inputs count "
            f"{len(signature.inputs)}: the columns are {', '.join(names)}, the inputs "
            f"{', '.join(inputs)}"
        )
    return dict(zip(columns, inputs, strict=False))
