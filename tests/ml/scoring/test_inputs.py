"""Columns become what a model takes, or are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as t

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.ml.scoring.inputs import InputColumn, input_columns, input_values, valid_rows
from sparkdl.ml.scoring.source import Signature, Tensor

VECTOR = pa.struct(
    [
        pa.field("type", pa.int8(), nullable=False),
        pa.field("size", pa.int32()),
        pa.field("indices", pa.list_(pa.int32())),
        pa.field("values", pa.list_(pa.float64())),
    ]
)


def values(column: pa.Array, dtype: str, shape: Any) -> Any:
    return input_values((InputColumn("c", Tensor("x", dtype, shape)),), [column])["x"]


def test_arrays_are_handed_on_without_a_copy() -> None:
    column = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32()))
    found = values(column, "float32", (None, 2))
    assert found.tolist() == [[1, 2], [3, 4]]
    assert found.base is not None


@pytest.mark.parametrize(
    ("column", "dtype", "shape", "expected"),
    [
        (pa.array([1.5, 2.5]), "float32", (None,), [1.5, 2.5]),
        (pa.array([1, 2]), "float32", (None, 1), [[1], [2]]),
        (pa.array([1.0, 2.0]), "int32", (None,), [1, 2]),
        (pa.array([True, False]), "float32", (None,), [1, 0]),
        (pa.array([[1.0, 2, 3, 4]]), "float32", (None, 2, 2), [[[1, 2], [3, 4]]]),
        (pa.array([[[1.0], [2.0]]]), "float64", (None, 2), [[1, 2]]),
        (pa.array([[1, 2, 3]]), "int64", (None, None), [[1, 2, 3]]),
        (pa.array([[1, 2, 3]]), "int64", None, [[1, 2, 3]]),
        (pa.array(["a", "é"]), "string", (None,), ["a", "é"]),
        (pa.array([b"a"]), "string", (None, 1), [[b"a"]]),
        (pa.array([["a", "b"]]), "string", (None, 2), [["a", "b"]]),
    ],
)
def test_columns_get_the_dtype_and_the_shape_of_the_input(
    column: pa.Array, dtype: str, shape: Any, expected: Any
) -> None:
    found = values(column, dtype, shape)
    assert found.tolist() == expected
    assert found.dtype == (object if dtype == "string" else np.dtype(dtype))


@pytest.mark.parametrize(
    ("column", "dtype", "shape", "match"),
    [
        (pa.array([1.5]), "int32", (None,), "holds 1.5, which does not fit in int32"),
        (pa.array([float("nan")]), "int32", (None,), "does not fit in int32"),
        (pa.array([2**40]), "int32", (None,), "does not fit in int32"),
        (pa.array([-1]), "uint8", (None,), "does not fit in uint8"),
        (pa.array([1e300]), "float32", (None,), "does not fit in float32"),
        (pa.array([1.5]), "bool", (None,), "which is no bool"),
        (pa.array([[1.0], [1.0, 2.0]]), "float32", (None, 2), "different lengths"),
        (pa.array([[1.0, 2.0, 3.0]]), "float32", (None, 2), r"shape \[3\]"),
        (pa.array([1.0]), "string", (None,), "holds numbers"),
        (pa.array([[1, 2]]), "int64", (None, None, None), r"shape \[2\]"),
    ],
)
def test_nothing_is_bent_to_fit(column: pa.Array, dtype: str, shape: Any, match: str) -> None:
    with pytest.raises(FeedTypeError, match=match) as caught:
        values(column, dtype, shape)
    assert "column 'c'" in str(caught.value)


@pytest.mark.parametrize(
    ("column", "valid"),
    [
        (pa.array([1, 2]), None),
        (pa.array([1, None]), [True, False]),
        (pa.array([[1], [2]]), None),
        (pa.array([[1], None, [None], []]), [True, False, False, True]),
        (pa.array([[[1]], [[None]], [None]]), [True, False, False]),
        (pa.array([None, [1], [None]]).slice(1), [True, False]),
        (pa.array([None], VECTOR), [False]),
    ],
)
def test_rows_with_nulls_are_found_at_any_depth(column: pa.Array, valid: Any) -> None:
    found = valid_rows(column)
    assert (None if found is None else found.tolist()) == valid


SCHEMA = t.StructType(
    [
        t.StructField("v", VectorUDT()),
        t.StructField("a", t.ArrayType(t.ArrayType(t.FloatType()))),
        t.StructField("s", t.StringType()),
        t.StructField("m", t.MapType(t.StringType(), t.LongType())),
        t.StructField("i", t.IntegerType()),
        t.StructField("d", t.DoubleType()),
        t.StructField("j", t.IntegerType()),
    ]
)
NUMBER, WORD = Tensor("n", "float32", (None, 2)), Tensor("w", "string", (None,))


def test_mapping_names_a_column_for_each_input() -> None:
    found = input_columns({"v": "n:0", "s": "w"}, Signature((NUMBER, WORD), ()), SCHEMA)
    assert found == (InputColumn("v", NUMBER), InputColumn("s", WORD))
    (one,) = input_columns({"a": "n", "label": "y"}, Signature((NUMBER,), ()), SCHEMA)
    assert one.name == "a"


def test_columns_of_one_input_are_the_elements_of_its_rows() -> None:
    mapping = {"d": "n", "s": "w", "i": "n"}
    found = input_columns(mapping, Signature((NUMBER, WORD), ()), SCHEMA)
    given = [pa.array([0.5, 1.5]), pa.array([7, 8], pa.int32()), pa.array(["a", "b"])]
    found_values = input_values(found, given)
    assert found_values["n"].tolist() == [[0.5, 7], [1.5, 8]]
    assert found_values["n"].dtype == np.float32
    assert found_values["w"].tolist() == ["a", "b"]


def test_only_input_may_be_asked_for_by_another_name_if_nobody_chose_its_own() -> None:
    keras_tensor = Tensor("keras_tensor", "float32", (None, 2))
    for asked, tensor in (("dense", keras_tensor), ("dense_input", NUMBER)):
        (one,) = input_columns({"v": asked}, Signature((tensor,), ()), SCHEMA)
        assert one == InputColumn("v", tensor)
    with pytest.raises(ConfigError, match="must give each input"):
        input_columns({"v": "wrong"}, Signature((NUMBER,), ()), SCHEMA)
    with pytest.raises(ConfigError, match="must give each input"):
        input_columns({"v": "x", "a": "y"}, Signature((keras_tensor,), ()), SCHEMA)


@pytest.mark.parametrize(
    ("mapping", "match"),
    [
        ({}, r"inputs are n \(float32 \[\?, 2\]\), w"),
        ({"v": "n", "s": "wrong"}, "must give each input"),
        ({"v": "n", "a": "n", "s": "w"}, "column 'v' is of type vector.*2 columns are.*a num"),
        ({"i": "n", "d": "n", "j": "n", "s": "w"}, "3 columns are .* i, d, j; it needs 2 numbers"),
        ({"v": "n", "i": "w", "d": "w"}, "column 'i' is of type int, which cannot feed"),
        ({"v": "n", "gone": "w"}, "no column 'gone'.*columns are v, a, s, m, i, d"),
        ({"v": "w", "s": "n"}, "column 's' is of type string, which cannot feed"),
        ({"m": "n", "s": "w"}, "column 'm' is of type map"),
    ],
)
def test_mapping_that_cannot_work_is_refused_at_once(mapping: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        input_columns(mapping, Signature((NUMBER, WORD), ()), SCHEMA)
