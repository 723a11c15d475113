"""Petastorm's converter: a DataFrame written to Parquet, and read by processes that train.

https://petastorm.readthedocs.io/en/latest/api.html#petastorm.spark.spark_dataset_converter.make_spark_converter
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import time
import uuid
from collections import namedtuple
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow.fs as pafs

from sparkdl.core.errors import ConfigError, WriteError
from sparkdl.core.files import absolute_url
from sparkdl.driver.executors.sessions import active_session, default_fs
from sparkdl.petastorm.reader import rank_and_size, read_batches
from sparkdl.storage.parquet.source import ParquetSource, list_files
from sparkdl.storage.systems import locate, open_storage
from sparkdl.values.columns import Columns

if TYPE_CHECKING:
    import tensorflow as tf
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructField
    from torch.utils.data import DataLoader

__all__ = ["SparkDatasetConverter", "make_spark_converter"]

_log = logging.getLogger(__name__)
_ROW_GROUP_NBYTES = 32 * 1024 * 1024
_THREADS = 4
_OPTIONS = {
    "cur_shard": None,
    "seed": None,
    "shard_count": None,
    "shuffle_row_groups": True,
    "transform_spec": None,
}
"""Options of Petastorm's `make_batch_reader`, with their defaults."""
_ACCEPTED = ("convert_early_to_numpy", "hdfs_driver", "reader_pool_type", "results_queue_size")
"""Without effect here: how Petastorm's own reader works."""


@dataclass(frozen=True)
class SparkDatasetConverter:
    """Rows in Parquet files; it can be pickled, and used in processes on any host.

    Made by `make_spark_converter`. `len(converter)` is the number of rows.

    Attributes:
        cache_dir_url: folder of the files.
        source: the files and their schema.
        is_own: whether they were written by this converter, so that `delete` may remove them.
    """

    PARENT_CACHE_DIR_URL_CONF: ClassVar[str] = "petastorm.spark.converter.parentCacheDirUrl"
    cache_dir_url: str
    source: ParquetSource = field(repr=False)
    is_own: bool = True

    def __len__(self) -> int:
        return self.source.num_rows

    @contextmanager
    def make_tf_dataset(
        self,
        batch_size: int | None = None,
        prefetch: int | None = None,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int | None = None,
        **petastorm_reader_kwargs: Any,
    ) -> Iterator[tf.data.Dataset]:
        """Return a context manager, which opens this process's rows as a `tf.data.Dataset`.

        Args:
            batch_size: rows of a batch; by default 32.
            prefetch: batches that are made ready; by default TensorFlow chooses.
            num_epochs: how often the rows are read; by default without end. Batches go over the
                ends of epochs, and the last one may be smaller.
            workers_count: threads that apply `transform_spec`; by default 4.
            shuffling_queue_capacity: shuffle within this many rows.
            petastorm_reader_kwargs: `cur_shard` and `shard_count`, by default those of the
                process: of its node, or as Horovod, MPI or torchrun say; `cur_shard=0,
                shard_count=1` reads all rows. `seed`, `shuffle_row_groups` (True),
                `transform_spec`.

        Returns:
            Elements are named tuples of all columns: tensors `[rows, …]`.

        Raises:
            TypeError: for an unknown argument.
            ConfigError: for an argument that cannot work, or if this shard has no rows.
            ReadError: if a file cannot be read.
            FeedTypeError: if a column cannot be a tensor.
        """
        import tensorflow as tf

        from sparkdl.datasets.tensorflow import spec_of, tensors

        common = (batch_size or 32, num_epochs, workers_count, shuffling_queue_capacity)
        read = self._reader(*common, petastorm_reader_kwargs)
        # A reading of its own for the types, so that the dataset begins at the first row.
        with closing(read()) as sample:
            first = next(sample)
        row = namedtuple("Row", first, rename=True)  # type: ignore[misc] # columns of the data
        specs = {name: spec_of(name, column, None) for name, column in first.items()}
        dataset = tf.data.Dataset.from_generator(
            lambda: (row(*tensors(columns, specs).values()) for columns in read()),
            output_signature=row(*specs.values()),
        )
        options = tf.data.Options()  # each process reads its own shard already
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        yield dataset.with_options(options).prefetch(prefetch or tf.data.AUTOTUNE)

    @contextmanager
    def make_torch_dataloader(
        self,
        batch_size: int = 32,
        num_epochs: int | None = None,
        workers_count: int | None = None,
        shuffling_queue_capacity: int = 0,
        **petastorm_reader_kwargs: Any,
    ) -> Iterator[DataLoader[Any]]:
        """Return a context manager, which opens this process's rows as a `DataLoader` of PyTorch.

        Args:
            batch_size, num_epochs, workers_count, shuffling_queue_capacity,
                petastorm_reader_kwargs: see `make_tf_dataset`.

        Returns:
            Batches are dicts of tensors `[rows, …]`, strings lists.

        Raises:
            ConfigError, ReadError, FeedTypeError: see `make_tf_dataset`.
        """
        from torch.utils.data import DataLoader, IterableDataset, get_worker_info

        from sparkdl.datasets.torch import tensors_of

        common = (batch_size, num_epochs, workers_count, shuffling_queue_capacity)
        read = self._reader(*common, petastorm_reader_kwargs)

        class Batches(IterableDataset):  # type: ignore[misc] # imported late
            def __iter__(self) -> Iterator[dict[str, Any]]:
                if get_worker_info() is not None:
                    raise ConfigError(
                        "each worker of a loader would read all rows: use num_workers=0"
                    )
                return map(tensors_of, read())

        yield DataLoader(Batches(), batch_size=None)

    def delete(self) -> None:
        """Delete the files; does nothing if they have been deleted.

        Raises:
            ConfigError: if this converter has not written them.
            WriteError: if they cannot be deleted.
        """
        if not self.is_own:
            raise ConfigError(
                f"{self.cache_dir_url} was not written by this converter, and delete() removes "
                "only files that it has written; delete the folder yourself"
            )
        try:
            _delete_if_there(self.cache_dir_url)
        except OSError as error:
            raise WriteError(f"{self.cache_dir_url} cannot be deleted: {error}") from error

    def _reader(
        self,
        batch_size: int,
        epochs: int | None,
        threads: int | None,
        window: int | None,
        given: dict[str, Any],
    ) -> Callable[[], Generator[Columns, None, None]]:
        """Return what reads this process's batches, from their beginning."""
        options = {**_OPTIONS, **given}
        for name in given.keys() - _OPTIONS.keys() - set(_ACCEPTED):
            raise TypeError(
                f"a converter got an unexpected keyword argument {name!r}. It takes "
                f"{', '.join(_OPTIONS)}; select and filter rows and columns in the DataFrame"
            )
        for name, value in (("batch_size", batch_size), ("num_epochs", epochs)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        shard = _shard(options["cur_shard"], options["shard_count"])
        most = (batch_size, epochs, window or 0, threads or _THREADS)
        return partial(read_batches, self.source, shard, *most, options)


def make_spark_converter(
    df: DataFrame | str | PurePath,
    parquet_row_group_size_bytes: int = _ROW_GROUP_NBYTES,
    dtype: str | None = "float32",
) -> SparkDatasetConverter:
    """Write a DataFrame to Parquet files, and return a converter that reads them while training.

    The files are in a new folder within the folder that Spark's setting
    `petastorm.spark.converter.parentCacheDirUrl` names, a URL that the driver and all processes
    reach. They are deleted by `delete()`, or as the program ends. Vectors are written as arrays.

    Args:
        df: the DataFrame, or the path or URL of a folder of Parquet files, which is read in
            place. A path without a scheme is on Spark's default file system.
        parquet_row_group_size_bytes: of the files that are written.
        dtype: of floats, also in arrays and vectors: `float32`, `float64`, or `None` to leave them
            (vectors are `float64`).

    Raises:
        ConfigError: for arguments that cannot work, if the setting is missing, or is no URL.
        WriteError: if the driver does not find Spark's files in the folder.
    """
    if dtype not in ("float32", "float64", None):
        raise ConfigError(f"dtype={dtype!r}: must be 'float32', 'float64' or None")
    if isinstance(df, (str, PurePath)):
        spark = active_session()
        root = default_fs(spark) if spark else "file://"
        url = absolute_url(str(df), root, os.getcwd())
        return SparkDatasetConverter(url, list_files(url), is_own=False)
    return _write(df, _parent_url(df.sparkSession), parquet_row_group_size_bytes, dtype)


def _parent_url(spark: SparkSession) -> str:
    conf = SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF
    parent = spark.conf.get(conf, None)
    if not parent:
        raise ConfigError(
            f"Spark's setting {conf} is missing: set it to the URL of a folder that the driver and "
            f"all processes reach, like spark.conf.set({conf!r}, 'file:///mnt/shared/cache')"
        )
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", parent):
        raise ConfigError(
            f"{conf}={parent!r}: a scheme-less directory url is no longer supported; write "
            "file:///… for a local folder"
        )
    locate(parent)  # raises for a storage that processes cannot read
    return str(parent).rstrip("/")


def _write(
    df: DataFrame, parent: str, group_nbytes: int, dtype: str | None
) -> SparkDatasetConverter:
    from pyspark.sql import Observation
    from pyspark.sql.functions import count, lit

    url = f"{parent}/{time.strftime('%Y%m%d%H%M%S')}-{uuid.uuid4()}"
    # Counted within the write, so that no further job reads the rows.
    seen = Observation()
    columns = [_converted(df, each, dtype) for each in df.schema.fields]
    observed = df.select(columns).observe(seen, count(lit(1)).alias("rows"))
    writer = observed.write.option("compression", "uncompressed")
    writer.option("parquet.block.size", group_nbytes).parquet(url)
    # Before the check below, so that files which fail it are deleted as well.
    atexit.register(_delete_at_exit, url)
    source = list_files(url)
    if source.num_rows != seen.get["rows"]:
        raise WriteError(
            f"Spark has written {seen.get['rows']} rows to {url}, and the driver finds "
            f"{source.num_rows}: the folder is not the same on all hosts. Set "
            f"{SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF} to a storage that all share"
        )
    return SparkDatasetConverter(url, source)


def _converted(df: DataFrame, column: StructField, dtype: str | None) -> Column:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql.types import ArrayType, DoubleType, FloatType

    floats = (DoubleType, FloatType)
    kind = column.dataType
    value = df[f"`{column.name.replace('`', '``')}`"]
    if type(kind).__name__ == "VectorUDT":  # of pyspark.ml, and of pyspark.mllib
        return vector_to_array(value, dtype or "float64").alias(column.name)
    wanted = FloatType() if dtype == "float32" else DoubleType()
    if dtype and isinstance(kind, floats):
        return value.cast(wanted).alias(column.name)
    if dtype and isinstance(kind, ArrayType) and isinstance(kind.elementType, floats):
        return value.cast(ArrayType(wanted, kind.containsNull)).alias(column.name)
    return value


def _delete_if_there(url: str) -> None:
    storage, path = locate(url)
    system = open_storage(storage)
    if system.get_file_info(path).type == pafs.FileType.Directory:
        system.delete_dir(path)


def _delete_at_exit(url: str) -> None:
    try:
        _delete_if_there(url)
    except Exception as error:  # noqa: BLE001 (the program ends; the log names the remaining files)
        _log.warning("%s cannot be deleted: %s. Delete it by hand", url, error)


def _shard(cur_shard: int | None, shard_count: int | None) -> tuple[int, int]:
    if cur_shard is None and shard_count is None:
        return rank_and_size()
    if cur_shard is None or shard_count is None or not 0 <= cur_shard < shard_count:
        raise ConfigError(
            f"cur_shard={cur_shard}, shard_count={shard_count}: give both or neither, and "
            "cur_shard from 0 to shard_count - 1"
        )
    return cur_shard, shard_count
