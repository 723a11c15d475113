"""The types of columns: Spark's, Arrow's, and numpy's, which the frameworks' tensors have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from sparkdl.values.ndarrays import is_list, is_vector

Family = Literal["boolean", "number", "text", "vector", "other"]
"""What the values are; text and bytes are one."""
NUMERIC: tuple[Family, ...] = ("boolean", "number", "vector")
TEXT = "string"
"""The dtype of text and bytes, as TensorFlow calls it."""

_TABLE: tuple[tuple[str, pa.DataType, tuple[str, ...]], ...] = (
    # Spark's name, Arrow's type, and numpy's types whose values such a column holds: Spark has
    # neither unsigned types, of which the next larger one holds all values, nor half precision.
    ("boolean", pa.bool_(), ("bool",)),
    ("tinyint", pa.int8(), ("int8",)),
    ("smallint", pa.int16(), ("int16", "uint8")),
    ("int", pa.int32(), ("int32", "uint16")),
    ("bigint", pa.int64(), ("int64", "uint32")),
    ("float", pa.float32(), ("float32", "float16")),
    ("double", pa.float64(), ("float64",)),
    ("string", pa.string(), (TEXT,)),
    ("binary", pa.binary(), ()),
)
SPARK_NAMES = {arrow: name for name, arrow, _ in _TABLE}
BY_DTYPE = {dtype: arrow for _, arrow, dtypes in _TABLE for dtype in dtypes}
"""The type of a column for values of a dtype."""
_FAMILIES: dict[str, Family] = {"b": "boolean", "O": "text", **dict.fromkeys("iuf", "number")}
"""By the kind of a numpy dtype."""


def family(kind: pa.DataType) -> Family:
    types = pa.types
    if is_vector(kind):
        return "vector"
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    is_text = types.is_string(kind) or types.is_large_string(kind)
    return "text" if is_text or types.is_binary(kind) or types.is_large_binary(kind) else "other"


_BY_NAME = {
    **{name: family(arrow) for name, arrow, _ in _TABLE},
    "decimal": "number",
    "vector": "vector",
}


def spark_family(kind: Any) -> Family:
    """Return what the values of a column of Spark's are; of arrays to any depth, their elements."""
    while hasattr(kind, "elementType"):
        kind = kind.elementType
    name = re.match(r"\w*", kind.simpleString())
    return _BY_NAME.get(name[0] if name else "", "other")


def fits(kind: pa.DataType, dtype: str, dims: Sequence[int | None]) -> bool:
    """Return whether values of a dtype and the shape `[rows, …]` can be a column of this type.

    Numbers fit numbers of any kind, `[rows, 1]` a plain column as well.
    """
    depth, leaf = 0, kind
    while is_list(leaf):
        depth, leaf = depth + 1, leaf.value_type
    if is_vector(leaf):
        depth, leaf = depth + 1, pa.float64()
    own = _FAMILIES.get("O" if dtype == TEXT else np.dtype(dtype).kind)
    is_single = not depth and prod(n or 0 for n in dims[1:]) == 1
    return own == family(leaf) and (len(dims) - 1 == depth or is_single)
