"""Reject data that cannot be trained on, before any node is launched.

Types come from the schema. To check values would cost a pass over the data: nulls end the feeding,
see `training.without_nulls`, and nodes check the lengths of arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.columns import (
    VALIDATION,
    Columns,
    Task,
    by_tensor,
    outputs_by_column,
)
from sparkdl.ml.estimators.training import check_columns
from sparkdl.ml.scoring.inputs import NUMBERS, TEXTS, check_parts, input_columns, leaf_type
from sparkdl.ml.scoring.source import Signature, Tensor

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


def check_rows(task: Task, nodes: int, rows: DataFrame, feed: str) -> None:
    """Check that there is a row for each node.

    Args:
        feed: `VALIDATION` for the rows that are validated with.

    Raises:
        ConfigError: if there are fewer.
    """
    found = len(rows.select(f.lit(1)).take(nodes))
    if found < nodes:
        what = "rows to validate with" if feed == VALIDATION else "rows to train on"
        marked = ", by validation_indicator_col or validation_split" if task.validates else ""
        raise ConfigError(
            f"the DataFrame has {found} {what}{marked}: each of the {nodes} nodes needs one at "
            "least"
        )


def _wrong_type(schema: t.StructType, name: str, advice: str) -> ConfigError:
    kind = schema[name].dataType.simpleString()
    return ConfigError(f"column {name!r} is of type {kind}, and {advice}")
