"""Columns of a DataFrame become what a model takes; which of its rows it cannot take.

Runs in: driver, feeder
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import pyarrow as pa
from pyspark.ml.linalg import MatrixUDT, VectorUDT
from pyspark.sql import types as t

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.feed.values.columns import convert
from sparkdl.feed.values.decode import is_list
from sparkdl.feed.values.ndarrays import Array, lengths
from sparkdl.ml.estimators.source import Signature, Tensor, only_one

TEXT = "string"
_WHOLE = "iu"


@dataclass(frozen=True)
class InputColumn:
    """A column and the model's input that it feeds."""

    name: str
    tensor: Tensor


def input_columns(
    mapping: Mapping[str, str], signature: Signature, schema: t.StructType
) -> tuple[InputColumn, ...]:
    """Return which columns feed which inputs.

    Args:
        mapping: column to input; a name may end in `:0`, as TensorFlow 1 had it, and the only one
            may be another than the model's, see `only_one`. What names no input, as that of the
            labels in training, is left out.

    Raises:
        ConfigError: if an input has no column, or two, or one that is missing or of a type that
            cannot feed it.
    """
    inputs = [tensor.removesuffix(":0") for tensor in mapping.values()]
    if only := only_one(inputs, signature.inputs):
        inputs = [only.name]
    by_input = dict(zip(inputs, mapping, strict=True))
    if any(inputs.count(tensor.name) != 1 for tensor in signature.inputs):
        raise ConfigError(
            f"input_mapping={dict(mapping)} must give each input of the model one column. Its "
            f"inputs are {', '.join(map(str, signature.inputs))}; write "
            "setInputMapping({column: input, …})"
        )
    found = []
    for tensor in signature.inputs:
        column = by_input[tensor.name]
        if column not in schema.names:
            raise ConfigError(
                f"input_mapping names the column {column!r}, and the DataFrame's columns are "
                f"{', '.join(schema.names)}"
            )
        _check(column, schema[column].dataType, tensor)
        found.append(InputColumn(column, tensor))
    return tuple(found)


def _check(column: str, kind: t.DataType, tensor: Tensor) -> None:
    while isinstance(kind, t.ArrayType):
        kind = kind.elementType
    is_text = isinstance(kind, t.StringType | t.BinaryType)
    is_number = isinstance(kind, t.NumericType | t.BooleanType | VectorUDT | MatrixUDT)
    if not (is_text if tensor.dtype == TEXT else is_number):
        raise ConfigError(
            f"column {column!r} is of type {kind.simpleString()}, which cannot feed the model's "
            f"input {tensor}"
        )


def valid_rows(column: pa.Array) -> Array | None:
    """Return which rows hold no null, at any depth of their arrays; None if none does."""
    found = None
    if column.null_count:
        found = np.asarray(column.is_valid().to_numpy(zero_copy_only=False))
    if is_list(column.type):
        elements = valid_rows(column.flatten())
        if elements is not None:
            rows = np.repeat(np.arange(len(column)), lengths(column))
            found = np.ones(len(column), bool) if found is None else found.copy()
            found[rows[~elements]] = False
    return found


def tensor_values(column: pa.Array, wanted: InputColumn) -> Array:
    """Return a column without nulls as the model's input takes it: its dtype, its shape.

    Raises:
        FeedTypeError: if it does not fit; nothing is bent to fit.
    """
    where = f"column {wanted.name!r}"
    values = convert(column, None, where)
    return _shaped(_cast(values, wanted.tensor, where), wanted.tensor, where)


def _cast(values: Array, tensor: Tensor, where: str) -> Array:
    if values.dtype == object or tensor.dtype == TEXT:
        if tensor.dtype == TEXT and values.dtype == object and _is_text(values):
            return values
        raise FeedTypeError(
            f"{where} holds arrays of different lengths, or values of another kind, and cannot "
            f"feed the model's input {tensor}. Make all rows the same length"
        )
    dtype = np.dtype(tensor.dtype)
    if values.dtype == dtype:
        return values
    if dtype.kind in _WHOLE:
        with np.errstate(invalid="ignore"):
            whole = values.astype(dtype)
        if np.array_equal(whole, values):
            return whole
        raise FeedTypeError(
            f"{where} holds numbers that are no {tensor.dtype}, which the model's input {tensor} "
            "takes. Cast the column to what is meant"
        )
    if np.can_cast(values.dtype, dtype, "same_kind"):
        return values.astype(dtype)
    raise FeedTypeError(f"{where} holds {values.dtype}, and the model's input is {tensor}")


def _is_text(values: Array) -> bool:
    return not values.size or isinstance(values.flat[0], str | bytes)


def _shaped(values: Array, tensor: Tensor, where: str) -> Array:
    if tensor.shape is None:
        return values
    own, wanted = values.shape[1:], tensor.shape[1:]
    if own == wanted:
        return values
    if None not in wanted and prod(own) == prod(n or 0 for n in wanted):
        return values.reshape(len(values), *(n or 0 for n in wanted))
    is_alike = len(own) == len(wanted) and all(
        n in (None, size) for n, size in zip(wanted, own, strict=True)
    )
    if is_alike:
        return values
    raise FeedTypeError(
        f"{where} holds rows of shape {list(own)}, and the model's input is {tensor}"
    )
