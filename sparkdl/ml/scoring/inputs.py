"""The columns that a model takes from a DataFrame, and their values as it takes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import numpy as np
import pyarrow as pa
from pyspark.sql import types as t

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.core.texts import did_you_mean
from sparkdl.driver.executors.scored import check_distinct
from sparkdl.ml.scoring.source import ANY, NUMBER, Signature, Tensor, only_one
from sparkdl.values.columns import as_csr, convert, is_csr
from sparkdl.values.ndarrays import Array, is_list, lengths
from sparkdl.values.types import NUMERIC, TEXT, spark_family

_WHOLE = "iu"


@dataclass(frozen=True)
class InputColumn:
    """A column and the model's input that it feeds; numbers of several make an input's rows.

    Attributes:
        is_sparse: it feeds a `csr_array` of vectors.
    """

    name: str
    tensor: Tensor
    is_sparse: bool = False


def as_mapping(columns: str | Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Map each column to the model's input or output that it feeds; empty if no name was given."""
    if isinstance(columns, str):
        return {columns: ""}
    return dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns, "")


def check_sparse(names: Sequence[str], inputs: Collection[str], schema: t.StructType) -> None:
    """Check that columns can feed sparse vectors; `inputs` are the columns that feed any."""
    if not isinstance(names, list | tuple):
        raise ConfigError(f"sparse={names!r}: must be a list of the names of columns of vectors")
    for name in names:
        if name not in inputs:
            raise ConfigError(
                f"sparse= names {name!r}: must name columns of the inputs, which are "
                f"{', '.join(inputs)}"
            )
        if (kind := schema[name].dataType.simpleString()) != "vector":
            raise ConfigError(
                f"sparse= names {name!r}, of type {kind}: must name columns of Spark ML vectors"
            )


def input_columns(
    mapping: Mapping[str, str],
    signature: Signature,
    schema: t.StructType,
    sparse: Sequence[str] = (),
) -> tuple[InputColumn, ...]:
    """Return the columns that feed each input.

    Args:
        mapping: column to input; a name may end in `:0`, as TensorFlow 1 had it, and the only one
            may be another than the model's, see `only_one`. Columns of numbers that name the same
            input are the elements of its rows, in their order. A column that names no input, such
            as the labels of a training, is left out.
    """
    inputs = [tensor.removesuffix(":0") for tensor in mapping.values()]
    if only := only_one(list(dict.fromkeys(inputs)), signature.inputs):
        inputs = [only.name] * len(inputs)
    by_input: dict[str, list[str]] = {}
    for column, name in zip(mapping, inputs, strict=True):
        by_input.setdefault(name, []).append(column)
    if any(tensor.name not in by_input for tensor in signature.inputs):
        raise ConfigError(
            f"input_mapping={dict(mapping)} must give each input of the model a column. Its "
            f"inputs are {', '.join(map(str, signature.inputs))}; write "
            "setInputMapping({column: input, …})"
        )
    found = []
    for tensor in signature.inputs:
        columns = by_input[tensor.name]
        for column in columns:
            if column not in schema.names:
                raise ConfigError(
                    f"the DataFrame has no column {column!r}, which feeds the model's input "
                    f"{tensor}; its columns are {', '.join(schema.names)}"
                    f"{did_you_mean(column, schema.names)}"
                )
            check_distinct(schema.names, [column])
            _check(column, schema[column].dataType, tensor)
        if len(columns) > 1:
            check_parts({name: schema[name].dataType for name in columns}, tensor)
        if len(tensor.shape or (0, 0)) != 2 and (both := [x for x in columns if x in sparse]):
            raise ConfigError(
                f"sparse= names {both[0]!r}, which feeds {tensor}: must feed [rows, n]. Leave it "
                "out of sparse=, or of input_shapes"
            )
        found += [InputColumn(column, tensor, column in sparse) for column in columns]
    check_sparse(sparse, [column.name for column in found], schema)
    return tuple(found)


def check_parts(kinds: Mapping[str, t.DataType], tensor: Tensor) -> None:
    """Check that columns can be the elements of a model's input, or the labels of an output."""
    for column, kind in kinds.items():
        is_number = spark_family(kind) in ("boolean", "number") and kind.typeName() != "array"
        if not is_number or tensor.dtype in (TEXT, ANY):
            raise ConfigError(
                f"column {column!r} is of type {kind.simpleString()}, and {len(kinds)} columns "
                f"are the model's {tensor}: each must be a number. Join arrays and vectors with "
                "pyspark.ml.feature.VectorAssembler"
            )
    dims = (tensor.shape or (None, None))[1:]
    if None not in dims and prod(n or 0 for n in dims) != len(kinds):
        raise ConfigError(
            f"{len(kinds)} columns are the model's {tensor}: {', '.join(kinds)}; it needs "
            f"{prod(n or 0 for n in dims)} numbers a row"
        )


def _check(column: str, kind: t.DataType, tensor: Tensor) -> None:
    while isinstance(kind, t.ArrayType):
        kind = kind.elementType
    if tensor.dtype == ANY:
        takes = not isinstance(kind, t.StructType | t.MapType | t.NullType)
        advice = "Give its parts as separate columns"
    else:
        takes = spark_family(kind) in (("text",) if tensor.dtype == TEXT else NUMERIC)
        advice = "Cast it, or map another column to the input"
    if not takes:
        raise ConfigError(
            f"column {column!r} is of type {kind.simpleString()}, which cannot feed the model's "
            f"input {tensor}. {advice}"
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


def input_values(inputs: Sequence[InputColumn], columns: Sequence[pa.Array]) -> dict[str, Array]:
    """Return columns without nulls as the model's inputs, by their names."""
    found: dict[str, dict[str, Array]] = {}
    for wanted, column in zip(inputs, columns, strict=True):
        make = as_csr if wanted.is_sparse else convert
        values = make(column, where=f"column {wanted.name!r}")
        found.setdefault(wanted.tensor.name, {})[wanted.name] = values
    tensors = {wanted.tensor.name: wanted.tensor for wanted in inputs}
    return {name: model_input(parts, tensors[name]) for name, parts in found.items()}


def model_input(columns: Mapping[str, Array], tensor: Tensor) -> Array:
    """Return a model's input in its dtype and shape, for training and scoring alike.

    The numbers of several columns are floats where it takes any, as a matrix of features is.
    """
    is_part = len(columns) > 1
    wanted = replace(tensor, shape=(None,)) if is_part else tensor
    parts = [_shaped(_cast(x, wanted, f"column {n!r}"), wanted, n) for n, x in columns.items()]
    if not is_part:
        return parts[0]
    values = np.stack(parts, axis=1)
    if tensor.dtype == NUMBER and values.dtype.kind in _WHOLE:
        values = values.astype(np.float32)
    return _shaped(values, tensor, ", ".join(columns))


def _cast(values: Array, tensor: Tensor, where: str) -> Array:
    if tensor.dtype == ANY:
        return values
    if is_csr(values) and tensor.dtype != TEXT:
        csr: Any = values
        data = _cast(csr.data, tensor, where)
        return cast(Array, type(csr)((data, csr.indices, csr.indptr), shape=csr.shape))
    is_object = values.dtype == object
    is_text = is_object and (not values.size or isinstance(values.flat[0], str | bytes))
    if is_object and not is_text:
        raise FeedTypeError(
            f"{where} holds arrays of different lengths, and cannot feed the model's input "
            f"{tensor}. Make all rows the same length"
        )
    if is_text != (tensor.dtype == TEXT):
        raise FeedTypeError(
            f"{where} holds {'text' if is_text else 'numbers'}, and the model's input needs "
            f"{tensor}. Cast the column, or feed another one"
        )
    if is_text or tensor.dtype == NUMBER:
        return values
    return fitting(values, np.dtype(tensor.dtype), where, f"the model's input {tensor}")


def fitting(values: Array, dtype: np.dtype[np.generic], where: str, what: str) -> Array:
    """Return numbers of any shape in a dtype that holds them, for training and scoring alike.

    Whole numbers stay what they are. Floats may lose digits, but no finite number becomes infinite,
    and none becomes a number of another kind.
    """
    if values.dtype == dtype:
        return values
    advice = f"{dtype}, the dtype of {what}. Cast the column first"
    if dtype.kind not in _WHOLE and not np.can_cast(values.dtype, dtype, "same_kind"):
        raise FeedTypeError(f"{where} holds {values.dtype}, which is no {advice}")
    # NaN and numbers out of range become arbitrary ones here; the comparisons find them.
    with np.errstate(invalid="ignore", over="ignore"):
        found = values.astype(dtype)
    fits = found == values if dtype.kind in _WHOLE else np.isfinite(found) | ~np.isfinite(values)
    if not fits.all():
        raise FeedTypeError(f"{where} holds {values[~fits][0]}, which does not fit in {advice}")
    return found


def check_weights(values: Array, column: str) -> None:
    fits = np.isfinite(values) & (values >= 0)
    if not fits.all():
        raise FeedTypeError(
            f"column {column!r} holds the weight {values[~fits][0]}: the weight of a row must be "
            "finite, and 0 or more. Leave such rows out, or replace it: greatest(col, lit(0))"
        )


def check_classes(values: Array, column: str) -> None:
    if values.dtype.kind == "f" and not (fits := values == np.round(values)).all():
        raise FeedTypeError(
            f"column {column!r} holds {values[~fits][0]}, and the loss takes the numbers of "
            "classes: index the classes from 0, for example with pyspark.ml.feature.StringIndexer"
        )


def _shaped(values: Array, tensor: Tensor, column: str) -> Array:
    if tensor.shape is None:
        return values
    own, wanted = values.shape[1:], tensor.shape[1:]
    pairs = zip(wanted, own, strict=False)
    if len(own) == len(wanted) and all(n in (None, size) for n, size in pairs):
        return values
    # Vectors of Spark ML and stored images are flat.
    if not (None in wanted or is_csr(values)) and prod(own) == prod(n or 0 for n in wanted):
        return values.reshape(len(values), *(n or 0 for n in wanted))
    raise FeedTypeError(
        f"column {column!r} holds rows of shape {list(own)}, and the model's input is {tensor}. "
        "Give it that shape, or map another one to the input"
    )
