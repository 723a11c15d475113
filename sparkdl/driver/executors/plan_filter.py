"""Translating a plan's filters into conditions that nodes evaluate with the same answers.

Runs in: driver

`storage/parquet/conditions.py` defines "the same". Conditions on folders' names alone choose files;
others are evaluated where rows are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from sparkdl.control.rows import Condition
from sparkdl.core.errors import ConfigError
from sparkdl.driver.executors.plan import Origin, PlannedFilter, PlannedScan, items, kind_of
from sparkdl.storage.parquet.conditions import fulfil, parts_of, type_of

# No floats: to Spark a NaN is the largest number, and Arrow compares it otherwise.
_KINDS = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "string": "string",
    "date": "date32",
    "timestamp_ntz": "timestamp[us]",
    "timestamp": "timestamp[us, tz=UTC]",
}
_COMPARISONS = {
    "EqualTo": ("eq", "eq"),
    "EqualNullSafe": ("eq", "eq"),
    "LessThan": ("lt", "gt"),
    "LessThanOrEqual": ("le", "ge"),
    "GreaterThan": ("gt", "lt"),
    "GreaterThanOrEqual": ("ge", "le"),
}
"""By Spark's name: the comparison with the column on the left, and on the right."""


@dataclass(frozen=True)
class Wanted:
    """The filters of a scan.

    Attributes:
        rows: the condition for rows, on values in the files; `None` for all rows.
        folders: the conditions for files, on values of partition columns.
    """

    rows: Condition | None
    folders: tuple[Condition, ...] = ()

    @property
    def partitions(self) -> tuple[str, ...]:
        """The partition columns that decide."""
        return tuple(sorted({about.path[0] for each in self.folders for about in parts_of(each)}))

    def has_file(self, values: Sequence[str | None]) -> bool:
        """Return whether there are wanted rows in a file with these values of `partitions`."""
        found = dict(zip(self.partitions, values, strict=True))

        def column(about: Condition) -> pa.Array:
            value = pa.array([found[about.path[0]]], pa.string())
            return value.cast(type_of(about.kind)) if about.kind else value

        return all(fulfil(each, column)[0].as_py() is True for each in self.folders)


def wanted_rows(found: PlannedScan) -> Wanted:
    """Return the filters of a plan as conditions.

    Raises:
        ConfigError: if nodes might answer otherwise than Spark.
    """
    rows: list[Condition] = []
    folders: list[Condition] = []
    for each in found.filters:
        for part in _conjuncts(each.condition):
            reading = _Reading(found, each)
            condition = reading.condition(part)
            if len(reading.is_of_folders) > 1:
                raise ConfigError(f"its filter {part.sql()} is of files and of folders")
            (folders if True in reading.is_of_folders else rows).append(condition)
    whole = Condition("and", tuple(rows)) if len(rows) > 1 else next(iter(rows), None)
    return Wanted(whole, tuple(folders))


def _conjuncts(condition: Any) -> list[Any]:
    if kind_of(condition) != "And":
        return [condition]
    return [*_conjuncts(condition.left()), *_conjuncts(condition.right())]


@dataclass
class _Reading:
    """Translates one condition, and notes whether its columns are of files or of folders."""

    found: PlannedScan
    filter: PlannedFilter
    is_of_folders: set[bool] = field(default_factory=set)

    def condition(self, said: Any) -> Condition:
        """Return an expression of Spark's as a condition.

        Raises:
            ConfigError: if the expression is of an unknown kind.
        """
        kind = kind_of(said)
        if kind in ("And", "Or"):
            parts = (self.condition(said.left()), self.condition(said.right()))
            return Condition(kind.lower(), parts)
        if kind == "Not":
            return _not(self.condition(said.child()))
        if kind == "IsNull":
            return self._null(said.child())
        if kind == "IsNotNull":
            return _not(self._null(said.child()))
        if kind in _COMPARISONS:
            return self._comparison(said, kind)
        if kind == "In":
            values = tuple(_value(each, said.value()) for each in items(said.list()))
            return self._about(said.value(), "in", values)
        if kind == "Coalesce":
            return self._or_else(said)
        # A boolean column is a condition by itself.
        if kind in ("AttributeReference", "GetStructField"):
            return self._about(said, "true")
        raise ConfigError(f"its filter is {said.sql()}")

    def _comparison(self, said: Any, kind: str) -> Condition:
        column, literal, what = said.left(), said.right(), _COMPARISONS[kind][0]
        if kind_of(column) == "Literal":
            column, literal, what = literal, column, _COMPARISONS[kind][1]
        found = self._about(column, what, (_value(literal, column),))
        # Spark's `<=>` with a null is false, where `=` would be unknown.
        if kind == "EqualNullSafe":
            return Condition("and", (found, _not(self._null(column))))
        return found

    def _or_else(self, said: Any) -> Condition:
        """Read coalesce(column, true), or false."""
        column, *others = items(said.children())
        if len(others) != 1 or kind_of(others[0]) != "Literal":
            raise ConfigError(f"its filter is {said.sql()}")
        about = self._about(column, "true")
        if _value(others[0], column):
            return Condition("or", (about, self._null(column)))
        return Condition("and", (about, _not(self._null(column))))

    def _about(self, column: Any, what: str, values: tuple[Any, ...] = ()) -> Condition:
        kind = _KINDS.get(str(column.dataType().simpleString()))
        if kind is None or (what == "true" and kind != "bool"):
            raise ConfigError(f"its filter compares {column.sql()}")
        return Condition(what, (), self._path(column), kind, values)

    def _null(self, column: Any) -> Condition:
        kind = _KINDS.get(str(column.dataType().simpleString()), "")
        return Condition("null", (), self._path(column), kind)

    def _path(self, column: Any) -> tuple[str, ...]:
        origin: Origin = self.filter.origin(column)
        if origin.cast is not None or origin.refuses_nulls:
            raise ConfigError(f"its filter is about {origin.name}, which is computed")
        name = self.found.attributes.get(origin.number, {}).get("name", "")
        if name in self.found.partitions and not origin.fields:
            self.is_of_folders.add(True)
            return (name,)
        self.is_of_folders.add(False)
        return (self.found.stored_as(origin), *origin.fields)


def _not(condition: Condition) -> Condition:
    return Condition("not", (condition,))


def _value(literal: Any, column: Any) -> bool | int | str:
    """Return a literal's value; it must be of its column's type, and not null."""
    kind = str(literal.dataType().simpleString())
    is_same = kind == str(column.dataType().simpleString()) and kind in _KINDS
    if kind_of(literal) != "Literal" or not is_same or literal.value() is None:
        raise ConfigError(f"its filter compares {column.sql()} with {literal.sql()}")
    if kind == "string":
        return str(literal.value().toString())
    if kind == "boolean":
        return bool(literal.value())
    return int(literal.value())
