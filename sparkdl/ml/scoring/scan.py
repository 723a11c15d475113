"""Which columns of a DataFrame are those of Parquet files, so that Python can read them itself.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.scored import arrow_schema

READERS = ("auto", "python", "spark")
"""Who reads the input columns of a DataFrame over Parquet files."""

_PARQUET = "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat"
_TRANSPARENT = ("Project", "Filter", "SubqueryAlias")
"""Plan nodes that leave rows in the files' order, so that each file is read once, forwards."""
_TOLERANT = ("ignoreCorruptFiles", "ignoreMissingFiles")


@dataclass(frozen=True)
class FileColumns:
    """Columns as they are in the files.

    Attributes:
        schema: the files' names for them, and Spark's types.
        is_case_sensitive: whether names in files must be spelt as in `schema`.
    """

    schema: pa.Schema
    is_case_sensitive: bool


def file_columns(frame: DataFrame, places: Sequence[int], reader: str) -> FileColumns | None:
    """Return what Python has to read for the columns at `places`; None if Spark hands them over.

    Python reads where rows come from Parquet files in order, through nothing but filters and
    selections, and the columns are as they are in the files. With `auto` the files must be local
    as well, because Spark's access to other storages need not be that of its Python workers.

    Args:
        reader: one of `READERS`.

    Raises:
        ConfigError: with `python`, if that is not so; it says why.
    """
    if reader == "spark":
        return None
    try:
        return _found(frame, places, is_local=reader == "auto")
    except ConfigError:
        if reader == "python":
            raise
        return None


def _found(frame: DataFrame, places: Sequence[int], is_local: bool) -> FileColumns:
    if not hasattr(frame, "_jdf"):
        raise _refusal("Spark Connect does not tell where its rows come from")
    plan = frame._jdf.queryExecution().withCachedData()
    wanted = [(plan.output().apply(place).exprId().id(), frame.columns[place]) for place in places]
    while (kind := plan.getClass().getSimpleName()) != "LogicalRelation":
        if kind not in _TRANSPARENT:
            raise _refusal(f"its rows come through {kind}, not straight from files")
        if kind == "Project":
            wanted = [(_origin(plan, number, name), name) for number, name in wanted]
        plan = plan.child()
    relation = plan.relation()
    _check(relation, is_local)
    names = {
        a.exprId().id(): a.name() for a in map(plan.output().apply, range(plan.output().size()))
    }
    stored = set(relation.dataSchema().fieldNames()) - set(relation.partitionSchema().fieldNames())
    for number, column in wanted:
        if names.get(number) not in stored:
            raise _refusal(f"its column {column!r} is not in the files")
    settings = frame.sparkSession.conf
    for name in _TOLERANT:
        if _is_true(settings.get(f"spark.sql.files.{name}")):
            raise _refusal(f"spark.sql.files.{name} is set")
    if _is_true(settings.get("spark.sql.parquet.fieldId.read.enabled")):
        raise _refusal("columns are found by field ids")
    fields = [frame.schema.fields[place] for place in places]
    types = arrow_schema(StructType(fields)).types
    return FileColumns(
        pa.schema([(names[number], t) for (number, _), t in zip(wanted, types, strict=True)]),
        _is_true(settings.get("spark.sql.caseSensitive")),
    )


def _check(relation: Any, is_local: bool) -> None:
    if relation.getClass().getSimpleName() != "HadoopFsRelation":
        raise _refusal("its rows do not come from files")
    if relation.fileFormat().getClass().getName() != _PARQUET:
        raise _refusal(f"its files are read by {relation.fileFormat()}, not as Parquet")
    options = relation.options()
    for name in _TOLERANT:
        value = options.get(name)
        if value.isDefined() and _is_true(value.get()):
            raise _refusal(f"it is read with the option {name}")
    paths = relation.location().rootPaths()
    where = [paths.apply(place).toUri().getScheme() for place in range(paths.size())]
    if is_local and set(where) != {"file"}:
        raise _refusal("its files are not local")


def _origin(project: Any, number: int, name: str) -> int:
    """Return the id of the attribute below a projection that the column is, renamed or not."""
    columns = project.projectList()
    for column in map(columns.apply, range(columns.size())):
        if column.exprId().id() != number:
            continue
        source = column.child() if column.getClass().getSimpleName() == "Alias" else column
        if source.getClass().getSimpleName() == "AttributeReference":
            return int(source.exprId().id())
    raise _refusal(f"its column {name!r} is computed")


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"parquet_reader='python', but the DataFrame is not one that Python can read itself: "
        f"{reason}. Leave it at 'auto', or give a DataFrame of spark.read.parquet(…), filtered and "
        "selected at most, of whose columns those that feed the model are unchanged"
    )
