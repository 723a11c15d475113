"""The columns that a model's outputs become."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyspark.sql import types as t
from pyspark.sql.pandas.types import from_arrow_type

from sparkdl.core.errors import ConfigError, InferenceError
from sparkdl.driver.executors.scored import arrow_schema
from sparkdl.ml.scoring.source import Signature, Tensor, only_one
from sparkdl.spark_versions import declared_type
from sparkdl.values.ndarrays import Array, is_list, is_vector
from sparkdl.values.results import build
from sparkdl.values.types import BY_DTYPE, TEXT, fits

How = Literal["as it is", "scores", "softmax", "class", "function"]
VECTOR = "vector"


@dataclass(frozen=True)
class OutputColumn:
    """A column and the model's output that fills it.

    Attributes:
        how: `scores`: one score for each class; where the model gives a single one, those of both
            classes. `softmax`: the probabilities, of logits. `class`: the number of the class with
            the highest score. `function`: what a function of the user's returns, an array, or
            values one by one.
        complement: what a single score and that of the other class add up to: 1 for
            probabilities, 0 for logits.
        classes: the labels that stand for the numbers of classes; empty for the numbers.
    """

    name: str
    tensor: str
    type: pa.DataType
    how: How = "as it is"
    complement: float = 0.0
    classes: tuple[str, ...] = ()

    def column(self, values: Any) -> pa.Array:
        """Return the model's output, [rows, …], as an array of the declared type."""
        if self.how == "function":
            if not isinstance(values, list | tuple | np.ndarray):
                values = np.asarray(values)
            if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
                return build(list(values), pa.field(self.name, self.type), whose="the function")
        elif self.how == "softmax":
            values = _softmax(values)
        elif self.how != "as it is":
            values = _scores(values, self.complement)
        if self.how == "class":
            values = values.argmax(axis=1)
            values = np.array(self.classes, object)[values] if self.classes else values
        if not fits(self.type, str(values.dtype), values.shape):
            raise InferenceError(
                f"the model's output {self.tensor!r} is {values.dtype} "
                f"{['rows', *values.shape[1:]]}, and column {self.name!r} is declared as "
                f"{self.type}. {self._remedy}"
            )
        try:
            return _array(values, self.type)
        except pa.ArrowException as error:
            raise InferenceError(
                f"the model's output {self.tensor!r} does not fit column {self.name!r} of type "
                f"{self.type}: {error}. {self._remedy}"
            ) from None

    @property
    def _remedy(self) -> str:
        if self.how == "function":
            return "Declare another type in schema=, or convert the results"
        return (
            f"Declare another type: setOutputTypes({{{self.name!r}: …}}), for example 'binary' for "
            "bytes that are no text"
        )


def type_encoded(kind: Any) -> bytes:
    return bytes(pa.schema([("", kind)]).serialize())


def type_decoded(_: type, data: bytes) -> pa.DataType:
    (found,) = pa.ipc.read_schema(pa.py_buffer(data)).types
    return found


def mapped_outputs(
    mapping: Mapping[str, str], types: Mapping[str, str], signature: Signature
) -> tuple[t.StructType, tuple[OutputColumn, ...]]:
    """Return the columns for the outputs that are mapped, in the mapping's order.

    Args:
        mapping: output to column; empty for all outputs, under their own names; where they are not
            known, under those of `types`, in order. The only one may be called otherwise, see
            `only_one`.
        types: column to `vector` or to a type of Spark.
    """
    # Names of TensorFlow 1 end in the place of the operation's output.
    chosen = {tensor.removesuffix(":0"): column for tensor, column in mapping.items()}
    by_name = {tensor.name: tensor for tensor in signature.outputs}
    if by_name:
        if only := only_one(list(chosen), signature.outputs):
            chosen = dict.fromkeys([only.name], *chosen.values())
        chosen = chosen or {name: name for name in by_name}
        if unknown := [name for name in chosen if name not in by_name]:
            raise ConfigError(
                f"output_mapping names {', '.join(map(repr, unknown))}, and the model's outputs "
                f"are {', '.join(map(str, signature.outputs))}; write "
                "setOutputMapping({output: column})"
            )
        kinds = [_type(by_name[name], types.get(column)) for name, column in chosen.items()]
    else:
        chosen = chosen or {f"output_{index}": column for index, column in enumerate(types)}
        columns = chosen.values() or ["scores"]
        if missing := [column for column in columns if column not in types]:
            raise ConfigError(
                f"the model does not contain its outputs' types: declare {', '.join(missing)}, for "
                f"example setOutputTypes({{{missing[0]!r}: 'array<float>'}})"
            )
        kinds = [_declared(types[column]) for column in chosen.values()]
    check_types(types, chosen.values())
    schema = t.StructType(list(map(t.StructField, chosen.values(), kinds)))
    fields = zip(chosen.items(), arrow_schema(schema), strict=True)
    return schema, tuple(OutputColumn(c, name, field.type) for (name, c), field in fields)


def check_types(types: Mapping[str, str], columns: Collection[str]) -> None:
    if unknown := [name for name in types if name not in columns]:
        raise ConfigError(
            f"output_types names {', '.join(map(repr, unknown))}: must name columns of the "
            f"outputs, which are {', '.join(columns)}"
        )


def class_outputs(
    tensor: Tensor,
    score_col: str,
    prediction_col: str,
    complement: float,
    logits_col: str | None = None,
) -> tuple[t.StructType, tuple[OutputColumn, ...]]:
    """Return a classifier's columns: a vector of scores, and the class as a double, or its label.

    With `logits_col` there are logits as well; of known logits `score_col` has the probabilities.
    """
    rank = 0 if tensor.shape is None else len(tensor.shape)
    if rank > 2 or tensor.dtype == TEXT or not _dims(tensor, rank or 1):
        raise ConfigError(
            f"the model's output {tensor} must be scores of classes: float [rows] or [rows, "
            "classes]"
        )
    columns: dict[str, How] = {score_col: "softmax" if tensor.is_logits else "scores"}
    columns |= {logits_col: "scores"} if logits_col else {}
    fields = [t.StructField(column, _declared(VECTOR)) for column in columns]
    kind = t.StringType() if tensor.classes else t.DoubleType()
    schema = t.StructType([*fields, t.StructField(prediction_col, kind)])
    columns |= {prediction_col: "class"}
    return schema, tuple(
        OutputColumn(
            *(name, tensor.name, field.type, how, complement),
            classes=tensor.classes if how == "class" else (),
        )
        for (name, how), field in zip(columns.items(), arrow_schema(schema), strict=True)
    )


def _type(tensor: Tensor, declared: str | None) -> t.DataType:
    dims = _dims(tensor, 1)
    own = BY_DTYPE.get(tensor.dtype)
    if own is None:
        raise ConfigError(
            f"Spark has no type for the model's output {tensor}. Leave it out of output_mapping, "
            "or cast it within the model"
        )
    for _ in dims[1:]:
        own = pa.list_(own)
    if declared is None:
        return from_arrow_type(own)
    kind = _declared(declared)
    (field,) = arrow_schema(t.StructType([t.StructField(tensor.name, kind)]))
    if not fits(field.type, tensor.dtype, dims):
        raise ConfigError(
            f"output_types: the model's output {tensor} cannot be a column of type {declared}; its "
            f"own type is {from_arrow_type(own).simpleString()}. Declare that, or cast the column "
            "afterwards"
        )
    return kind


def _declared(text: str) -> t.DataType:
    if text == VECTOR:
        from pyspark.ml.linalg import VectorUDT  # with Spark ML a second, that nodes do not need

        return VectorUDT()
    failed = f"output_types: {text!r} is no type of Spark"
    return declared_type(text, failed, "'float' or 'array<float>'")


def _dims(tensor: Tensor, min_rank: int) -> tuple[int | None, ...]:
    shape = tensor.shape
    if shape is None or len(shape) < min_rank or None in shape[1:]:
        raise ConfigError(
            f"the model's output {tensor} has no fixed shape for each row, so no type can be "
            "declared for it. Leave it out of output_mapping, or save the model with fixed shapes"
        )
    # With a fixed number of rows the last batch could not be scored.
    if shape[0] is not None:
        raise ConfigError(
            f"the model's output {tensor} does not have the rows as its first axis. Leave it out "
            "of output_mapping, or save the model for batches of any size"
        )
    return shape


def _scores(values: Array, complement: float) -> Array:
    # Spark's vectors hold doubles.
    scores = values.reshape(len(values), -1).astype(np.float64)
    return scores if scores.shape[1] > 1 else np.hstack([complement - scores, scores])


def _softmax(values: Array) -> Array:
    logits = values.reshape(len(values), -1).astype(np.float64)
    if logits.shape[1] == 1:  # of the second class; that of the first is 0
        logits = np.hstack([np.zeros_like(logits), logits])
    # Less the largest one, or large logits would overflow.
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _array(values: Array, kind: pa.DataType) -> pa.Array:
    if is_vector(kind):
        # Type 1 of Spark's vectors: dense, without size and indices.
        types = pa.array(np.ones(len(values), np.int8))
        size = pa.nulls(len(values), kind.field("size").type)
        indices = pa.nulls(len(values), kind.field("indices").type)
        inner = _array(values.astype(np.float64), kind.field("values").type)
        return pa.StructArray.from_arrays([types, size, indices, inner], fields=list(kind))
    if is_list(kind):
        rows, width = values.shape[:2]
        ends = pa.array(np.arange(rows + 1, dtype=np.int32) * np.int32(width))
        inner = _array(values.reshape(-1, *values.shape[2:]), kind.value_type)
        return pa.ListArray.from_arrays(ends, inner, type=kind)
    flat = values.reshape(-1)
    return pa.array(flat, pa.binary() if flat.dtype == object else None).cast(kind)
