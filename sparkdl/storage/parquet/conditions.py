"""Which rows fulfil a condition: as Spark answers, nulls included.

Runs in: driver, agent

Only comparisons with the same result in Arrow and Spark are supported: of booleans, integers,
dates, timestamps, and strings by their bytes. Floats are not among them: to Spark a NaN is the
largest number, and whether it finds one depends on the statistics that a file has of its row
groups.

Statistics are not used here: those of columns with NaN, or of old writers, would be exceptions, and
the columns of conditions are cheap to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.control.rows import Condition

KINDS = (
    *("bool", "int8", "int16", "int32", "int64", "string", "date32"),
    *("timestamp[us]", "timestamp[us, tz=UTC]"),
)
"""The types whose values are compared."""
COMPARISONS = {
    "eq": pc.equal,
    "lt": pc.less,
    "le": pc.less_equal,
    "gt": pc.greater,
    "ge": pc.greater_equal,
}


def type_of(kind: str) -> pa.DataType:
    """Return the type of one of `KINDS`."""
    return pa.timestamp("us", "UTC") if kind == KINDS[-1] else pa.type_for_alias(kind)


def parts_of(condition: Condition | None) -> Iterator[Condition]:
    """Yield those of its parts, or itself, that are about a column."""
    if condition is None:
        return
    if condition.path:
        yield condition
    for part in condition.parts:
        yield from parts_of(part)


def fulfil(condition: Condition, column: Callable[[Condition], pa.Array]) -> pa.Array:
    """Return whether rows fulfil a condition: bool [rows], null where that is unknown.

    Args:
        column: returns the values of the column that a comparison is about, as `type_of` its kind.
    """
    if condition.what == "not":
        return pc.invert(fulfil(condition.parts[0], column))
    if condition.what in ("and", "or"):
        # SQL's logic of three values: false AND null is false, true OR null is true.
        join = pc.and_kleene if condition.what == "and" else pc.or_kleene
        return reduce(join, (fulfil(part, column) for part in condition.parts))
    values = column(condition)
    if condition.what == "null":
        return pc.is_null(values)
    if condition.what == "true":
        return values
    wanted = pa.array(condition.values, type_of(condition.kind))
    if condition.what == "in":
        # `is_in` answers false for a null, and Spark null.
        return pc.if_else(pc.is_valid(values), pc.is_in(values, wanted), None)
    return COMPARISONS[condition.what](values, wanted[0])
