"""Outputs of a model become columns of declared types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.core.errors import ConfigError, InferenceError
from sparkdl.ml.scoring.columns import class_outputs, mapped_outputs
from sparkdl.ml.scoring.source import Signature, Tensor

pytestmark = pytest.mark.usefixtures("spark_ml")  # which reads types that are declared


def declared(tensor: Tensor, kind: str | None = None) -> Any:
    types = {"c": kind} if kind else {}
    schema, (column,) = mapped_outputs({tensor.name: "c"}, types, Signature((), (tensor,)))
    return schema["c"].dataType, column


@pytest.mark.parametrize(
    ("dtype", "shape", "kind", "values", "expected", "spark"),
    [
        ("int32", (None, 0), None, [[], []], [[], []], "array<int>"),
        ("float32", (None, 1), None, [[1.5]], [[1.5]], "array<float>"),
        ("float32", (None, 1), "double", [[1.5]], [1.5], "double"),
        ("float32", (None,), "double", [1.5], [1.5], "double"),
        ("int64", (None,), "int", [7], [7], "int"),
        ("float32", (None, 2), "array<double>", [[1, 2]], [[1, 2]], "array<double>"),
        ("string", (None,), "binary", [b"\xff"], [b"\xff"], "binary"),
        ("string", (None, 1), "string", [[b"a"]], ["a"], "string"),
    ],
)  # fmt: skip
def test_types_come_from_the_model_or_are_declared(
    dtype: str, shape: Any, kind: str | None, values: Any, expected: Any, spark: str
) -> None:
    found, column = declared(Tensor("y", dtype, shape), kind)
    assert found.simpleString() == spark
    array = np.array(values, object if dtype == "string" else dtype)
    array = array.reshape(len(values), *shape[1:])
    result = column.column(array)
    assert result.type == column.type
    assert result.to_pylist() == expected


@pytest.mark.parametrize(
    ("shape", "complement", "values", "scores", "classes"),
    [
        ((None, 3), 1.0, [[0.1, 0.7, 0.2]], [[0.1, 0.7, 0.2]], [1.0]),
        ((None, 1), 1.0, [[0.75], [0.25]], [[0.25, 0.75], [0.75, 0.25]], [1.0, 0.0]),
        ((None,), 0.0, [2.0, -3.0], [[-2.0, 2.0], [3.0, -3.0]], [1.0, 0.0]),
    ],
)
def test_classes_have_scores_and_the_highest_wins(
    shape: Any, complement: float, values: Any, scores: Any, classes: Any
) -> None:
    tensor = Tensor("y", "float64", shape)
    schema, (vector, number) = class_outputs(tensor, "p", "c", complement)
    assert schema.simpleString() == "struct<p:vector,c:double>"
    array = np.array(values)
    found = [row["values"] for row in vector.column(array).to_pylist()]
    assert np.allclose(found, scores)
    assert number.column(array).to_pylist() == classes


def test_without_a_mapping_all_outputs_have_their_own_names() -> None:
    outputs = (Tensor("a", "float32", (None,)), Tensor("b", "string", (None,)))
    schema, columns = mapped_outputs({}, {}, Signature((), outputs))
    assert schema.simpleString() == "struct<a:float,b:string>"
    assert [column.tensor for column in columns] == ["a", "b"]


@pytest.mark.parametrize(
    ("tensor", "kind", "match"),
    [
        (Tensor("y", "float32", (None, None)), None, "no fixed shape for each row"),
        (Tensor("y", "float32", None), None, "no fixed shape for each row"),
        (Tensor("y", "float32", ()), None, "no fixed shape for each row"),
        (Tensor("y", "float32", (4, 2)), None, "rows as its first axis"),
        (Tensor("y", "complex64", (None,)), None, "no type for the model's output"),
        (Tensor("y", "float32", (None,)), "vector", "cannot be a column of type vector"),
        (Tensor("y", "float32", (None, 2)), "double", "its own type is array<float>"),
        (Tensor("y", "float32", (None,)), "no type", "is no type of Spark"),
    ],
)
def test_what_cannot_be_declared_is_refused(tensor: Tensor, kind: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        declared(tensor, kind)


def test_names_that_are_not_there_are_refused() -> None:
    signature = Signature((), (Tensor("y", "float32", (None,)),))
    with pytest.raises(ConfigError, match=r"names 'z', and the model's outputs are y \(float32"):
        mapped_outputs({"z": "c"}, {}, signature)
    with pytest.raises(ConfigError, match="output_types names 'd'"):
        mapped_outputs({"y": "c"}, {"d": "vector"}, signature)


@pytest.mark.parametrize(("own", "asked"), [("output_0", "dense"), ("dense", "output_0:0")])
def test_only_output_may_have_another_name_if_nobody_chose_its_own(own: str, asked: str) -> None:
    tensors = (Tensor(own, "float32", (None,)), Tensor("b", "float32", (None,)))
    _, (column,) = mapped_outputs({asked: "c"}, {}, Signature((), tensors[:1]))
    assert (column.tensor, column.name) == (own, "c")
    with pytest.raises(ConfigError, match="and the model's outputs are"):
        mapped_outputs({asked: "c"}, {}, Signature((), tensors))


def test_bytes_that_are_no_text_say_what_to_declare() -> None:
    _, column = declared(Tensor("y", "string", (None,)))
    with pytest.raises(InferenceError, match="'binary' for bytes that are no text"):
        column.column(np.array([b"\xff"], object))
