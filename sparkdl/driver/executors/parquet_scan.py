"""Whether a DataFrame is a scan of Parquet files: what Spark's plan says of it.

Runs in: driver

A plan is followed from its columns down to the files, through what leaves rows as they are there:

    Project [x AS z, cast(y as float)]    Filter (z > 3)    LogicalRelation [x, y] parquet

Scoring and feeding ask; reasons why not come as `ConfigError`, to be put into a sentence.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as spark_types
from pyspark.sql.types import DataType, StructField, StructType

from sparkdl.control.rows import Pick
from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.scored import arrow_schema
from sparkdl.feed.parquet.scan import Scan, ScannedColumn, ScannedFile, source_of
from sparkdl.feed.parquet.source import ParquetSource

_log = logging.getLogger(__name__)
_SOURCES = "org.apache.spark.sql.execution.datasources"
_PARQUET = f"{_SOURCES}.parquet.ParquetFileFormat"
_LISTING = f"{_SOURCES}.InMemoryFileIndex"
"""Others list files anew, or leave out rows of theirs, as Delta's do."""
_TRANSPARENT = ("Project", "Filter", "SubqueryAlias")
"""Plan nodes that leave rows in the files' order, so that each file is read once, forwards."""
_TOLERANT = ("ignoreCorruptFiles", "ignoreMissingFiles")
_FIELD_IDS = "spark.sql.parquet.fieldId.read.enabled"
_OPTIONS = {
    *("path", "paths", "basepath", "mergeschema", "recursivefilelookup", "pathglobfilter"),
    *("modifiedbefore", "modifiedafter", "compression", "serialization.format"),
    *(name.lower() for name in _TOLERANT),
}
"""Options that have an effect on which files and columns there are, but on no value."""
_REFUSED_SETTINGS = {
    "spark.sql.parquet.int96TimestampConversion": "timestamps of files of Impala are moved",
    "spark.sql.execution.arrow.useLargeVarTypes": "strings have 64-bit offsets",
}
_REBASES = (
    "spark.sql.parquet.datetimeRebaseModeInRead",
    "spark.sql.parquet.int96RebaseModeInRead",
)
_DEFAULT, _HIDDEN = "EXISTS_DEFAULT", "__metadata_col"
"""In a column's metadata: what it is in files that lack it; that it is about rows, not of them."""
_FOLDERS = (
    spark_types.StringType,
    spark_types.ByteType,
    spark_types.ShortType,
    spark_types.IntegerType,
    spark_types.LongType,
    spark_types.DateType,
)
"""Types of partition columns whose values are the same when they come from text."""
_STATUS = re.compile(
    r"\w+\{path=(?P<path>.*); isDirectory=false; length=(?P<nbytes>\d+); "
    r".*?\bmodification_time=(?P<modified_ms>\d+);",
    re.DOTALL,
)
_END = "\x1e\x1d\x1e"


@dataclass(frozen=True)
class Origin:
    """Where a column of a DataFrame comes from.

    Attributes:
        name: in the DataFrame.
        number: Spark's id of the attribute that it is, or is made of.
        fields: of a struct: which of its fields it is, outermost first.
        cast: Spark's type (a Java object) to which it is cast, if it is.
        refuses_nulls: Spark raises an error for a null in it.
    """

    name: str
    number: int
    fields: tuple[str, ...] = ()
    cast: Any = None
    refuses_nulls: bool = False

    @property
    def is_as_stored(self) -> bool:
        """Whether its values are those of an attribute, unchanged."""
        return not self.fields and self.cast is None and not self.refuses_nulls


@dataclass(frozen=True)
class PlannedScan:
    """The bottom of a plan.

    Attributes:
        relation: Spark's `HadoopFsRelation`, a Java object as are the attributes.
        attributes: its columns by their ids.
        origins: where the wanted columns come from.
        partitions: the columns whose values are in the names of folders.
        filters: how many filters the rows pass.
    """

    relation: Any
    attributes: Mapping[int, Any]
    origins: tuple[Origin, ...]
    partitions: tuple[str, ...]
    filters: int

    def stored_as(self, origin: Origin) -> str:
        """Return what a column, or the struct that it is in, is called in the files.

        Raises:
            ConfigError: if files do not hold it.
        """
        attribute = self.attributes[origin.number]
        name, tags = str(attribute.name()), attribute.metadata()
        is_data = name in _names(self.relation.dataSchema()) and name not in self.partitions
        if not is_data or tags.contains(_HIDDEN):
            raise ConfigError(f"its column {origin.name!r} is not in the files")
        if tags.contains(_DEFAULT):
            raise ConfigError(f"its column {origin.name!r} has a default for files that lack it")
        return name


def find_scan(frame: DataFrame, plan: Any, places: Sequence[int]) -> PlannedScan:
    """Return the scan of Parquet files that the columns at `places` come from.

    Args:
        plan: one of the DataFrame's plans, analyzed or later.

    Raises:
        ConfigError: if there is none, or settings change what Spark would read; it says why.
    """
    output = _items(plan.output())
    origins = [Origin(frame.columns[p], int(output[p].exprId().id())) for p in places]
    filters = 0
    while (kind := _kind(plan)) != "LogicalRelation":
        if kind not in _TRANSPARENT:
            raise ConfigError(f"its rows come through {kind}, not straight from files")
        if kind == "Project":
            columns = {int(each.exprId().id()): each for each in _items(plan.projectList())}
            origins = [_below(origin, columns[origin.number]) for origin in origins]
        filters += kind == "Filter"
        plan = plan.child()
    relation = plan.relation()
    _check_relation(relation)
    _check_settings(frame)
    attributes = {int(each.exprId().id()): each for each in _items(plan.output())}
    partitions = _names(relation.partitionSchema())
    return PlannedScan(relation, attributes, tuple(origins), partitions, filters)


def _below(origin: Origin, column: Any) -> Origin:
    """Follow a column through one projection, to what it is made of.

    Raises:
        ConfigError: if it is computed.
    """
    fields, cast, refuses_nulls = origin.fields, origin.cast, origin.refuses_nulls
    while (kind := _kind(column)) != "AttributeReference":
        # What is outside has been seen first: a field of what is cast or checked is not followed.
        if kind == "GetStructField":
            fields = (str(column.child().dataType().apply(column.ordinal()).name()), *fields)
        elif kind == "Cast" and not fields and cast is None:
            cast = column.dataType()
        elif kind == "Coalesce" and not fields and (checked := _checked(column)) is not None:
            column, refuses_nulls = checked, True
            continue
        elif kind != "Alias":
            raise ConfigError(f"its column {origin.name!r} is computed")
        column = column.child()
    return Origin(origin.name, int(column.exprId().id()), fields, cast, refuses_nulls)


def _checked(coalesce: Any) -> Any | None:
    """Return `x` of coalesce(x, raise_error(…)), in which only the values of `x` come through."""
    parts = _items(coalesce.children())
    error = parts[-1]
    while _kind(error) == "Cast":
        error = error.child()
    return parts[0] if len(parts) == 2 and _kind(error) == "RaiseError" else None


def _check_relation(relation: Any) -> None:
    if _kind(relation) != "HadoopFsRelation":
        raise ConfigError("its rows do not come from files")
    if relation.fileFormat().getClass().getName() != _PARQUET:
        raise ConfigError(f"its files are read by {relation.fileFormat()}, not as Parquet")
    options = relation.options()
    for name in _TOLERANT:
        value = options.get(name)
        if value.isDefined() and _is_true(value.get()):
            raise ConfigError(f"it is read with the option {name}")


def _check_settings(frame: DataFrame) -> None:
    settings = frame.sparkSession.conf
    for name in _TOLERANT:
        if _is_true(settings.get(f"spark.sql.files.{name}")):
            raise ConfigError(f"spark.sql.files.{name} is set")
    if _is_true(settings.get(_FIELD_IDS)):
        raise ConfigError("columns are found by field ids")


def has_local_files(relation: Any) -> bool:
    """Return whether all files of a `HadoopFsRelation` are local."""
    paths = _items(relation.location().rootPaths())
    return {path.toUri().getScheme() for path in paths} == {"file"}


# as a source of rows for nodes


def scanned_files(data: Any, is_local: bool) -> ParquetSource:
    """Return the files that a DataFrame's rows come from, to be read by nodes as they are now.

    Nodes read where the plan that Spark would execute is nothing but a scan of plain Parquet files
    with columns chosen, renamed, taken out of structs, or cast as `is_same_cast` has it. What Spark
    gives and what they read is then the same, row by row; the files' footers are looked at, and no
    job is started.

    Args:
        is_local: refuse files that are not local ones.

    Raises:
        ConfigError: if that is not so, or not known; it says why.
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
    # Made anew by the alias: a plan that the DataFrame has does not know what was cached since.
    plan = data.alias("fed")._jdf.queryExecution().optimizedPlan()
    found = find_scan(data, plan, range(len(data.columns)))
    _check_for_nodes(data, found, is_local)
    zone = str(data.sparkSession.conf.get("spark.sql.session.timeZone"))
    columns, folders = [], []
    for origin, wanted in zip(found.origins, data.schema.fields, strict=True):
        kind = _arrow_type(wanted.dataType, zone)
        if str(found.attributes[origin.number].name()) in found.partitions:
            columns.append(ScannedColumn(origin.name, None, kind, kind))
            folders.append(_folder(found, origin, wanted.dataType))
            continue
        pick = Pick((found.stored_as(origin), *origin.fields), origin.refuses_nulls)
        inner = _spark_type(found.attributes[origin.number])
        for name in origin.fields:
            assert isinstance(inner, StructType)
            inner = inner[name].dataType
        columns.append(ScannedColumn(origin.name, pick, _arrow_type(inner, zone), kind))
    modes = tuple(str(data.sparkSession.conf.get(name)) for name in _REBASES)
    files = tuple(_files(data.sparkSession, found.relation, folders))
    return Scan(files, tuple(columns), (modes[0], modes[1]))


def _check_for_nodes(frame: DataFrame, found: PlannedScan, is_local: bool) -> None:
    relation, settings = found.relation, frame.sparkSession.conf
    if found.filters:
        raise ConfigError("its rows are filtered")
    if is_local and not has_local_files(relation):
        raise ConfigError("its files are not local")
    if (listing := relation.location().getClass().getName()) != _LISTING:
        raise ConfigError(f"its files are listed by {listing}")
    if relation.bucketSpec().isDefined():
        raise ConfigError("its files are buckets")
    names = [str(name) for name in _items(relation.options().keys().toSeq())]
    if others := sorted(name for name in names if name.lower() not in _OPTIONS):
        raise ConfigError(f"it is read with the option {others[0]}")
    for name, why in _REFUSED_SETTINGS.items():
        if _is_true(settings.get(name, "false")):
            raise ConfigError(f"{name} is set: {why}")
    hadoop = frame.sparkSession.sparkContext._jsc.hadoopConfiguration()
    if hadoop.get("parquet.crypto.factory.class"):
        raise ConfigError("its files may be encrypted")
    if shared := {*found.partitions} & {*_names(relation.dataSchema())}:
        raise ConfigError(f"{min(shared)!r} is a column of files and of folders")


def _folder(found: PlannedScan, origin: Origin, kind: DataType) -> tuple[int, DataType]:
    """Return the number of a partition column among those of the folders, and its type."""
    name = str(found.attributes[origin.number].name())
    if not (origin.is_as_stored and isinstance(kind, _FOLDERS)):
        what = kind.simpleString() if origin.is_as_stored else "made of folders' names"
        raise ConfigError(f"its column {origin.name!r} is {what}")
    return found.partitions.index(name), kind


def _files(
    session: Any, relation: Any, folders: Sequence[tuple[int, DataType]]
) -> Iterator[ScannedFile]:
    """Yield the files as Spark listed them when the DataFrame was made."""
    none = session._jvm.PythonUtils.toSeq([])
    for directory in _items(relation.location().listFiles(none, none)):
        row = directory.values()
        values = tuple(_value(row, place, kind) for place, kind in folders)
        files = directory.files()
        text = str(files.mkString("", _END, _END)) if files.size() else ""
        found = [_STATUS.search(part) for part in text.split(_END)[:-1]]
        if len(found) != files.size() or not all(found):
            raise ConfigError("its files are listed in a way that is not known")
        for status in filter(None, found):
            path, nbytes, modified_ms = status.group("path", "nbytes", "modified_ms")
            yield ScannedFile(path, int(nbytes), int(modified_ms), values)


def _value(row: Any, place: int, kind: DataType) -> str | None:
    """Return a folder's value as text that Arrow casts to it."""
    if row.isNullAt(place):
        return None
    if isinstance(kind, spark_types.StringType):
        return str(row.getUTF8String(place).toString())
    if isinstance(kind, spark_types.DateType):
        return (date(1970, 1, 1) + timedelta(days=row.getInt(place))).isoformat()
    getters = {"tinyint": row.getByte, "smallint": row.getShort, "int": row.getInt}
    return str(getters.get(kind.simpleString(), row.getLong)(place))


# Java objects


def _spark_type(attribute: Any) -> DataType:
    try:
        return spark_types._parse_datatype_json_string(attribute.dataType().json())
    except Exception as error:  # noqa: BLE001 (a type of the user's, of which Python knows nothing)
        raise ConfigError(f"the type of {attribute.name()!r} is not known: {error}") from None


def _arrow_type(kind: DataType, zone: str) -> pa.DataType:
    """Return the type as which Spark hands a column to Python."""
    return arrow_schema(StructType([StructField("x", kind)]), zone).field(0).type


def _kind(java: Any) -> str:
    return str(java.getClass().getSimpleName())


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(number) for number in range(sequence.size())]


def _names(schema: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in schema.fieldNames())


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"
