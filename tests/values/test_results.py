"""Results become columns of the declared types, or an error that names column and value."""

from __future__ import annotations

from collections import namedtuple
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.core.errors import InferenceError
from sparkdl.values.results import result_columns
from sparkdl.values.rows import encode_rows

Point = namedtuple("Point", "x y")
FLOATS = pa.list_(pa.field("element", pa.float32()))


def columns(results: list[Any], **types: pa.DataType) -> list[list[Any]]:
    """Return the columns of results, encoded as `batch_results` does."""
    schema = pa.schema(list(types.items()))
    found: list[list[Any]] = [[] for _ in types]
    for batch in encode_rows(results):
        arrays = result_columns(batch, schema)
        assert [array.type for array in arrays] == [field.type for field in schema]
        for place, array in enumerate(arrays):
            found[place] += array.to_pylist()
    return found


@pytest.mark.parametrize(
    ("results", "kind", "expected"),
    [
        ([1.5, 2.5], pa.float32(), [1.5, 2.5]),
        ([1, 2], pa.float64(), [1.0, 2.0]),
        ([1, None, 3], pa.int32(), [1, None, 3]),
        ([np.float32(1.5), np.float32(2)], pa.float64(), [1.5, 2.0]),
        ([np.int64(3)], pa.int8(), [3]),
        ([2.0, 3.0], pa.int64(), [2, 3]),
        ([True, False], pa.bool_(), [True, False]),
        ([np.bool_(True)], pa.bool_(), [True]),
        (["a", None, ""], pa.string(), ["a", None, ""]),
        (["a"], pa.large_string(), ["a"]),
        ([b"a", b""], pa.binary(), [b"a", b""]),
        ([Decimal("1.5")], pa.decimal128(10, 2), [Decimal("1.50")]),
        ([None, None], pa.string(), [None, None]),
        ([np.array([1.0, 2.0]), np.array([3.0])], FLOATS, [[1.0, 2.0], [3.0]]),
        ([np.zeros(2, np.float32), np.ones(2, np.float32)], FLOATS, [[0, 0], [1, 1]]),
        ([np.zeros(0)], FLOATS, [[]]),
        ([[1.0, 2.0], [3.0, 4.0]], FLOATS, [[1.0, 2.0], [3.0, 4.0]]),
        ([[1], [], [2, 3]], FLOATS, [[1.0], [], [2.0, 3.0]]),
        ([(1, 2), (3, 4, 5)], FLOATS, [[1, 2], [3, 4, 5]]),
        ([np.eye(2)], pa.list_(FLOATS), [[[1, 0], [0, 1]]]),
        ([np.eye(2), np.ones((1, 3))], pa.list_(FLOATS), [[[1, 0], [0, 1]], [[1, 1, 1]]]),
        ([{"a": 1}, {"b": 2, "c": 3}], pa.map_(pa.string(), pa.int64()),
         [[("a", 1)], [("b", 2), ("c", 3)]]),
        ([Point(1, 2.0)], pa.struct({"x": pa.int64(), "y": pa.float64()}), [{"x": 1, "y": 2.0}]),
        ([{"y": 2.0, "x": 1}], pa.struct({"x": pa.int64(), "y": pa.float64()}),
         [{"x": 1, "y": 2.0}]),
    ],
)  # fmt: skip
def test_one_column_holds_the_results(results: list[Any], kind: pa.DataType, expected: Any) -> None:
    assert columns(results, y=kind) == [expected]


@pytest.mark.parametrize(
    "results",
    [[(1, "a"), (2, "b")], [[1, "a"], [2, "b"]], [{"s": "a", "n": 1}, {"n": 2, "s": "b"}]],
)
def test_columns_are_filled_by_place_or_by_name(results: list[Any]) -> None:
    assert columns(results, n=pa.int32(), s=pa.string()) == [[1, 2], ["a", "b"]]


def test_time_without_a_zone_is_local_time() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 6)
    ((found,),) = columns([moment], t=pa.timestamp("us", "UTC"))
    assert found == moment.astimezone(timezone.utc)
    assert columns([moment], t=pa.timestamp("us")) == [[moment]]


def test_spark_vectors_are_stored_as_spark_does() -> None:
    linalg = pytest.importorskip("pyspark.ml.linalg")
    udt = pa.struct(
        [
            pa.field("type", pa.int8(), nullable=False),
            pa.field("size", pa.int32()),
            pa.field("indices", pa.list_(pa.field("element", pa.int32(), nullable=False))),
            pa.field("values", pa.list_(pa.field("element", pa.float64(), nullable=False))),
        ]
    )
    ((dense,),) = columns([linalg.Vectors.dense(1.0, 2.0)], v=udt)
    ((sparse,),) = columns([linalg.Vectors.sparse(9, [3], [4.0])], v=udt)
    assert dense == {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]}
    assert sparse == {"type": 0, "size": 9, "indices": [3], "values": [4.0]}


@pytest.mark.parametrize(
    ("results", "kind", "words"),
    [
        (["x"], pa.float32(), "'y' is declared as float, and a result is a str, 'x'"),
        ([1.0, 1.5], pa.int64(), "a float, 1.5: it has a fraction"),
        ([300], pa.int8(), "a int, 300"),
        ([True], pa.int64(), "a bool, True: a bool is no number"),
        ([1], pa.bool_(), "a int, 1: no bool"),
        ([1], pa.string(), "a int, 1: no str"),
        (["x"], pa.binary(), "a str, 'x': no bytes"),
        ([b"x"], pa.string(), "a bytes, b'x': no str"),
        ([1.5], FLOATS, "a float, 1.5: no array"),
        ([np.eye(2)], FLOATS, r"a numpy array of float64 \[2, 2\]"),
        ([["x"]], FLOATS, r"a list, \['x'\]"),
        ([{"x": 1}], pa.struct({"z": pa.int64()}), "its fields must be z"),
        ([2**24 + 1], pa.float32(), "16777217"),
        ([datetime(2026, 1, 1)], pa.date32(), "no date"),
    ],
)
def test_value_that_doesnt_fit_is_named(results: list[Any], kind: pa.DataType, words: str) -> None:
    with pytest.raises(InferenceError, match=words):
        columns(results, y=kind)


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([(1, 2, 3)], "a tuple of 3 values, and schema= declares 2 columns"),
        ([1.5], "each result is one float, and schema= declares 2 columns"),
        ([{"a": 1}], "lacks 'b'"),
        ([{"a": 1, "b": 2, "c": 3}], "has undeclared 'c'"),
    ],
)
def test_row_that_does_not_fit_is_told(results: list[Any], words: str) -> None:
    with pytest.raises(InferenceError, match=words):
        columns(results, a=pa.int64(), b=pa.int64())


def test_none_does_not_fit_what_is_declared_not_null() -> None:
    (batch,) = encode_rows([1, None])
    with pytest.raises(InferenceError, match=r"None in column 'y'.* NOT NULL"):
        result_columns(batch, pa.schema([pa.field("y", pa.int64(), nullable=False)]))
