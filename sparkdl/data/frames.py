"""TFRecord files as DataFrames without a data source, which Spark 3.5 cannot have in Python.

The same reader and writer as of the data source, in tasks of `mapInArrow`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from sparkdl.core.errors import ConfigError
from sparkdl.core.jobs import named_jobs
from sparkdl.data.infer import infer_schema
from sparkdl.data.source import TFRecordDataSource, Written
from sparkdl.spark_versions import parsed_type


def read_tfrecords(
    spark: SparkSession,
    path: str | Sequence[str],
    schema: StructType | str | None = None,
    **options: str,
) -> DataFrame:
    """Return the records of TFRecord files as a DataFrame, with any version of Spark.

    Args:
        path: folders, files or patterns.
        schema: by default the result of `infer_schema`; a job then reads all files once.
        options: as for `spark.read`, see `docs/tfrecords.md`.

    Raises:
        ConfigError: for an unknown option or type, or a missing path.
    """
    paths = [path] if isinstance(path, str) else list(path)
    if schema is None:
        schema = infer_schema(spark, paths, **options)
    kind: Any = parsed_type(schema) if isinstance(schema, str) else schema
    reader = TFRecordDataSource({"paths": json.dumps(paths), **options}).reader(kind)
    parts = reader.partitions()
    numbers = spark.range(0, len(parts), 1, max(len(parts), 1))
    return numbers.mapInArrow(partial(_read, reader, parts), kind)


def write_tfrecords(frame: DataFrame, path: str, mode: str = "append", **options: str) -> None:
    """Write a DataFrame as TFRecord files, with any version of Spark: all appear, or none.

    Args:
        mode: `append`, or `overwrite` for a folder that is to hold nothing else.
        options: as for `df.write`, see `docs/tfrecords.md`.

    Raises:
        ConfigError: for an unknown option, type or mode, or a place that cannot be written to.
        WriteError: if the files cannot be made the folder's.
    """
    if mode not in ("append", "overwrite"):
        raise ConfigError(f"mode={mode!r} must be 'append' or 'overwrite'")
    source = TFRecordDataSource({"path": path, **options})
    writer = source.writer(frame.schema, mode == "overwrite")
    numbered = frame.toDF(*(f"c{place}" for place in range(len(frame.columns))))  # no dots
    try:
        with named_jobs(frame.sparkSession, "sparkdl", "write TFRecords"):
            rows = numbered.mapInArrow(partial(_write, writer), "name string").collect()
    except BaseException:
        # An interrupt too: the tasks' files would stay in the hidden folder.
        writer.abort([])
        raise
    writer.commit([Written(row.name) for row in rows])


def _read(
    reader: Any, parts: Sequence[Any], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield from reader.read(parts[number])


def _write(writer: Any, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch({"name": pa.array([writer.write(batches).name], pa.string())})
