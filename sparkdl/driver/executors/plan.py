"""Finding the origin of a DataFrame's columns in Spark's plan.

A plan is followed from its columns down to the files, through nodes that keep rows unchanged:

    Project [x AS z, y]    Filter (z > 3)    LogicalRelation [x, y] parquet

Feeding uses it where there is no filter. A `ConfigError` has the reason against it,
for use in a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame

from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.sessions import is_true

_PARQUET = "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat"
_TRANSPARENT = ("Project", "Filter", "SubqueryAlias")
"""Plan nodes that keep rows in the files' order, so each file is read once, forwards."""
_VANISHING = (*_TRANSPARENT, "View", "ResolvedHint")
"""Plan nodes that the optimizer may remove."""
# Options by which Spark leaves out files that are an error for a node.
_TOLERANT = ("ignoreCorruptFiles", "ignoreMissingFiles")
_FIELD_IDS = "spark.sql.parquet.fieldId.read.enabled"
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


class Projection:
    def __init__(self, frame: DataFrame, project: Any) -> None:
        self._list = project.projectList()
        self._trees = trees(frame, self._list)
        self._places = {number_of(tree): place for place, tree in enumerate(self._trees)}

    def below(self, origin: Origin) -> Origin:
        """Follow a column through the projection."""
        place = self._places[origin.number]
        *above, last = self._trees[place]
        if kind_in(last) == "AttributeReference" and {*map(kind_in, above)} <= {"Alias"}:
            return replace(origin, number=number_of([last]))
        # Other expressions are few, so they may cost some calls each.
        column, refuses_nulls = self._list.apply(place), origin.refuses_nulls
        while (kind := kind_of(column)) != "AttributeReference":
            if kind == "Coalesce" and (checked := _checked(column)) is not None:
                column, refuses_nulls = checked, True
            elif kind == "Alias":
                column = column.child()
            else:
                raise ConfigError(f"its column {origin.name!r} is computed")
        return Origin(origin.name, int(column.exprId().id()), refuses_nulls)


def _checked(coalesce: Any) -> Any | None:
    """Return `x` of coalesce(x, raise_error(…)), which returns only values of `x`."""
    parts = items(coalesce.children())
    error = parts[-1]
    while kind_of(error) == "Cast":
        error = error.child()
    return parts[0] if len(parts) == 2 and kind_of(error) == "RaiseError" else None


@dataclass(frozen=True)
class PlannedScan:
    """The bottom of a plan.

    Attributes:
        relation: Spark's `HadoopFsRelation`, a Java object.
        attributes: its columns by their ids, as Spark writes them in JSON.
        origins: where the wanted columns come from.
        stored: the names of the columns in the files.
        partitions: the columns whose values are in the names of folders.
        is_filtered: whether the rows pass a filter.
    """

    relation: Any
    attributes: Mapping[int, dict[str, Any]]
    origins: tuple[Origin, ...]
    stored: frozenset[str]
    partitions: tuple[str, ...]
    is_filtered: bool

    def stored_as(self, origin: Origin) -> str:
        """Return the name in the files of a column."""
        attribute = self.attributes.get(origin.number)
        name = str(attribute["name"]) if attribute else ""
        if attribute is None or name not in self.stored or name in self.partitions:
            raise ConfigError(f"its column {origin.name!r} is not in the files")
        if _DEFAULT in attribute["metadata"]:
            raise ConfigError(f"its column {origin.name!r} has a default for files that lack it")
        return name


def find_scan(frame: DataFrame, plan: Any, places: Sequence[int], is_local: bool) -> PlannedScan:
    """Return the scan of Parquet files that the columns at `places` come from."""
    # A call of py4j for each column would take minutes for a table of thousands.
    output, names = trees(frame, plan.output()), frame.columns
    origins = [Origin(names[place], number_of(output[place])) for place in places]
    is_filtered = False
    while (kind := kind_of(plan)) != "LogicalRelation":
        if kind not in _TRANSPARENT:
            raise ConfigError(f"its rows come through {kind}, not straight from files")
        if kind == "Project":
            projection = Projection(frame, plan)
            origins = [projection.below(origin) for origin in origins]
        is_filtered = is_filtered or kind == "Filter"
        plan = plan.child()
    relation = plan.relation()
    _check_relation(relation)
    _check_settings(frame)
    if is_local and not _has_local_files(relation):
        raise ConfigError("its files are not local")
    # Behind them is `_metadata`, which no file holds.
    held = trees(frame, plan.output())[: relation.schema().size()]
    attributes = {number_of(tree): tree[0] for tree in held}
    stored = frozenset(names_of(relation.dataSchema()))
    partitions = names_of(relation.partitionSchema())
    return PlannedScan(relation, attributes, tuple(origins), stored, partitions, is_filtered)


def check_shape(plan: Any) -> None:
    """Check cheaply that a plan before optimization might be such a scan."""
    while (kind := kind_of(plan)) != "LogicalRelation":
        if kind not in _VANISHING:
            raise ConfigError(f"its rows come through {kind}, not straight from files")
        plan = plan.child()


def _check_relation(relation: Any) -> None:
    if kind_of(relation) != "HadoopFsRelation":
        raise ConfigError("its rows do not come from files")
    if relation.fileFormat().getClass().getName() != _PARQUET:
        raise ConfigError(f"its files are read by {relation.fileFormat()}, not as Parquet")
    options = relation.options()
    for name in _TOLERANT:
        value = options.get(name)
        if value.isDefined() and is_true(value.get()):
            raise ConfigError(f"it is read with the option {name}")


def _check_settings(frame: DataFrame) -> None:
    settings = frame.sparkSession.conf
    for name in _TOLERANT:
        if is_true(settings.get(f"spark.sql.files.{name}")):
            raise ConfigError(f"spark.sql.files.{name} is set")
    if is_true(settings.get(_FIELD_IDS)):
        raise ConfigError("columns are found by field ids")


def _has_local_files(relation: Any) -> bool:
    paths = items(relation.location().rootPaths())
    return {path.toUri().getScheme() for path in paths} == {"file"}


# Java objects


def kind_of(java: Any) -> str:
    return str(java.getClass().getSimpleName())


def items(sequence: Any) -> list[Any]:
    return [sequence.apply(number) for number in range(sequence.size())]


def names_of(schema: Any) -> tuple[str, ...]:
    return tuple(field["name"] for field in json.loads(schema.json())["fields"])


def texts(session: Any, sequence: Any, of: str, name: str) -> list[str]:
    """Return what a method of the elements of a Scala sequence returns, as text: by a few calls.

    Args:
        of: the class that has the method, which takes no arguments.
    """
    if sequence.isEmpty():
        return []
    each = getter(session, of, name)
    return str(sequence.iterator().map(each).mkString(_SEPARATOR)).split(_SEPARATOR)


def getter(session: Any, of: str, name: str) -> Any:
    """Return a method without arguments of a Java class as a function of Scala's."""
    java = session._jvm.java.lang
    no_types = session.sparkContext._gateway.new_array(java.Class, 0)
    method = java.Class.forName(of).getMethod(name, no_types)
    return java.invoke.MethodHandleProxies.asInterfaceInstance(
        java.Class.forName("scala.Function1"),
        java.invoke.MethodHandles.publicLookup().unreflect(method),
    )


def trees(frame: DataFrame, sequence: Any) -> list[Tree]:
    found = texts(
        frame.sparkSession, sequence, "org.apache.spark.sql.catalyst.trees.TreeNode", "toJSON"
    )
    return [json.loads(text) for text in found]


def kind_in(node: Mapping[str, Any]) -> str:
    return str(node["class"]).rpartition(".")[2]


def number_of(tree: Tree) -> int:
    return int(tree[0]["exprId"]["id"])
