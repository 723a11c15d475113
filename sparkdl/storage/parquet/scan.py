"""The Parquet files of a scan planned by Spark, as a source of the same rows.

Runs in: driver

Spark lists the files and the types of their columns. This module checks in the files' footers that
Arrow reads exactly the same values, and refuses the scan wherever that is uncertain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from sparkdl.control.rows import DataFile
from sparkdl.core.errors import ConfigError
from sparkdl.storage.parquet.source import ParquetSource, read_footers, row_nbytes, spark_type
from sparkdl.storage.systems import is_unchanged, locate, open_storage

_PLAIN = (
    *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.float32(), pa.float64()),
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


def source_of(scanned: Sequence[ScannedFile], columns: Sequence[ScannedColumn]) -> ParquetSource:
    """Return a source of the rows of a scan; a `ConfigError` if Arrow's values may differ."""
    names = [column.name for column in columns]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"it has several columns {twice[0]!r}")
    located = [locate(file.path) for file in scanned]
    storages = {storage.uri: storage for storage, _ in located}
    if len(storages) != 1:
        raise ConfigError("it has no files" if not located else "its files are in several storages")
    [storage] = storages.values()
    system = open_storage(storage)
    listed = {path: file for (_, path), file in zip(located, scanned, strict=True)}
    if len(listed) < len(located):
        raise ConfigError("it reads a file twice")
    # Sorted, because the rows' numbers must not depend on the order of Spark's listing.
    paths = sorted(listed)
    found = read_footers(paths, partial(_read_footer, system, listed, columns))
    row_groups = tuple(counts for counts, _ in found)
    files = tuple(
        DataFile(path, nbytes, listed[path].nbytes)
        for path, (_, nbytes) in zip(paths, found, strict=True)
    )
    source = ParquetSource(
        storage,
        pa.schema([(column.name, column.kind) for column in columns]),
        files,
        row_groups,
        tuple(column.stored_as for column in columns),
        tuple(column.name for column in columns if column.refuses_nulls),
        # How the rows are numbered, independent of the files' names.
        hashlib.sha256(msgspec.json.encode(row_groups)).hexdigest()[:16],
    )
    if not source.num_rows:
        raise ConfigError("its files have no rows")
    return source


def _read_footer(
    system: pafs.FileSystem,
    listed: Mapping[str, ScannedFile],
    columns: Sequence[ScannedColumn],
    path: str,
) -> tuple[tuple[int, ...], int]:
    """Return the rows of each row group, and what a row takes in memory."""
    try:
        file = listed[path]
        if not is_unchanged(system, path, file.nbytes, file.modified_ms):
            raise ConfigError(f"{path} has changed since Spark listed it")
        with pq.ParquetFile(path, filesystem=system) as parquet:
            metadata, schema = parquet.metadata, parquet.schema_arrow
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    fields: dict[str, list[pa.Field]] = {}
    for field in schema:
        fields.setdefault(field.name.lower(), []).append(field)
    for column in columns:
        # Spark might read a column whose name differs in case only.
        same = fields.get(column.stored_as.lower(), [])
        if [field.name for field in same] != [column.stored_as]:
            names = ", ".join(repr(field.name) for field in same)
            problem = f"is called {names}" if same else "is missing"
            raise ConfigError(f"its column {column.name!r} {problem} in {path}")
        if not is_read_as(same[0].type, column.kind):
            raise ConfigError(
                f"its column {column.name!r} is {same[0].type} in {path} and {column.kind} for "
                "Spark, which nodes might read otherwise"
            )
    wanted = {column.stored_as for column in columns}
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return tuple(group.num_rows for group in groups), row_nbytes(metadata, wanted)


def is_read_as(found: pa.DataType, spark: pa.DataType) -> bool:
    """Return whether Arrow and Spark read the same values from columns of a file.

    Maps, dates, timestamps, intervals, times, unsigned integers, half floats, extension types and
    decimals of other sizes than Spark's are left to Spark.
    """
    types = pa.types
    if types.is_nested(spark):
        return _is_nested_read_as(found, spark)
    if types.is_string(spark) or types.is_binary(spark):
        # Arrow may give texts as a dictionary, of the same values.
        kind = found.value_type if types.is_dictionary(found) else found
        return not isinstance(kind, pa.BaseExtensionType) and spark_type(kind).equals(spark)
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
