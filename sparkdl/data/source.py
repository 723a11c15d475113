"""The data source `tfrecord`, with which Spark reads and writes TFRecord files.

A write is atomic: all of its files appear, or none:

1. The driver makes a hidden folder `_staging-…` within the folder that is written to.
2. Each task writes a file of its own there. The driver never renames files of failed or repeated
   tasks.
3. The driver renames the files of successful tasks into the folder. If one cannot be renamed, it
   deletes the renamed ones.
4. To overwrite, the driver now removes the previous files; `_SUCCESS` comes last.

https://spark.apache.org/docs/latest/api/python/tutorial/sql/python_data_source.html
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from pyspark import TaskContext
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from sparkdl.control.rows import Storage
from sparkdl.core.errors import ConfigError, WriteError
from sparkdl.data.columns import Column, arrow_schema, columns_of
from sparkdl.data.examples import decode, encode
from sparkdl.data.files import DataFile, Options, find, options_of, read_file
from sparkdl.data.framing import AUTO, NONE, SUFFIXES, frame
from sparkdl.data.infer import Rules, add_up, see_file, whole_schema
from sparkdl.spark_versions import datasource
from sparkdl.storage.systems import locate, open_storage

_INFER_THREADS = 8
_SUCCESS = "_SUCCESS"
_FAILURES = (OSError, pa.ArrowException)


class TFRecordDataSource(datasource.DataSource):
    """TFRecord files of `Example`, for `spark.dataSource.register`.

    `docs/tfrecords.md` has the options and the table of types.
    """

    @classmethod
    def name(cls) -> str:
        """Return what `format` takes."""
        return "tfrecord"

    def schema(self) -> StructType:
        """Return the schema of all files, or of the first `inferRecords` records of each.

        Raises:
            ConfigError: see `find`, `Rules.schema` and `whole_schema`.
            ReadError: if a file cannot be read or is damaged.
        """
        options = options_of(self.options)
        data = find(options)
        look = partial(see_file, data.storage, options=options)
        pool = ThreadPoolExecutor(_INFER_THREADS, "sparkdl-tfrecord-schema")
        try:
            seen = add_up(pool.map(look, [file.path for file in data.files]))
        finally:
            # A file that fails ends the look at once; the others need not be read.
            pool.shutdown(cancel_futures=True)
        return from_arrow_schema(whole_schema(Rules(), seen, data.partitions, options))

    def reader(self, schema: StructType) -> datasource.DataSourceReader:
        """Return what reads the columns of `schema`.

        Raises:
            ConfigError: for an option or a type that there is not.
        """
        return _Reader(options_of(self.options), arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> datasource.DataSourceArrowWriter:
        """Return what writes rows of `schema`; makes the folder.

        Raises:
            ConfigError: for an unknown option or type, or a folder that cannot be written to.
        """
        options = options_of(self.options)
        if len(options.paths) > 1:
            raise ConfigError(f"save to one folder, not to {', '.join(options.paths)}")
        columns = columns_of(arrow_schema(schema))
        to = Destination.at(options.paths[0], dict(options.storage))
        to.begin()
        return _Writer(to, columns, options, overwrite)


@dataclass(frozen=True)
class _Reader(datasource.DataSourceReader):
    """Reads the columns of `schema`: from features, or from the names of folders."""

    options: Options
    schema: pa.Schema

    def partitions(self) -> list[datasource.InputPartition]:
        """Return a partition for each file; files are not split."""
        data = find(self.options)
        self._own(data.partitions.names)  # whose types are checked here, before anything is read
        return [datasource.InputPartition(file) for file in data.files]

    def read(self, partition: datasource.InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file."""
        if partition is None or partition.value is None:  # Spark's, for no partition at all
            return
        file: DataFile = partition.value
        columns = self._own(file.values)
        for chunk in read_file(self._storage, file.path, self.options.compression):
            found = decode(chunk, columns)
            arrays = dict(zip((column.name for column in columns), found, strict=True))
            for name in self.schema.names:
                if name not in arrays:
                    arrays[name] = self._constant(name, file.values[name], len(chunk.records))
            batch = [arrays[name] for name in self.schema.names]
            yield pa.RecordBatch.from_arrays(batch, schema=self.schema)

    @property
    def _storage(self) -> Storage:
        return locate(self.options.paths[0], dict(self.options.storage))[0]

    def _own(self, partitions: Any) -> tuple[Column, ...]:
        """Return the columns that are features."""
        own = [each for each in self.schema if each.name not in partitions]
        return columns_of(pa.schema(own))

    def _constant(self, name: str, value: str | None, count: int) -> pa.Array:
        kind = self.schema.field(name).type
        try:
            scalar = pc.cast(pa.scalar(value, pa.string()), kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ConfigError(
                f"folders give the column {name!r} the value {value!r}, which is no {kind}. Give "
                "it another type in the schema"
            ) from error
        return pa.repeat(scalar, count)


@dataclass(frozen=True)
class Written(datasource.WriterCommitMessage):
    """The name of the file of one task; None if it had no rows."""

    name: str | None


@dataclass(frozen=True)
class _Writer(datasource.DataSourceArrowWriter):
    """Writes a file for each task that has rows."""

    to: Destination
    columns: tuple[Column, ...]
    options: Options
    is_overwrite: bool

    def write(self, iterator: Iterator[pa.RecordBatch]) -> datasource.WriterCommitMessage:
        """Write the rows of a task."""
        batches = (batch for batch in iterator if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return Written(None)
        context = TaskContext.get()
        number = context.partitionId() if context else 0
        compression = NONE if self.options.compression == AUTO else self.options.compression
        with self.to.part(number, compression) as (name, file):
            self._write(file, first)
            for batch in batches:
                self._write(file, batch)
        return Written(name)

    def _write(self, file: Any, batch: pa.RecordBatch) -> None:
        file.write(frame(encode(batch, self.columns)))

    def commit(self, messages: list[datasource.WriterCommitMessage | None]) -> None:
        """Make the tasks' files the folder's."""
        written = [message.name for message in messages if isinstance(message, Written)]
        self.to.commit([name for name in written if name], self.is_overwrite)

    def abort(self, messages: list[datasource.WriterCommitMessage | None]) -> None:
        """Remove the written files; the previous ones stay."""
        self.to.abort()


@dataclass(frozen=True)
class Destination:
    """A folder, and the hidden one in it that files are first written to.

    Attributes:
        folder: within the storage, as is `staging`.
    """

    storage: Storage
    folder: str
    staging: str

    @classmethod
    def at(cls, path: str, options: dict[str, Any]) -> Destination:
        """Return the destination `path`; nothing is made yet.

        Raises:
            ConfigError: for a storage that there is not, or a pattern.
        """
        storage, folder = locate(path, options)
        return cls(storage, folder, f"{folder}/_staging-{uuid.uuid4().hex}")

    def begin(self) -> None:
        """Make the folders. Runs in the driver, first.

        Raises:
            ConfigError: if there is a file of that name, or folders cannot be made.
        """
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
    def part(self, number: int, compression: str) -> Iterator[tuple[str, Any]]:
        """Open a new file of a task; it is removed again if the block fails. Runs in tasks.

        Args:
            number: of the partition, for the file's name.

        Raises:
            WriteError: if it cannot be written.
        """
        # A repeated or speculative task has the same number.
        name = f"part-{number:05}-{uuid.uuid4().hex}.tfrecord{SUFFIXES[compression]}"
        system, path = open_storage(self.storage), f"{self.staging}/{name}"
        try:
            packed = None if compression == NONE else compression
            with system.open_output_stream(path, compression=packed) as sink:
                yield name, sink
        except BaseException as error:
            with suppress(*_FAILURES):
                system.delete_file(path)
            if isinstance(error, _FAILURES):
                raise WriteError(f"{path} cannot be written: {error}") from error
            raise

    def commit(self, names: Sequence[str], is_overwrite: bool) -> None:
        """Make the files of these names the folder's, or its only ones. Runs in the driver.

        Raises:
            WriteError: if one cannot be moved, and then none is; or if old ones cannot be removed.
        """
        system = open_storage(self.storage)
        # Listed before the move, after which old files could not be told from new ones.
        old = self._present(system) if is_overwrite else []
        self._move(system, names)
        try:
            _delete(system, old)
            system.delete_dir(self.staging)
            # Last, as Hadoop's committers do: its presence says that the write is complete.
            with system.open_output_stream(f"{self.folder}/{_SUCCESS}", compression=None):
                pass
        except _FAILURES as error:
            raise WriteError(
                f"{self.folder}: the new files are complete, but the previous files could "
                f"not all be removed: {error}. Remove them: they have other names"
            ) from error

    def abort(self) -> None:
        """Remove the files that tasks have written. Runs in the driver.

        Raises:
            WriteError: if that fails; readers ignore the remaining files.
        """
        try:
            open_storage(self.storage).delete_dir(self.staging)
        # Spark also calls this after a failed `commit`, which may have removed it.
        except FileNotFoundError:
            return
        except _FAILURES as error:
            raise WriteError(f"{self.staging} could not be removed: {error}") from error

    def _present(self, system: pafs.FileSystem) -> list[pafs.FileInfo]:
        """Return the entries of the folder before the write."""
        infos = system.get_file_info(pafs.FileSelector(self.folder))
        own = self.staging.rpartition("/")[2]
        return [info for info in infos if info.base_name != own]

    def _move(self, system: pafs.FileSystem, names: Iterable[str]) -> None:
        moved: list[str] = []
        try:
            for name in names:
                system.move(f"{self.staging}/{name}", f"{self.folder}/{name}")
                moved.append(name)
        except _FAILURES as error:
            # Deleted, because Spark aborts the write and removes the rest, too.
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


def _delete(system: pafs.FileSystem, infos: Iterable[pafs.FileInfo]) -> None:
    for info in infos:
        if info.type == pafs.FileType.Directory:
            system.delete_dir(info.path)
        else:
            system.delete_file(info.path)
