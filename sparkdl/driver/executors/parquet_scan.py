"""The Parquet files behind a DataFrame that only scans them, as a source for the nodes.

Spark's plan is followed from the columns down to the files, through nodes that keep rows unchanged:

    Project [x AS z, y]    LogicalRelation [x, y] parquet

A `ConfigError` has the reason against it, for use in a sentence.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame

from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.scored import arrow_schema, distinct_columns
from sparkdl.driver.executors.sessions import is_true
from sparkdl.storage.parquet.scan import ScannedColumn, ScannedFile, source_of
from sparkdl.storage.parquet.source import ParquetSource

_log = logging.getLogger(__name__)
_DATASOURCES = "org.apache.spark.sql.execution.datasources"
_PARQUET = f"{_DATASOURCES}.parquet.ParquetFileFormat"
_LISTING = f"{_DATASOURCES}.InMemoryFileIndex"
"""Other indexes list files again, or skip some of their rows, as Delta's do."""
_TRANSPARENT = ("Project", "SubqueryAlias")
"""Plan nodes that keep rows in the files' order, so each file is read once, forwards."""
_VANISHING = (*_TRANSPARENT, "View", "ResolvedHint")
"""Plan nodes that the optimizer may remove."""
_OPTIONS = {
    *("path", "paths", "basepath", "mergeschema", "recursivefilelookup", "pathglobfilter"),
    *("modifiedbefore", "modifiedafter", "compression", "serialization.format"),
}
"""Options that affect the choice of files and columns, but no value."""
_REFUSED_SETTINGS = {
    "spark.sql.files.ignoreCorruptFiles": "files that are an error for a node are left out",
    "spark.sql.files.ignoreMissingFiles": "files that are an error for a node are left out",
    "spark.sql.parquet.fieldId.read.enabled": "columns are found by field ids",
    "spark.sql.execution.arrow.useLargeVarTypes": "strings have 64-bit offsets",
}
_DEFAULT = "EXISTS_DEFAULT"
"""A key in a column's metadata: its value in files that lack it."""
_SEPARATOR = "\x1e\x1d\x1e"

Tree = list[dict[str, Any]]
"""An expression of Spark's as `TreeNode.toJSON` writes it: its nodes in preorder."""


@dataclass(frozen=True)
class Origin:
    """The origin of a column of a DataFrame.

    Attributes:
        name: in the DataFrame.
        number: Spark's id of the attribute behind it.
        refuses_nulls: Spark raises an error for a null in it, as our estimators ask for.
    """

    name: str
    number: int
    refuses_nulls: bool = False


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
        return source_of(*_scan(data, is_local))
    except ConfigError:
        raise
    except Exception as error:  # of py4j: another Spark has other plans
        _log.debug("A plan could not be read", exc_info=True)
        raise ConfigError(f"its plan cannot be read: {error}") from error


def _scan(
    frame: DataFrame, is_local: bool
) -> tuple[tuple[ScannedFile, ...], tuple[ScannedColumn, ...]]:
    plan = frame._jdf.queryExecution().analyzed()
    while _kind_of(plan) != "LogicalRelation":  # a cheap check, before the optimizer runs
        plan = _below(plan, _VANISHING)
    distinct_columns(frame)
    # The alias forces a new plan: the DataFrame's own ignores data cached since it was made.
    plan = frame.alias("fed")._jdf.queryExecution().optimizedPlan()
    # A call of py4j for each column would take minutes for a table of thousands.
    origins = [
        Origin(name, _number_of(tree))
        for name, tree in zip(frame.columns, _trees(frame, plan.output()), strict=True)
    ]
    while _kind_of(plan) != "LogicalRelation":
        if _kind_of(plan) == "Project":
            projects, trees = plan.projectList(), _trees(frame, plan.projectList())
            order = {_number_of(tree): index for index, tree in enumerate(trees)}
            origins = [
                _behind(origin, projects.apply(order[origin.number]), trees[order[origin.number]])
                for origin in origins
            ]
        plan = _below(plan, _TRANSPARENT)
    relation = plan.relation()
    _check(frame, relation, is_local)
    # Behind them is `_metadata`, which no file holds.
    held = _trees(frame, plan.output())[: relation.schema().size()]
    attributes = {_number_of(tree): tree[0] for tree in held}
    stored = set(_names_of(relation.dataSchema())).difference(_names_of(relation.partitionSchema()))
    columns = (
        ScannedColumn(
            origin.name, _stored_as(origin, attributes, stored), kind, origin.refuses_nulls
        )
        for origin, kind in zip(origins, arrow_schema(frame.schema).types, strict=True)
    )
    return tuple(_files(frame.sparkSession, relation)), tuple(columns)


def _below(plan: Any, passed: tuple[str, ...]) -> Any:
    if (kind := _kind_of(plan)) not in passed:
        raise ConfigError(f"its rows come through {kind}, not straight from files")
    return plan.child()


def _behind(origin: Origin, column: Any, tree: Tree) -> Origin:
    """Follow a column through a projection."""
    *above, last = tree
    if _kind_in(last) == "AttributeReference" and {*map(_kind_in, above)} <= {"Alias"}:
        return replace(origin, number=_number_of([last]))
    # Other expressions are few, so they may cost some calls each.
    refuses_nulls = origin.refuses_nulls
    while (kind := _kind_of(column)) != "AttributeReference":
        if kind == "Coalesce" and (checked := _checked(column)) is not None:
            column, refuses_nulls = checked, True
        elif kind == "Alias":
            column = column.child()
        else:
            raise ConfigError(f"its column {origin.name!r} is computed")
    return Origin(origin.name, int(column.exprId().id()), refuses_nulls)


def _checked(coalesce: Any) -> Any | None:
    """Return `x` of coalesce(x, raise_error(…)), which returns only values of `x`."""
    parts = _items(coalesce.children())
    error = parts[-1]
    while _kind_of(error) == "Cast":
        error = error.child()
    return parts[0] if len(parts) == 2 and _kind_of(error) == "RaiseError" else None


def _stored_as(origin: Origin, attributes: Mapping[int, dict[str, Any]], stored: set[str]) -> str:
    """Return the name in the files of a column."""
    attribute = attributes.get(origin.number)
    if attribute is None or attribute["name"] not in stored:
        raise ConfigError(f"its column {origin.name!r} is not in the files")
    if _DEFAULT in attribute["metadata"]:
        raise ConfigError(f"its column {origin.name!r} has a default for files that lack it")
    return str(attribute["name"])


def _check(frame: DataFrame, relation: Any, is_local: bool) -> None:
    if _kind_of(relation) != "HadoopFsRelation":
        raise ConfigError("its rows do not come from files")
    if relation.fileFormat().getClass().getName() != _PARQUET:
        raise ConfigError(f"its files are read by {relation.fileFormat()}, not as Parquet")
    paths = _items(relation.location().rootPaths())
    if is_local and {path.toUri().getScheme() for path in paths} != {"file"}:
        raise ConfigError("its files are not local")
    if (listing := relation.location().getClass().getName()) != _LISTING:
        raise ConfigError(f"its files are listed by {listing}")
    if relation.bucketSpec().isDefined():
        raise ConfigError("its files are buckets")
    # Spark ignores the case of an option's name.
    names = [str(name) for name in _items(relation.options().keys().toSeq())]
    if others := sorted(name for name in names if name.lower() not in _OPTIONS):
        raise ConfigError(f"it is read with the option {others[0]}")
    for name, why in _REFUSED_SETTINGS.items():
        if is_true(frame.sparkSession.conf.get(name, "false")):
            raise ConfigError(f"{name} is set: {why}")
    hadoop = frame.sparkSession.sparkContext._jsc.hadoopConfiguration()
    if hadoop.get("parquet.crypto.factory.class"):
        raise ConfigError("its files may be encrypted")


def _files(session: Any, relation: Any) -> Iterator[ScannedFile]:
    """Yield the files as Spark listed them when the DataFrame was made."""
    none = session._jvm.PythonUtils.toSeq([])
    directories = relation.location().listFiles(none, none)
    # `flatMap` of iterators: a collection's also takes a CanBuildFrom in Spark 3.5's Scala.
    each = _getter(session, f"{_DATASOURCES}.PartitionDirectory", "files")
    files = directories.iterator().flatMap(each).toList()
    # Not a call of py4j for each file, which takes seconds for 10,000 files.
    status = f"{_DATASOURCES}.FileStatusWithMetadata"
    names = ("getPath", "getLen", "getModificationTime")
    found_by_name = (_texts(session, files, status, name) for name in names)
    for path, nbytes, modified_ms in zip(*found_by_name, strict=True):
        yield ScannedFile(path, int(nbytes), int(modified_ms))


# Java objects


def _kind_of(java: Any) -> str:
    return str(java.getClass().getSimpleName())


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(number) for number in range(sequence.size())]


def _names_of(schema: Any) -> list[str]:
    return [field["name"] for field in json.loads(schema.json())["fields"]]


def _texts(session: Any, sequence: Any, of: str, name: str) -> list[str]:
    """Return what a method of the elements of a Scala sequence returns, as text: by a few calls.

    Args:
        of: the class that has the method, which takes no arguments.
    """
    if sequence.isEmpty():
        return []
    each = _getter(session, of, name)
    return str(sequence.iterator().map(each).mkString(_SEPARATOR)).split(_SEPARATOR)


def _getter(session: Any, of: str, name: str) -> Any:
    """Return a method without arguments of a Java class as a function of Scala's."""
    java = session._jvm.java.lang
    no_types = session.sparkContext._gateway.new_array(java.Class, 0)
    method = java.Class.forName(of).getMethod(name, no_types)
    return java.invoke.MethodHandleProxies.asInterfaceInstance(
        java.Class.forName("scala.Function1"),
        java.invoke.MethodHandles.publicLookup().unreflect(method),
    )


def _trees(frame: DataFrame, sequence: Any) -> list[Tree]:
    found = _texts(
        frame.sparkSession, sequence, "org.apache.spark.sql.catalyst.trees.TreeNode", "toJSON"
    )
    return [json.loads(text) for text in found]


def _kind_in(node: Mapping[str, Any]) -> str:
    return str(node["class"]).rpartition(".")[2]


def _number_of(tree: Tree) -> int:
    return int(tree[0]["exprId"]["id"])
