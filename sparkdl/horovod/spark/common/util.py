"""A DataFrame becomes Parquet files in a store, once for all fits of it; what these files hold.

Runs in: driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/common/util.py
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import DenseVector, SparseVector, Vector, VectorUDT
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import ArrayType, BooleanType

from sparkdl.core.errors import ConfigError
from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.spark.common.store import AbstractFilesystemStore
from sparkdl.storage.parquet.source import ParquetSource
from sparkdl.storage.systems import open_storage
from sparkdl.values.columns import convert

Metadata = dict[str, dict[str, Any]]
Properties = tuple[int, int, Metadata, float]
"""Training rows, validation rows, the columns' metadata, and the bytes of a row."""


class _Written(NamedTuple):
    """A DataFrame in a store.

    Attributes:
        key: a weak reference to it, and the other arguments that determine the files.
        files: the paths it wrote; other files belong to another program.
    """

    key: tuple[Any, ...]
    properties: Properties
    files: list[str]

    def is_of(self, key: tuple[Any, ...]) -> bool:
        return self.key[0]() is key[0]() and self.key[1:] == key[1:]


class _Cache:
    """Which DataFrames have been written where. A dataset that no fit uses may be overwritten."""

    def __init__(self) -> None:
        # Fits may run in several threads, as in a CrossValidator with parallelism.
        self.lock = threading.RLock()
        self.datasets: dict[tuple[str, int], _Written] = {}
        self.in_use: Counter[tuple[str, int]] = Counter()

    def find(self, store: AbstractFilesystemStore, key: tuple[Any, ...]) -> int | None:
        """Return the index of the dataset that was written for `key`, if it is there still."""
        here = store.get_train_data_path()
        for (place, index), written in self.datasets.items():
            is_same = place == here and written.is_of(key)
            if is_same and _files(store, index, key[2]) == written.files:
                return index
        return None

    def free(self, place: str) -> int:
        """Return the lowest index that no fit uses."""
        index = 0
        while self.in_use[place, index]:
            index += 1
        return index


_cache = _Cache()
__getattr__ = partial(missing_name, __name__)


def clear_training_cache() -> None:
    """Forget which DataFrames have been written: the next fits write theirs again."""
    with _cache.lock:
        _cache.datasets.clear()


def say(text: str) -> None:
    """Show a line of progress; in a process of a training it goes to the driver."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def check_validation(validation: Any, df: DataFrame | None = None) -> None:
    """Check the parameter `validation`.

    Raises:
        ConfigError: if it is neither a number in [0, 1) nor a column; a ValueError.
    """
    if isinstance(validation, str):
        if df is not None and validation not in df.columns:
            raise ConfigError(
                f"Validation column {validation} does not exist in the DataFrame: name one of "
                f"{', '.join(df.columns)}"
            )
    elif isinstance(validation, float) or not validation:
        if validation and not 0 <= validation < 1:
            raise ConfigError(f"Validation split {validation} must be in the range: [0, 1)")
    else:
        raise ConfigError(
            f'Param validation must be of type "float" or "str", found: {type(validation)}'
        )


@contextmanager
def prepare_data(  # noqa: PLR0913 (Horovod's arguments)
    num_processes: int,
    store: AbstractFilesystemStore,
    df: DataFrame,
    label_columns: Sequence[str],
    feature_columns: Sequence[str] | None,
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
) -> Iterator[int]:
    """Write a DataFrame into the store, and yield the index of the dataset; nothing if it is there.

    It is there if the same DataFrame object was written with the same columns and `validation`, and
    the store still has its files. No other fit of this program overwrites them meanwhile.

    Args:
        compress_sparse: accepted: vectors become arrays, whose zeros Parquet compresses.
        partitions_per_process: files for each process, at most.

    Raises:
        ConfigError: if a column is missing, or there are no rows to train on or to validate with.
    """
    if num_processes <= 0 or partitions_per_process <= 0:
        raise ConfigError(
            f"num_proc={num_processes} and partitions_per_process={partitions_per_process} must "
            "both be > 0"
        )
    num_files = num_processes * partitions_per_process
    names = _checked(df, feature_columns, label_columns, sample_weight_col)
    check_validation(validation, df)
    place = store.get_train_data_path()
    # Weakly: a DataFrame that nobody has any more must not stay in memory for this.
    key = (weakref.ref(df), tuple(names), validation, store.get_val_data_path())
    with _cache.lock:
        index = _cache.find(store, key)
        if index is None:
            index = _cache.free(place)
            # Before the write: one that fails leaves files that are of no DataFrame.
            _cache.datasets.pop((place, index), None)
            frames = _train_val_split(_plain(df, names, validation), validation)
            _write(store, index, frames, num_files, verbose)
            found = _properties(store, index, names, df, bool(validation))
            files = _files(store, index, validation)
            _cache.datasets[place, index] = _Written(key, found, files)
        elif verbose:
            say(f"The training data are in {store.get_train_data_path(index)} already")
        _cache.in_use[place, index] += 1
    try:
        yield index
    finally:
        with _cache.lock:
            _cache.in_use[place, index] -= 1


def _checked(
    df: DataFrame, features: Sequence[str] | None, labels: Sequence[str], weight: str | None
) -> list[str]:
    """Return the columns that a training reads."""
    if not labels:
        raise ConfigError(
            "Parameter label_columns cannot be None or empty: name the columns of the labels"
        )
    if features is None:
        features = [name for name in df.columns if name not in labels]
    weights = [weight] if weight else []
    for what, names in (("Label", labels), ("Feature", features), ("Weight", weights)):
        for name in names:
            if name not in df.columns:
                raise ConfigError(
                    f"{what} column {name} does not exist in the DataFrame: name one of "
                    f"{', '.join(df.columns)}"
                )
    return [*features, *labels, *weights]


def get_dataset_properties(dataset_idx: int) -> Properties:
    """Return the properties of the dataset that was written last with this index.

    Raises:
        ConfigError: if none was written with it.
    """
    for (_, index), written in reversed(_cache.datasets.items()):
        if index == dataset_idx:
            return written.properties
    raise ConfigError(
        f"dataset_idx={dataset_idx}: no dataset was written with this index: call prepare_data "
        "first"
    )


def prepared(store: AbstractFilesystemStore, dataset_idx: int) -> Properties:
    """Return the properties of a dataset that `prepare_data` has written into this store."""
    return _cache.datasets[store.get_train_data_path(), dataset_idx].properties


def get_simple_meta_from_parquet(
    store: AbstractFilesystemStore,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    sample_weight_col: str | None,
    dataset_idx: int | None = None,
) -> Properties:
    """Return the properties of Parquet files in the store, of this or another program.

    Raises:
        ConfigError: if there are none, they lack a column, or have no rows.
    """
    columns = [*feature_columns, *label_columns]
    columns += [sample_weight_col] if sample_weight_col else []
    has_val = store.exists(store.get_val_data_path(dataset_idx))
    return _properties(store, dataset_idx, columns, None, has_val)


def sources(
    store: AbstractFilesystemStore, index: int | None, columns: Sequence[str], has_val: bool
) -> tuple[ParquetSource, ParquetSource | None]:
    """Return the files of the training rows, and those of the validation rows.

    Raises:
        ConfigError: see `get_simple_meta_from_parquet`.
    """
    paths = [("training", store.get_train_data_path(index))]
    paths += [("validation", store.get_val_data_path(index))] if has_val else []
    found: list[ParquetSource] = []
    for what, path in paths:
        try:
            found.append(store.parquet_source(path, list(dict.fromkeys(columns))))
        except ConfigError as error:
            raise ConfigError(
                f"the {what} data in the store cannot be read: {error}. The driver and all "
                "executors must reach the store: a local path must be mounted on all of them"
            ) from error
        if not found[-1].num_rows:
            change = "Raise" if what == "validation" else "Lower"
            raise ConfigError(
                f"No rows found in {what} dataset: {path}. {change} the parameter validation, or "
                "remove filters of the DataFrame"
            )
    return found[0], found[1] if has_val else None


def _files(store: AbstractFilesystemStore, index: int, validation: Any) -> list[str]:
    paths = [store.get_train_data_path(index)]
    paths += [store.get_val_data_path(index)] if validation else []
    try:
        return [file.path for path in paths for file in store.parquet_source(path).files]
    except ConfigError:
        return []


def _plain(df: DataFrame, columns: Sequence[str], validation: Any) -> DataFrame:
    """Return the columns, vectors as arrays."""
    names = [*columns, *([validation] if isinstance(validation, str) else [])]
    # A column may be a feature and a label.
    chosen = [
        vector_to_array(f.col(f"`{name}`")).alias(name)
        if isinstance(df.schema[name].dataType, VectorUDT)
        else f.col(f"`{name}`")
        for name in dict.fromkeys(names)
    ]
    return df.select(*chosen)


def _train_val_split(
    df: DataFrame, validation: float | str | None
) -> tuple[DataFrame, DataFrame | None]:
    if not validation:
        return df, None
    if isinstance(validation, str):
        column = f.col(f"`{validation}`")
        is_val = column if isinstance(df.schema[validation].dataType, BooleanType) else column > 0
        # A null is neither true nor false to Spark: such rows would be in no part.
        is_val = f.coalesce(is_val, f.lit(False))
        return df.where(~is_val).drop(validation), df.where(is_val).drop(validation)
    train, val = df.randomSplit([1.0 - validation, validation])
    return train, val


def _write(
    store: AbstractFilesystemStore,
    index: int,
    frames: tuple[DataFrame, DataFrame | None],
    num_files: int,
    verbose: int,
) -> None:
    paths = store.get_train_data_path(index), store.get_val_data_path(index)
    for what, frame, path in zip(("training", "validation"), frames, paths, strict=True):
        if frame is None:
            store.delete(path)  # of another DataFrame's
            continue
        if verbose:
            say(f"Writing the {what} data to {path}")
        # Without a shuffle, which `repartition` would be: rows are shared out one by one anyway.
        frame.coalesce(num_files).write.mode("overwrite").parquet(path)


def _properties(
    store: AbstractFilesystemStore,
    index: int | None,
    columns: Sequence[str],
    df: DataFrame | None,
    has_val: bool,
) -> Properties:
    train, val = sources(store, index, columns, has_val)
    types = {name: type(df.schema[name].dataType) for name in columns} if df is not None else {}
    shapes = _shapes(train)
    metadata = {
        name: _about(types.get(name) or _spark_type(train.schema.field(name).type), shapes[name])
        for name in columns
    }
    nbytes = max(file.row_nbytes for file in train.files)
    return train.num_rows, val.num_rows if val else 0, metadata, float(nbytes)


def _shapes(source: ParquetSource) -> dict[str, int | None]:
    """Return how many numbers each column has in the first row; None where that is not known."""
    # Some files may have no rows.
    place = next(i for i, groups in enumerate(source.row_groups) if sum(groups))
    path, system = source.files[place].path, open_storage(source.storage)
    own = [name for name in source.schema.names if name not in source.partitions]
    with pq.ParquetFile(path, filesystem=system) as file:
        row = next(file.iter_batches(1, columns=own))
    found: dict[str, int | None] = dict.fromkeys(source.partitions, 1)
    for name in own:
        column = row.column(row.schema.get_field_index(name))
        found[name] = None if column.null_count else int(np.size(convert(column)))
    return found


def _about(kind: type[Any], shape: int | None, is_sparse: bool = False) -> dict[str, Any]:
    if kind in (VectorUDT, ArrayType):
        kind = SparseVector if is_sparse else DenseVector
    return {
        "spark_data_type": kind,
        "is_sparse_vector_only": is_sparse,
        "shape": shape,
        "intermediate_format": "array" if kind in (DenseVector, SparseVector) else "nochange",
        "max_size": shape,
    }


def _spark_type(kind: Any) -> type[Any]:
    import pyarrow as pa

    return ArrayType if pa.types.is_list(kind) else type(from_arrow_type(kind))


def _get_metadata(df: DataFrame) -> Metadata:
    """Return the columns' metadata, for a model's parameter `_metadata`.

    Runs a job for the first row.
    """
    row = df.first()
    found: Metadata = {}
    for field in df.schema.fields:
        value = None if row is None else row[field.name]
        size = len(value) if isinstance(value, Vector | list) else 1
        found[field.name] = _about(
            type(field.dataType), None if value is None else size, isinstance(value, SparseVector)
        )
    return found


def check_shape_compatibility(
    metadata: Metadata,
    feature_columns: Sequence[str],
    label_columns: Sequence[str],
    input_shapes: Sequence[Sequence[int]] | None = None,
    output_shapes: Sequence[Sequence[int]] | None = None,
    label_shapes: Sequence[Sequence[int]] | None = None,
) -> None:
    """Check that the model has an input for each feature and an output for each label, as large.

    Sizes of shapes with several -1 are not compared.

    Raises:
        ConfigError: if not; it names the column.
    """
    labels = ("label shape", label_shapes) if label_shapes else ("model output", output_shapes)
    for what, names, other, shapes in (
        ("Feature", feature_columns, "model input", input_shapes),
        ("Label", label_columns, *labels),
    ):
        if shapes is not None and len(names) != len(shapes):
            raise ConfigError(
                f"{what} column count {len(names)} must equal {other}s count {len(shapes)}"
            )
        for place, (name, shape) in enumerate(zip(names, shapes or [], strict=False)):
            # A single -1 stands for the rows.
            known, wanted = metadata[name]["shape"], abs(int(np.prod(shape)))
            is_open = sum(size < 0 for size in shape) > 1
            if known is not None and not is_open and known != wanted:
                raise ConfigError(
                    f"{what} column '{name}' with size {known} must equal that of the {other} at "
                    f"index {place} with size {wanted}"
                )


def to_list(var: Any, length: int) -> list[Any] | None:
    """Return a value for each of `length` outputs: one for all of them, or a list.

    Raises:
        ConfigError: if there are more or fewer.
    """
    if var is None:
        return None
    found = list(var) if isinstance(var, list | tuple) else [var]
    if len(found) == 1:
        return found * length
    if len(found) != length:
        raise ConfigError(f"List {found} must be length {length} (found: {len(found)})")
    return found


def model_type(kind: type[Any], width: int) -> Any:
    """Return the type of a column of results: that of the label, or a vector.

    Args:
        kind: the label's, see `_get_metadata`.
        width: how many numbers a row of the model's output has.
    """
    is_vector = kind in (DenseVector, SparseVector, VectorUDT, ArrayType) or width != 1
    return VectorUDT() if is_vector else kind()
