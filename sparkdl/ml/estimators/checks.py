"""Reject data that cannot be trained on, before any node is launched.

Runs in: driver

Types come from the schema, lengths and nulls from the first rows: to check all rows would cost a
pass over the data. A null in a later row ends the feeding, see `training.without_nulls`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.columns import (
    VALIDATION,
    Columns,
    Task,
    by_tensor,
    check_size,
    outputs_by_column,
)
from sparkdl.ml.estimators.source import Signature, Tensor
from sparkdl.ml.estimators.training import check_columns, column, null_advice
from sparkdl.ml.scoring.inputs import NUMBERS, TEXTS, check_parts, input_columns, leaf_type

SAMPLE_ROWS = 1000
"""How many rows are checked before the nodes start."""
Inputs = Mapping[str, Tensor]
"""Column to model input."""


def check_schema(task: Task, schema: t.StructType) -> None:
    """Check columns and their types.

    Raises:
        ConfigError: if they cannot be trained with; it names the column.
    """
    columns, stopping = task.columns, task.stopping
    if stopping.patience and (stopping.monitor or "").startswith("val_") and not task.validates:
        raise ConfigError(
            f"early_stopping_monitor={stopping.monitor!r} needs rows to validate with: set "
            "validation_indicator_col, or validation_split"
        )
    check_columns(schema.names, columns.names)
    for name in columns.features:
        if not isinstance(leaf_type(schema[name].dataType), NUMBERS | TEXTS):
            raise _wrong_type(
                schema, name, "features must be numbers, vectors, text, or arrays of them"
            )
    for name in columns.labels:
        if not isinstance(leaf_type(schema[name].dataType), NUMBERS):
            advice = "labels must be numbers, vectors, or arrays of them"
            if isinstance(leaf_type(schema[name].dataType), TEXTS):
                advice += ": index text first, for example with pyspark.ml.feature.StringIndexer"
            raise _wrong_type(schema, name, advice)
    if columns.weight and not isinstance(schema[columns.weight].dataType, t.NumericType):
        raise _wrong_type(schema, columns.weight, "weights must be numbers")


def check_fits(inputs: Inputs, schema: t.StructType) -> None:
    """Check that columns can feed the model's inputs.

    Raises:
        ConfigError: if one cannot.
    """
    mapping = {name: tensor.name for name, tensor in inputs.items()}
    tensors = {tensor.name: tensor for tensor in inputs.values()}
    input_columns(mapping, Signature(tuple(tensors.values()), ()), schema)


def check_labels(columns: Columns, outputs: Sequence[Tensor], schema: t.StructType) -> None:
    """Check that columns can be the labels of the model's outputs, as far as it knows them.

    Raises:
        ConfigError: if an output has no labels; or several that are no numbers, or not as many as
            its elements.
    """
    if columns.has_plain_label or not outputs:
        return
    by_column = outputs_by_column(columns.labels, outputs)
    tensors = {tensor.name: tensor for tensor in outputs}
    for output, names in by_tensor(by_column).items():
        if len(names) > 1:
            check_parts({name: schema[name].dataType for name in names}, tensors[output])


def check_rows(task: Task, inputs: Inputs, nodes: int, rows: DataFrame, feed: str) -> None:
    """Check the first rows: how many there are, nulls, lengths.

    Args:
        feed: `VALIDATION` for the rows that are validated with.

    Raises:
        ConfigError: if they cannot be trained with; it names the column.
    """
    kinds = {name: rows.schema[name].dataType for name in task.columns.names}
    wanted = [
        part.alias(f"{what}_{place}")
        for place, (name, kind) in enumerate(kinds.items())
        for what, part in (
            ("null", _has_null(column(name), kind)),
            ("size", _size(name, kind)),
            ("jagged", _is_jagged(column(name), kind)),
        )
    ]
    # Only what is asked of each row comes to the driver, and not the values.
    found = rows.select(*wanted).take(max(SAMPLE_ROWS, nodes))
    if len(found) < nodes:
        what = "rows to validate with" if feed == VALIDATION else "rows to train on"
        marked = ", by validation_indicator_col or validation_split" if task.validates else ""
        raise ConfigError(
            f"the DataFrame has {len(found)} {what}{marked}: each of the {nodes} nodes needs one "
            "at least"
        )
    for place, name in enumerate(kinds):
        _check_column(name, [tuple(row[3 * place : 3 * place + 3]) for row in found], inputs)


def _check_column(name: str, found: list[tuple[Any, ...]], inputs: Inputs) -> None:
    """Check a column; `found` has for each row whether it has a null, its size, if it is jagged."""
    for number, (has_null, _, is_jagged) in enumerate(found):
        where = f"row {number} of the first rows that Spark returned"
        if has_null:
            raise ConfigError(f"{null_advice(name)}. It is in {where}")
        if is_jagged:
            raise ConfigError(
                f"column {name!r} holds arrays of arrays of different lengths, in {where}: all "
                "must be as long. Fill them up in the DataFrame, or feed them to a train_fn, which "
                "reads them with ctx.batches"
            )
    sizes = {size for _, size, _ in found if size is not None}
    if len(sizes) > 1:
        raise ConfigError(
            f"column {name!r} holds {min(sizes)} values in some rows and {max(sizes)} in others; "
            "all rows must have as many, unless a train_fn reads them with pad="
        )
    if name in inputs and sum(tensor == inputs[name] for tensor in inputs.values()) == 1:
        for size in sizes:
            check_size(name, size, inputs[name])


def _wrong_type(schema: t.StructType, name: str, advice: str) -> ConfigError:
    kind = schema[name].dataType.simpleString()
    return ConfigError(f"column {name!r} is of type {kind}, and {advice}")


def _has_null(values: Column, kind: t.DataType) -> Column:
    if not isinstance(kind, t.ArrayType):
        return values.isNull()
    element = kind.elementType
    return values.isNull() | f.exists(values, lambda each: _has_null(each, element))


def _is_jagged(values: Column, kind: t.DataType) -> Column:
    """Return whether the arrays within a row's array differ in length, at any depth."""
    found = f.lit(False)
    while isinstance(kind, t.ArrayType) and isinstance(kind.elementType, t.ArrayType):
        sizes = f.array_distinct(f.transform(values, lambda each: f.size(each)))
        found = found | (f.size(sizes) > 1)
        values, kind = f.flatten(values), kind.elementType
    return f.coalesce(found, f.lit(False))


def _size(name: str, kind: t.DataType) -> Column:
    """Return how many values a row holds; null where only the nodes can know."""
    values: Any = column(name)
    if isinstance(kind, VectorUDT):
        # `size` of a null is -1 in Spark, or null, as a setting says.
        return f.when(values.isNotNull(), f.size(vector_to_array(values)))
    while isinstance(kind, t.ArrayType) and isinstance(kind.elementType, t.ArrayType):
        values, kind = f.flatten(values), kind.elementType
    if isinstance(kind, t.ArrayType):
        is_single = isinstance(kind.elementType, t.NumericType | t.BooleanType | TEXTS)
        return f.size(values) if is_single else f.lit(None).cast("int")
    return f.lit(1).cast("int")
