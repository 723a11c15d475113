"""TFRecord files as DataFrames, with any version of Spark.

A write is atomic: all of its files appear, or none:

1. The driver makes a hidden folder `_staging-…` within the folder that is written to.
2. Each task writes a file of its own there. The driver never renames files of failed or repeated
   tasks.
3. The driver renames the files of successful tasks into the folder. If one cannot be renamed, it
   deletes the renamed ones. `_SUCCESS` comes last.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from sparkdl.control.rows import Storage
from sparkdl.core.errors import ConfigError, WriteError
from sparkdl.core.jobs import named_jobs
from sparkdl.data.examples import Column, arrow_schema, columns_of, decode, encode
from sparkdl.data.framing import find, frame, read_file
from sparkdl.data.infer import infer_schema
from sparkdl.spark_versions import declared_type
from sparkdl.storage.systems import locate, open_storage

_SUCCESS = "_SUCCESS"
_FAILURES = (OSError, pa.ArrowException)


def read_tfrecords(
    spark: SparkSession,
    path: str | Sequence[str],
    schema: StructType | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> DataFrame:
    """Return the records of TFRecord files as a DataFrame, a partition for each file.

    Args:
        path: folders, files or patterns.
        schema: by default the result of `infer_schema`; a job then reads all files once.
        storage_options: arguments of the storage's class in `pyarrow.fs`.

    Raises:
        ConfigError: for an unknown type, a schema that Spark cannot read, or a missing path.
    """
    paths = [path] if isinstance(path, str) else list(path)
    if schema is None:
        schema = infer_schema(spark, paths, storage_options)
    failed, example = f"schema={schema!r} is no schema of Spark", "'id bigint, x array<float>'"
    kind = declared_type(schema, failed, example) if isinstance(schema, str) else schema
    if not isinstance(kind, StructType):
        raise ConfigError(f"{failed}. Write it like {example}")
    arrow = arrow_schema(kind)
    columns_of(arrow)  # whose types are checked here, before anything is read
    storage, files = find(paths, storage_options or {})
    numbers = spark.range(0, len(files), 1, max(len(files), 1))
    return numbers.mapInArrow(_Read(storage, tuple(files), arrow), kind)


@dataclass(frozen=True)
class _Read:
    storage: Storage
    files: tuple[str, ...]
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        columns = columns_of(self.schema)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for chunk in read_file(self.storage, self.files[number]):
                    found = decode(chunk, columns)
                    yield pa.RecordBatch.from_arrays(found, schema=self.schema)


def write_tfrecords(
    frame: DataFrame, path: str, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Write a DataFrame as TFRecord files, one for each task that has rows: all appear, or none.

    Args:
        path: a folder, whose other files stay.
        storage_options: arguments of the storage's class in `pyarrow.fs`.

    Raises:
        ConfigError: for an unknown type, or a place that cannot be written to.
        WriteError: if the files cannot be moved into the folder.
    """
    columns = columns_of(arrow_schema(frame.schema))
    to = Destination.at(path, dict(storage_options or {}))
    to.begin()
    numbered = frame.toDF(*(f"c{index}" for index in range(len(frame.columns))))  # no dots
    try:
        with named_jobs(frame.sparkSession, "sparkdl", "write TFRecords"):
            rows = numbered.mapInArrow(_Write(to, columns), "name string").collect()
        to.commit([row.name for row in rows])
    except BaseException:
        # An interrupt too: the tasks' files would stay in the hidden folder.
        to.abort()
        raise


@dataclass(frozen=True)
class _Write:
    to: Destination
    columns: tuple[Column, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        batches = (batch for batch in batches if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return
        context = TaskContext.get()
        with self.to.part(context.partitionId() if context else 0) as (name, file):
            file.write(frame(encode(first, self.columns)))
            for batch in batches:
                file.write(frame(encode(batch, self.columns)))
        yield pa.record_batch({"name": pa.array([name])})


@dataclass(frozen=True)
class Destination:
    """A folder of the storage, and the hidden one in it that files are first written to."""

    storage: Storage
    folder: str
    staging: str

    @classmethod
    def at(cls, path: str, options: dict[str, Any]) -> Destination:
        storage, folder = locate(path, options)
        return cls(storage, folder, f"{folder}/_staging-{uuid.uuid4().hex}")

    def begin(self) -> None:
        """Make the folders. Runs in the driver, first."""
        system = open_storage(self.storage)
        try:
            if system.get_file_info(self.folder).type == pafs.FileType.File:
                raise ConfigError(f"{self.folder} is a file: save to a folder")
            system.create_dir(self.staging, recursive=True)
        except _FAILURES as error:
            raise ConfigError(
                f"{self.folder} cannot be written to: {error}. Give a folder that the driver and "
                "all executors may write to"
            ) from error

    @contextmanager
    def part(self, number: int) -> Iterator[tuple[str, Any]]:
        """Open a new file of a task; it is removed again if the block fails. Runs in tasks."""
        # A repeated or speculative task has the same number.
        name = f"part-{number:05}-{uuid.uuid4().hex}.tfrecord"
        system, path = open_storage(self.storage), f"{self.staging}/{name}"
        try:
            with system.open_output_stream(path, compression=None) as sink:
                yield name, sink
        except BaseException as error:
            with suppress(*_FAILURES):
                system.delete_file(path)
            if isinstance(error, _FAILURES):
                raise WriteError(f"{path} cannot be written: {error}") from error
            raise

    def commit(self, names: Sequence[str]) -> None:
        """Move the files of these names into the folder. Runs in the driver."""
        system = open_storage(self.storage)
        moved: list[str] = []
        try:
            for name in names:
                system.move(f"{self.staging}/{name}", f"{self.folder}/{name}")
                moved.append(name)
        except _FAILURES as error:
            for name in moved:
                with suppress(*_FAILURES):
                    system.delete_file(f"{self.folder}/{name}")
            hint = (
                ". The executors wrote files that the driver does not see: write to a storage "
                "that all share"
                if isinstance(error, FileNotFoundError)
                else ""
            )
            raise WriteError(f"{self.folder}: nothing was written: {error}{hint}") from error
        try:
            system.delete_dir(self.staging)
            # Last, as Hadoop's committers do: its presence says that the write is complete.
            with system.open_output_stream(f"{self.folder}/{_SUCCESS}", compression=None):
                pass
        except _FAILURES as error:
            raise WriteError(
                f"{self.folder}: all rows are written, but {self.staging} was not deleted or "
                f"{_SUCCESS} not created: {error}. Delete the first, create the second, empty"
            ) from error

    def abort(self) -> None:
        """Remove the files that tasks have written. Runs in the driver."""
        try:
            open_storage(self.storage).delete_dir(self.staging)
        # After a failed `commit`, which may have removed it.
        except FileNotFoundError:
            return
        except _FAILURES as error:
            raise WriteError(f"{self.staging} could not be removed: {error}") from error
