"""What `KerasEstimator` cannot train is refused on the driver, before there are nodes.

Runs in: driver

Types come from the schema; lengths and nulls from the first rows, for all of them would cost a pass
over the data. A null in a later row ends the feeding, see `training.without_nulls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import MatrixUDT, VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.keras_model import check_size, inputs_by_column
from sparkdl.ml.estimators.keras_train import KerasTask
from sparkdl.ml.estimators.source import Signature, Tensor
from sparkdl.ml.estimators.training import VALIDATION, check_columns, column, null_advice
from sparkdl.ml.scoring.inputs import input_columns

SAMPLE_ROWS = 1000
"""So many rows are looked at before the nodes start."""

_NUMBERS = t.NumericType | t.BooleanType | VectorUDT | MatrixUDT
_TEXT = t.StringType | t.BinaryType
Inputs = Mapping[str, Tensor]


def check_schema(
    task: KerasTask, inputs: tuple[Tensor, ...] | None, schema: t.StructType
) -> Inputs:
    """Check columns and their types; return which feeds which of the model's inputs, if known.

    Args:
        inputs: the model's; None if only the nodes can tell.

    Raises:
        ConfigError: if they cannot be trained with; it names the column.
    """
    if task.patience and (task.monitor or "").startswith("val_") and not task.validates:
        raise ConfigError(
            f"early_stopping_monitor={task.monitor!r} needs rows to validate with: set "
            "validation_indicator_col"
        )
    check_columns(schema.names, task.columns)
    for name in task.features:
        if not isinstance(_element(schema, name), _NUMBERS | _TEXT):
            raise _wrong_type(
                schema, name, "features are numbers, vectors, text, or arrays of them"
            )
    if not isinstance(_element(schema, task.label), _NUMBERS):
        advice = "labels are numbers, vectors, or arrays of them"
        if isinstance(_element(schema, task.label), _TEXT):
            advice += ": index text first, for example with pyspark.ml.feature.StringIndexer"
        raise _wrong_type(schema, task.label, advice)
    if task.weight and not isinstance(schema[task.weight].dataType, t.NumericType):
        raise _wrong_type(schema, task.weight, "weights are numbers")
    by_column = inputs_by_column(task.features, inputs) if inputs else {}
    for name, tensor in by_column.items():
        input_columns({name: tensor.name}, Signature((tensor,), ()), schema)
    return by_column


def check_rows(task: KerasTask, inputs: Inputs, nodes: int, rows: DataFrame, feed: str) -> None:
    """Check the first rows: how many there are, nulls, lengths.

    Args:
        feed: `VALIDATION` for the rows that are validated with.

    Raises:
        ConfigError: if they cannot be trained with; it names the column.
    """
    kinds = {name: rows.schema[name].dataType for name in task.columns}
    wanted = [
        part.alias(f"{what}_{place}")
        for place, (name, kind) in enumerate(kinds.items())
        for what, part in (("null", _has_null(column(name), kind)), ("size", _size(name, kind)))
    ]
    found = rows.select(*wanted).take(max(SAMPLE_ROWS, nodes))
    if len(found) < nodes:
        what = "rows to validate with" if feed == VALIDATION else "rows to train on"
        marked = ", by validation_indicator_col" if task.validates else ""
        raise ConfigError(
            f"the DataFrame has {len(found)} {what}{marked}: each of the {nodes} nodes needs one "
            "at least"
        )
    for place, name in enumerate(kinds):
        _check_column(name, [(row[2 * place], row[2 * place + 1]) for row in found], inputs)


def _check_column(name: str, found: list[tuple[bool, int | None]], inputs: Inputs) -> None:
    for number, (has_null, _) in enumerate(found):
        if has_null:
            raise ConfigError(
                f"{null_advice(name)}. It is in row {number} of those that Spark gives first"
            )
    sizes = {size for _, size in found if size is not None}
    if len(sizes) > 1:
        raise ConfigError(
            f"column {name!r} holds {min(sizes)} values in some rows and {max(sizes)} in others; "
            "all rows must have as many"
        )
    if name in inputs:
        for size in sizes:
            check_size(name, size, inputs[name])


def _element(schema: t.StructType, name: str) -> t.DataType:
    kind = schema[name].dataType
    while isinstance(kind, t.ArrayType):
        kind = kind.elementType
    return kind


def _wrong_type(schema: t.StructType, name: str, advice: str) -> ConfigError:
    kind = schema[name].dataType.simpleString()
    return ConfigError(f"column {name!r} is of type {kind}, and {advice}")


def _has_null(values: Column, kind: t.DataType) -> Column:
    if not isinstance(kind, t.ArrayType):
        return values.isNull()
    element = kind.elementType
    return values.isNull() | f.exists(values, lambda each: _has_null(each, element))


def _size(name: str, kind: t.DataType) -> Column:
    """Return how many values a row holds; null where only the nodes can tell."""
    values: Any = column(name)
    if isinstance(kind, VectorUDT):
        return f.when(values.isNotNull(), f.size(vector_to_array(values)))
    while isinstance(kind, t.ArrayType) and isinstance(kind.elementType, t.ArrayType):
        values, kind = f.flatten(values), kind.elementType
    if isinstance(kind, t.ArrayType):
        is_single = isinstance(kind.elementType, t.NumericType | t.BooleanType | _TEXT)
        return f.size(values) if is_single else f.lit(None).cast("int")
    return f.lit(None if isinstance(kind, MatrixUDT) else 1).cast("int")
