"""The Parquet files of a scan planned by Spark, as a source of the same rows.

Runs in: driver

Spark lists the files and the types of their columns. This module checks in the files' footers that
Arrow reads exactly the same values, and refuses the scan wherever that is uncertain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from sparkdl.control.rows import DataFile
from sparkdl.core.errors import ConfigError
from sparkdl.storage.parquet.source import (
    INT96_UNIT,
    ParquetSource,
    read_footers,
    row_nbytes,
    spark_type,
)
from sparkdl.storage.systems import is_unchanged, locate, open_storage

_VERSION = b"org.apache.spark.version"
_CORRECTED = "CORRECTED"
_PLAIN = (
    *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.float32(), pa.float64(), pa.date32()),
)


@dataclass(frozen=True)
class ScannedFile:
    """A file as Spark has listed it.

    Attributes:
        path: with its scheme, not URL-encoded.
        modified_ms: when it had been modified last, since 1970.
    """

    path: str
    nbytes: int
    modified_ms: int


@dataclass(frozen=True)
class ScannedColumn:
    """A column of the scan.

    Attributes:
        stored_as: its name in the files.
        kind: its type, as Spark reads it from there.
        refuses_nulls: a null in it is an error.
    """

    name: str
    stored_as: str
    kind: pa.DataType
    refuses_nulls: bool = False


@dataclass(frozen=True)
class Scan:
    """The files that Spark would read.

    Attributes:
        rebases: Spark's conversion of dates and timestamps in files without a note of the writer's
            calendar: `(for all but INT96, for INT96)`, as values of
            `spark.sql.parquet.datetimeRebaseModeInRead`.
    """

    files: tuple[ScannedFile, ...]
    columns: tuple[ScannedColumn, ...]
    rebases: tuple[str, str] = (_CORRECTED, _CORRECTED)


@dataclass(frozen=True)
class _Found:
    row_groups: tuple[int, ...]
    row_nbytes: int


def source_of(scan: Scan) -> ParquetSource:
    """Return a source of the scan's rows; reads the footers, several at a time.

    Raises:
        ConfigError: if Arrow's values may differ from Spark's: a file has changed since Spark
            listed it; a column is missing, ambiguous, or of another type; Arrow and Spark read its
            type differently. Also if the storage is not supported, a footer cannot
            be read, or there are no rows.
    """
    names = [column.name for column in scan.columns]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"it has several columns {twice[0]!r}")
    located = [locate(file.path) for file in scan.files]
    storages = {storage.uri: storage for storage, _ in located}
    if len(storages) != 1:
        raise ConfigError("it has no files" if not located else "its files are in several storages")
    [storage] = storages.values()
    system = open_storage(storage)
    listed = {path: file for (_, path), file in zip(located, scan.files, strict=True)}
    if len(listed) < len(located):
        raise ConfigError("it reads a file twice")
    # Sorted, because the rows' numbers must not depend on the order of Spark's listing.
    paths = sorted(listed)
    found = read_footers(paths, partial(_read_footer, system, listed, scan))
    row_groups = tuple(footer.row_groups for footer in found)
    files = tuple(
        DataFile(path, footer.row_nbytes, (), file.nbytes)
        for path, footer, file in zip(paths, found, map(listed.get, paths), strict=True)
        if file is not None
    )
    source = ParquetSource(
        storage,
        pa.schema([(column.name, column.kind) for column in scan.columns]),
        (),
        files,
        row_groups,
        tuple(column.stored_as for column in scan.columns),
        tuple(column.name for column in scan.columns if column.refuses_nulls),
        # How the rows are numbered, independent of the files' names.
        hashlib.sha256(msgspec.json.encode(row_groups)).hexdigest()[:16],
    )
    if not source.num_rows:
        raise ConfigError("its files have no rows")
    return source


def _read_footer(
    system: pafs.FileSystem, listed: Mapping[str, ScannedFile], scan: Scan, path: str
) -> _Found:
    try:
        file = listed[path]
        if not is_unchanged(system, path, file.nbytes, file.modified_ms):
            raise ConfigError(f"{path} has changed since Spark has listed it")
        with pq.ParquetFile(
            path, filesystem=system, coerce_int96_timestamp_unit=INT96_UNIT
        ) as parquet:
            metadata, schema = parquet.metadata, parquet.schema_arrow
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    fields: dict[str, list[pa.Field]] = {}
    for field in schema:
        fields.setdefault(field.name.lower(), []).append(field)
    for column in scan.columns:
        if problem := _problem(column, fields, metadata, scan):
            raise ConfigError(f"its column {column.name!r} {problem} in {path}")
    names = {column.stored_as for column in scan.columns}
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return _Found(tuple(group.num_rows for group in groups), row_nbytes(metadata, names))


def _problem(
    column: ScannedColumn,
    fields: Mapping[str, list[pa.Field]],
    metadata: pq.FileMetaData,
    scan: Scan,
) -> str:
    """Return why the values of a column in a file need not be what Spark reads; empty if they are.

    The name must occur exactly, and no other name that differs in case only: Spark might read that
    column.

    Args:
        fields: of the file, by their names in lower case.
    """
    same = fields.get(column.stored_as.lower(), [])
    if [field.name for field in same] != [column.stored_as]:
        names = ", ".join(repr(field.name) for field in same)
        return f"is called {names}" if same else "is missing"
    kind = same[0].type
    if not is_read_as(kind, column.kind):
        return f"is {kind}, which Spark reads as {column.kind},"
    tags = metadata.metadata or {}
    for leaf in _leaves(kind):
        if not (pa.types.is_date(leaf) or pa.types.is_timestamp(leaf)):
            continue
        is_int96 = pa.types.is_timestamp(leaf) and leaf.unit == INT96_UNIT
        if not _is_corrected(tags, is_int96, scan.rebases[is_int96]):
            return "may have dates of the Julian calendar"
    return ""


def _is_corrected(tags: Mapping[bytes, bytes], is_int96: bool, mode: str) -> bool:
    """Whether Spark takes dates as they are, see its `DataSourceUtils.getRebaseSpec`."""
    since, legacy = (b"3.1.0", b"INT96") if is_int96 else (b"3.0.0", b"DateTime")
    # Another program wrote it: Spark goes by its setting then.
    if _VERSION not in tags:
        return mode.upper() == _CORRECTED
    # Spark compares these versions as text, too.
    return tags[_VERSION] >= since and b"org.apache.spark.legacy" + legacy not in tags


def _leaves(kind: pa.DataType) -> Iterator[pa.DataType]:
    if not pa.types.is_nested(kind):
        yield kind
        return
    for number in range(kind.num_fields):
        yield from _leaves(kind.field(number).type)


def is_read_as(found: pa.DataType, spark: pa.DataType) -> bool:
    """Return whether Arrow and Spark read the same values from columns of a file.

    Maps, intervals, times, unsigned integers, half floats, extension types, timestamps in
    nanoseconds and decimals of other sizes than Spark's are left to Spark.

    Args:
        found: the type that Arrow gives the column, INT96 in units of `INT96_UNIT`.
        spark: the type that Spark gives it.
    """
    types = pa.types
    if types.is_nested(spark):
        return _is_nested_read_as(found, spark)
    if types.is_string(spark) or types.is_binary(spark):
        # Arrow may give texts as a dictionary, of the same values.
        kind = found.value_type if types.is_dictionary(found) else found
        return not isinstance(kind, pa.BaseExtensionType) and spark_type(kind).equals(spark)
    if types.is_timestamp(spark) and types.is_timestamp(found):
        # INT96 is always an instant; of others the file says it by a zone.
        is_instant = found.tz is not None or found.unit == INT96_UNIT
        return found.unit in ("ms", "us", INT96_UNIT) and is_instant == (spark.tz is not None)
    return bool((spark in _PLAIN or types.is_decimal128(spark)) and found.equals(spark))


def _is_nested_read_as(found: pa.DataType, spark: pa.DataType) -> bool:
    types = pa.types
    is_list = types.is_list(found) or types.is_large_list(found) or types.is_fixed_size_list(found)
    if types.is_list(spark) and is_list:
        return _is_field_read_as(found.value_field, spark.value_field)
    if types.is_struct(spark) and types.is_struct(found):
        names = [field.name for field in found]
        is_same = names == [field.name for field in spark]
        is_clear = len({name.lower() for name in names}) == len(names)
        return is_same and is_clear and all(map(_is_field_read_as, found, spark))
    return False


def _is_field_read_as(found: pa.Field, spark: pa.Field) -> bool:
    # Where Spark expects no nulls, the file must not be able to hold any.
    is_nullable = spark.nullable or not found.nullable
    return is_nullable and is_read_as(found.type, spark.type)
