"""The Parquet files behind a DataFrame that only scans them, as a source for the nodes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, StructField, StructType

from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.plan import (
    PlannedScan,
    check_shape,
    find_scan,
    getter,
    items,
    texts,
)
from sparkdl.driver.executors.scored import arrow_schema, distinct_columns
from sparkdl.driver.executors.sessions import is_true
from sparkdl.storage.parquet.scan import Scan, ScannedColumn, ScannedFile, source_of
from sparkdl.storage.parquet.source import ParquetSource

_log = logging.getLogger(__name__)
_DATASOURCES = "org.apache.spark.sql.execution.datasources"
_LISTING = f"{_DATASOURCES}.InMemoryFileIndex"
"""Other indexes list files again, or skip some of their rows, as Delta's do."""
_OPTIONS = {
    *("path", "paths", "basepath", "mergeschema", "recursivefilelookup", "pathglobfilter"),
    *("modifiedbefore", "modifiedafter", "compression", "serialization.format"),
    *("ignorecorruptfiles", "ignoremissingfiles"),
}
"""Options that affect the choice of files and columns, but no value."""
_REFUSED_SETTINGS = {
    "spark.sql.parquet.int96TimestampConversion": "timestamps of files of Impala are moved",
    "spark.sql.execution.arrow.useLargeVarTypes": "strings have 64-bit offsets",
}
_REBASES = (
    "spark.sql.parquet.datetimeRebaseModeInRead",
    "spark.sql.parquet.int96RebaseModeInRead",
)


def scanned_files(data: Any, is_local: bool) -> ParquetSource:
    """Return the files of a DataFrame's rows, to be read by nodes as they are now.

    Nodes can read the files if Spark's plan only scans plain Parquet files; it may choose and
    rename columns. The nodes then read the same rows as Spark, in the same order. This reads the
    files' footers; it starts no job.
    """
    if not hasattr(data, "mapInArrow"):
        raise ConfigError(f"a {type(data).__name__} is no DataFrame")
    if not hasattr(data, "_jdf"):
        raise ConfigError("Spark Connect does not say where its rows come from")
    if data.isStreaming:
        raise ConfigError("it is a stream")
    try:
        return source_of(_scan(data, is_local))
    except ConfigError:
        raise
    except Exception as error:  # of py4j: another Spark has other plans
        _log.debug("A plan could not be read", exc_info=True)
        raise ConfigError(f"its plan cannot be read: {error}") from error


def _scan(data: DataFrame, is_local: bool) -> Scan:
    check_shape(data._jdf.queryExecution().analyzed())
    distinct_columns(data)
    # The alias forces a new plan: the DataFrame's own ignores data cached since it was made.
    plan = data.alias("fed")._jdf.queryExecution().optimizedPlan()
    found = find_scan(data, plan, range(len(data.columns)), is_local)
    if found.is_filtered:
        raise ConfigError("its rows pass a filter")
    _check_for_nodes(data, found)
    zone = str(data.sparkSession.conf.get("spark.sql.session.timeZone"))
    columns = tuple(
        ScannedColumn(
            *(origin.name, found.stored_as(origin), _arrow_type(shown.dataType, zone)),
            origin.refuses_nulls,
        )
        for origin, shown in zip(found.origins, data.schema.fields, strict=True)
    )
    modes = tuple(str(data.sparkSession.conf.get(name)) for name in _REBASES)
    return Scan(tuple(_files(data.sparkSession, found)), columns, (modes[0], modes[1]))


def _check_for_nodes(frame: DataFrame, found: PlannedScan) -> None:
    relation, settings = found.relation, frame.sparkSession.conf
    if (listing := relation.location().getClass().getName()) != _LISTING:
        raise ConfigError(f"its files are listed by {listing}")
    if relation.bucketSpec().isDefined():
        raise ConfigError("its files are buckets")
    # Spark ignores the case of an option's name.
    names = [str(name) for name in items(relation.options().keys().toSeq())]
    if others := sorted(name for name in names if name.lower() not in _OPTIONS):
        raise ConfigError(f"it is read with the option {others[0]}")
    for name, why in _REFUSED_SETTINGS.items():
        if is_true(settings.get(name, "false")):
            raise ConfigError(f"{name} is set: {why}")
    hadoop = frame.sparkSession.sparkContext._jsc.hadoopConfiguration()
    if hadoop.get("parquet.crypto.factory.class"):
        raise ConfigError("its files may be encrypted")


def _files(session: Any, found: PlannedScan) -> Iterator[ScannedFile]:
    """Yield the files as Spark listed them when the DataFrame was made."""
    none = session._jvm.PythonUtils.toSeq([])
    directories = found.relation.location().listFiles(none, none)
    # `flatMap` of iterators: a collection's also takes a CanBuildFrom in Spark 3.5's Scala.
    each = getter(session, f"{_DATASOURCES}.PartitionDirectory", "files")
    files = directories.iterator().flatMap(each).toList()
    # Not a call of py4j for each file, which takes seconds for 10,000 files.
    status = f"{_DATASOURCES}.FileStatusWithMetadata"
    names = ("getPath", "getLen", "getModificationTime")
    found_by_name = (texts(session, files, status, name) for name in names)
    for path, nbytes, modified_ms in zip(*found_by_name, strict=True):
        yield ScannedFile(path, int(nbytes), int(modified_ms))


def _arrow_type(kind: DataType, zone: str) -> pa.DataType:
    return arrow_schema(StructType([StructField("x", kind)]), zone).field(0).type
