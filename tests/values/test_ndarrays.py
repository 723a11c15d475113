"""Spark ML's vectors and matrices come back as they were, and as dense arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.ml.linalg import DenseMatrix, MatrixUDT, SparseMatrix

from sparkdl.core.errors import FeedTypeError
from sparkdl.values.columns import convert
from sparkdl.values.ndarrays import dense_matrices, matrices

VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)

MATRIX = pa.struct(
    [
        *(("type", pa.int8()), ("numRows", pa.int32()), ("numCols", pa.int32())),
        *((name, pa.list_(pa.int32())) for name in ("colPtrs", "rowIndices")),
        *(("values", pa.list_(pa.float64())), ("isTransposed", pa.bool_())),
    ]
)


def stored(values: list[Any]) -> pa.Array:
    """Return matrices as Spark hands them over."""
    names = [field.name for field in MATRIX]
    parts = [MatrixUDT().serialize(value) for value in values]
    return pa.array([dict(zip(names, each, strict=True)) for each in parts], MATRIX)


def sparse_matrix(dense: np.ndarray[Any, Any], is_along_rows: bool) -> SparseMatrix:
    lines = dense if is_along_rows else dense.T
    places = [np.flatnonzero(line) for line in lines]
    starts = np.cumsum([0, *map(len, places)])
    values = [line[place] for line, place in zip(lines, places, strict=True)]
    height, width = dense.shape
    return SparseMatrix(
        height, width, starts, np.concatenate([[], *places]), np.concatenate([[], *values]),
        is_along_rows,
    )  # fmt: skip


@st.composite
def some_matrices(draw: st.DrawFn) -> list[Any]:
    height, width = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    size = height * width
    kinds = st.tuples(st.booleans(), st.booleans())
    found: list[Any] = []
    for is_sparse, is_along_rows in draw(st.lists(kinds, min_size=1, max_size=5)):
        numbers = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
        if is_sparse:
            found.append(sparse_matrix(np.reshape(numbers, (height, width)) * 1.0, is_along_rows))
        else:
            found.append(DenseMatrix(height, width, numbers, is_along_rows))
    return found


@given(some_matrices(), st.data())
def test_matrices_of_any_kind_are_their_dense_arrays(given_ones: list[Any], data: Any) -> None:
    start = data.draw(st.integers(0, len(given_ones) - 1))
    column = stored(given_ones).slice(start)
    expected = np.stack([each.toArray() for each in given_ones[start:]])
    found = dense_matrices(column)
    assert found.shape == expected.shape
    assert found.tolist() == expected.tolist()
    back = matrices(column)
    assert [type(each) for each in back] == [type(each) for each in given_ones[start:]]
    assert all(a == b for a, b in zip(back, given_ones[start:], strict=True))


def test_dense_matrices_of_one_kind_are_a_view() -> None:
    for is_along_rows in (False, True):
        column = stored([DenseMatrix(2, 3, range(6), is_along_rows)] * 4)
        values = column.field("values").flatten().to_numpy()
        assert np.shares_memory(dense_matrices(column.slice(1)), values)


def test_matrices_and_vectors_can_be_written_to() -> None:
    first, second = matrices(stored([DenseMatrix(1, 1, [1.0])] * 2))
    first.values[0] = 5
    assert second.values[0] == 1


def test_matrices_of_different_shapes_are_refused() -> None:
    column = stored([DenseMatrix(1, 2, [1, 2]), DenseMatrix(2, 1, [1, 2])])
    with pytest.raises(FeedTypeError, match="the column holds matrices of 1x2, 2x1"):
        convert(column)


def test_ml_vectors_are_dense_rows() -> None:
    dense = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]}
    sparse = {"type": 0, "size": 3, "indices": [2], "values": [9.0]}
    expected = {"d": [1.0, 2.0, 3.0], "s": [0.0, 0.0, 9.0]}
    for order in ("dd", "ss", "dsd"):
        column = pa.array([dense if kind == "d" else sparse for kind in order], VECTOR)
        assert convert(column).tolist() == [expected[kind] for kind in order]
        assert convert(column.slice(1)).tolist() == [expected[kind] for kind in order[1:]]
    with pytest.raises(FeedTypeError, match="vectors of 2 to 3 elements"):
        convert(pa.array([dense, sparse | {"size": 2, "indices": [0]}], VECTOR))
