"""The data source `tfrecord`: what Spark calls to read and to write TFRecord files.

Runs in: driver, feeder

https://spark.apache.org/docs/latest/api/python/tutorial/sql/python_data_source.html
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from sparkdl.control.rows import Storage
from sparkdl.core.errors import ConfigError
from sparkdl.data.columns import Column, columns_of
from sparkdl.data.commit import Destination
from sparkdl.data.compression import AUTO, NONE
from sparkdl.data.decode import decode
from sparkdl.data.encode import encode
from sparkdl.data.files import DataFile, Options, find, options_of, read_file
from sparkdl.data.framing import frame
from sparkdl.data.infer import Rules, add_up, see_file, whole_schema
from sparkdl.data.types import arrow_schema, spark_schema
from sparkdl.storage import locate

_INFER_THREADS = 8


class TFRecordDataSource(DataSource):
    """TFRecord files of `Example` or `SequenceExample`, for `spark.dataSource.register`.

    `docs/tfrecords.md` has the options and the table of types.
    """

    @classmethod
    def name(cls) -> str:
        """Return what `format` takes."""
        return "tfrecord"

    def schema(self) -> StructType:
        """Return the schema of all files, or of the first `inferRecords` records of each.

        Raises:
            ConfigError: see `find`, `Rules.schema`, `add_up` and `whole_schema`.
            ReadError: if a file cannot be read or is damaged.
        """
        options = options_of(self.options)
        data = find(options)
        look = partial(see_file, data.storage, options=options)
        pool = ThreadPoolExecutor(_INFER_THREADS, "sparkdl-tfrecord-schema")
        try:
            seen = add_up(pool.map(look, [file.path for file in data.files]))
        finally:
            pool.shutdown(cancel_futures=True)
        return spark_schema(whole_schema(Rules(), seen, data.partitions, options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what reads the columns of `schema`.

        Raises:
            ConfigError: for an option or a type that there is not.
        """
        return _Reader(options_of(self.options), arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return what writes rows of `schema`; makes the folder.

        Raises:
            ConfigError: for an option or a type that there is not, or a place that cannot be
                written to.
        """
        options = options_of(self.options)
        if len(options.paths) > 1:
            raise ConfigError(f"save to one folder, not to {', '.join(options.paths)}")
        columns = columns_of(arrow_schema(schema), options.record_type)
        to = Destination.at(options.paths[0], dict(options.storage))
        to.begin()
        return _Writer(to, columns, options, overwrite)


@dataclass(frozen=True)
class _Reader(DataSourceReader):
    """Reads the columns of `schema`: from features, or from the names of folders."""

    options: Options
    schema: pa.Schema

    def partitions(self) -> list[InputPartition]:
        """Return a partition for each file; files are not split."""
        data = find(self.options)
        self._own(data.partitions.names)  # whose types are checked here, before anything is read
        return [InputPartition(file) for file in data.files]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file."""
        if partition.value is None:  # Spark's, for no partition at all
            return
        file: DataFile = partition.value
        columns = self._own(file.values)
        chunks = read_file(self._storage, file.path, self.options.compression)
        for chunk in chunks:
            arrays = dict(
                zip(
                    [column.name for column in columns],
                    decode(chunk, columns, self.options.record_type),
                    strict=True,
                )
            )
            for name in self.schema.names:
                if name not in arrays:
                    arrays[name] = self._constant(name, file.values[name], len(chunk.starts))
            yield pa.RecordBatch.from_arrays(
                [arrays[name] for name in self.schema.names], schema=self.schema
            )

    @property
    def _storage(self) -> Storage:
        return locate(self.options.paths[0], dict(self.options.storage))[0]

    def _own(self, partitions: Any) -> tuple[Column, ...]:
        """Return the columns that are features."""
        own = [each for each in self.schema if each.name not in partitions]
        return columns_of(pa.schema(own), self.options.record_type)

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
class _Written(WriterCommitMessage):
    """The name of the file of one task; None if it had no rows."""

    name: str | None


@dataclass(frozen=True)
class _Writer(DataSourceArrowWriter):
    """Writes a file for each task that has rows."""

    to: Destination
    columns: tuple[Column, ...]
    options: Options
    is_overwrite: bool

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of a task."""
        batches = (batch for batch in iterator if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return _Written(None)
        context = TaskContext.get()
        number = context.partitionId() if context else 0
        compression = NONE if self.options.compression == AUTO else self.options.compression
        with self.to.part(number, compression) as (name, file):
            self._write(file, first)
            for batch in batches:
                self._write(file, batch)
        return _Written(name)

    def _write(self, file: Any, batch: pa.RecordBatch) -> None:
        file.write(frame(encode(batch, self.columns, self.options.record_type)))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the tasks' files the folder's."""
        written = [message.name for message in messages if isinstance(message, _Written)]
        self.to.commit([name for name in written if name], self.is_overwrite)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove what was written; what was there before stays."""
        self.to.abort()
