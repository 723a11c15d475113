"""Results of inference become Arrow columns of the types that were declared for them.

Whole columns are converted at once where the types allow it; others go value by value, and errors
name the value of the wrong type. Nothing is bent to fit: no number becomes text, and none loses
its fraction; only float64 may become float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import date, datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa

from sparkdl.core.errors import InferenceError
from sparkdl.values.ndarrays import is_list, is_vector, lengths
from sparkdl.values.rows import Codec, decode, row_fields, row_schema, rows

_SAME = (pa.types.is_boolean, pa.types.is_string, pa.types.is_binary, pa.types.is_date32)
_MAX_REPR = 60


class MisfitError(ValueError):
    """A value does not fit a declared type."""


def result_columns(batch: pa.RecordBatch, schema: pa.Schema) -> list[pa.Array]:
    """Return the columns that `schema` declares, in its order and of its types.

    A row of results fills the columns by name (Row, dict) or by position (tuple, list). Where one
    column is declared it may as well be that column's value: a number, an array, a struct, a map.
    """
    parts = _parts(batch, schema)
    return [
        _column(array, codec, field, parts is None)
        for (array, codec), field in zip(parts or [_whole(batch)], schema, strict=True)
    ]


def _whole(batch: pa.RecordBatch) -> tuple[Any, Codec | None]:
    schema = row_schema(batch)
    if schema is not None and schema.kind == "value":
        return batch.column(0), schema.columns[0]
    return rows(batch), None


def _parts(batch: pa.RecordBatch, schema: pa.Schema) -> list[tuple[Any, Codec | None]] | None:
    """Return a column for each field of `schema`; None if a row is the only field's value."""
    encoded = row_schema(batch)
    names = batch.schema.names
    if encoded is None:
        raise InferenceError("the node sent results that encode_rows has not made")
    only = schema.field(0).type if len(schema) == 1 else None
    is_named = encoded.kind in ("row", "dict")
    if encoded.kind == "value":
        if only is None:
            raise _misfit(
                f"each result is one {encoded.columns[0].name}, and schema= declares "
                f"{len(schema)} columns ({', '.join(schema.names)}). Answer with a tuple, a Row or "
                "a dict for each row, or declare one column"
            )
        return None
    if only is not None and _is_value(encoded.kind, names, only, schema.names[0]):
        return None
    if not is_named and len(names) != len(schema):
        raise _misfit(
            f"a result is a {encoded.kind} of {len(names)} values, and schema= declares "
            f"{len(schema)} columns ({', '.join(schema.names)}). Declare one for each value"
        )
    if is_named and (odd := set(names) ^ set(schema.names)):
        problem = "lacks" if (missing := odd - set(names)) else "has undeclared"
        raise _misfit(
            f"a result {problem} {', '.join(map(repr, sorted(missing or odd)))}: it is a "
            f"{encoded.kind} of {', '.join(names)}, and schema= declares "
            f"{', '.join(schema.names)}. Name the same fields in both"
        )
    places = [names.index(name) for name in schema.names] if is_named else range(len(schema))
    return [(batch.column(place), encoded.columns[place]) for place in places]


def _is_value(kind: str, names: list[str], only: pa.DataType, name: str) -> bool:
    """Whether a row of several columns is one value of the type `only`."""
    if is_list(only):
        return kind == "list" or (kind == "tuple" and len(names) != 1)
    if pa.types.is_map(only):
        return kind == "dict" and names != [name]
    if pa.types.is_struct(only):
        return names != [name] and (kind in ("row", "dict") or len(names) != 1)
    return False


def _column(values: Any, codec: Codec | None, field: pa.Field, is_row: bool) -> pa.Array:
    found = None
    if codec is not None:
        with suppress(pa.ArrowException):  # value by value, below, to find out which does not fit
            found = _cast(values, codec, field.type)
    if found is None:
        found = build(values if codec is None else decode(values, codec), field, is_row)
    if found.null_count and not field.nullable:
        raise _misfit(
            f"a result is None in column {field.name!r}, which schema= declares as NOT NULL"
        )
    return found


def _cast(array: pa.Array, codec: Codec, to: pa.DataType) -> pa.Array | None:
    """Convert a whole array; None if it takes a closer look at the values."""
    is_flat = codec.name == "ndarray" and pa.types.is_struct(array.type)
    if is_flat and (lengths(array.field("shape")) == 1).all():
        array = array.field("data")
    # Decimals travel as text. Arrow's safe cast refuses fractions and overflow.
    return array.cast(to) if "decimal" not in str(codec) and _is_alike(array, to) else None


def _is_alike(array: pa.Array, to: pa.DataType) -> bool:
    """Whether a cast bends no value, and makes no null where there may be none."""
    kind, types = array.type, pa.types
    if types.is_list(to):
        if not is_list(kind) or (array.null_count and types.is_fixed_size_list(kind)):
            return False
        inner = array.flatten()
        return _is_alike(inner, to.value_type) and (to.value_field.nullable or not inner.null_count)
    if types.is_integer(kind) or types.is_floating(kind):
        return bool(types.is_integer(to) or types.is_floating(to))
    if types.is_timestamp(kind) and types.is_timestamp(to):
        return to.tz is None  # else local time becomes an instant, as `_scalar` has it
    return types.is_null(kind) or any(is_kind(kind) and is_kind(to) for is_kind in _SAME)


def build(
    values: Sequence[Any], field: pa.Field, is_row: bool = False, whose: str = "map_fun"
) -> pa.Array:
    """Return values of Python as an array of the field's type; `is_row`: each is a whole result."""
    try:
        return pa.array([_plain(value, field.type) for value in values], field.type)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        # Value by value only after the fast way has failed, to name the one that does not fit.
        value, error = _culprit(values, field.type)
    text = repr(value)
    text = text if len(text) <= _MAX_REPR else f"{text[:_MAX_REPR]}…"
    where = "as a whole " if is_row and isinstance(value, list | tuple | dict) else ""
    raise _misfit(
        f"column {field.name!r} is declared as {field.type}, and a result {where}is a "
        f"{_type_name(value)}, {text}: {error}. Declare another type, or convert the results in "
        f"{whose}",
        whose,
    )


def _culprit(values: Sequence[Any], to: pa.DataType) -> tuple[Any, str]:
    for value in values:
        try:
            pa.array([_plain(value, to)], to)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            return value, str(error).rstrip(".")
    return values[0], "the values do not fit together"


def _plain(value: Any, to: pa.DataType) -> Any:
    """Return what `pa.array` turns into `to` without bending it."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if value is None:
        return None
    if is_list(to):
        if hasattr(value, "toArray"):
            value = value.toArray()
        _expect(isinstance(value, list | tuple | np.ndarray), "no array")
        return [_plain(element, to.value_type) for element in value]
    if pa.types.is_map(to):
        _expect(isinstance(value, dict), "no dict")
        return [(_plain(k, to.key_type), _plain(v, to.item_type)) for k, v in value.items()]
    if is_vector(to) and hasattr(value, "toArray"):
        return _vector(value)
    if pa.types.is_struct(to):
        return _struct(value, to)
    return _scalar(value, to)


def _scalar(value: Any, to: pa.DataType) -> Any:
    kinds = pa.types
    is_bool = isinstance(value, bool)
    # A bool is an int to Python, and `pa.array` makes 1.0 of it in a column of floats.
    _expect(is_bool == kinds.is_boolean(to), "a bool is no number" if is_bool else "no bool")
    if kinds.is_integer(to) and isinstance(value, float):
        # `pa.array` would cut the fraction off.
        _expect(value.is_integer(), "it has a fraction")
        return int(value)
    if kinds.is_string(to) or kinds.is_large_string(to):
        _expect(isinstance(value, str), "no str")
    elif kinds.is_binary(to) or kinds.is_large_binary(to):
        _expect(isinstance(value, bytes | bytearray), "no bytes")
    elif kinds.is_date(to):
        _expect(isinstance(value, date) and not isinstance(value, datetime), "no date")
    elif kinds.is_timestamp(to):
        _expect(isinstance(value, datetime), "no datetime")
        if to.tz is not None:  # without a zone it is local time, as everywhere in pyspark
            return value.astimezone(timezone.utc)
    return value


def _struct(value: Any, to: pa.DataType) -> dict[str, Any]:
    names = [field.name for field in to]
    own = row_fields(value) or getattr(value, "_fields", None)
    if own:
        value = dict(zip(own, value, strict=True))
    elif isinstance(value, list | tuple):
        _expect(len(value) == len(names), f"it needs {len(names)} values")
        value = dict(zip(names, value, strict=True))
    _expect(isinstance(value, dict), "no Row, dict or tuple")
    _expect(set(value) == set(names), f"its fields must be {', '.join(names)}")
    return {field.name: _plain(value[field.name], field.type) for field in to}


def _vector(value: Any) -> dict[str, Any]:
    if hasattr(value, "indices"):
        indices, values = value.indices.tolist(), value.values.tolist()
        return {"type": 0, "size": value.size, "indices": indices, "values": values}
    return {"type": 1, "size": None, "indices": None, "values": value.toArray().tolist()}


def _expect(is_so: bool, problem: str) -> None:
    if not is_so:
        raise MisfitError(problem)


def _type_name(value: Any) -> str:
    kind = type(value)
    if isinstance(value, np.ndarray):
        return f"numpy array of {value.dtype} {list(value.shape)}"
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _misfit(text: str, whose: str = "map_fun") -> InferenceError:
    return InferenceError(f"the results of {whose} do not fit: {text}")
