"""Spark ML's vectors are dense arrays; its matrices are refused."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.ml.linalg import DenseMatrix, MatrixUDT

from sparkdl.core.errors import FeedTypeError
from sparkdl.values.columns import convert, to_columns
from sparkdl.values.rows import rows

VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)


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


def test_ml_matrices_are_refused() -> None:
    parts = MatrixUDT().serialize(DenseMatrix(1, 2, [1, 2]))
    names = MatrixUDT().sqlType().fieldNames()
    fields = [
        *(("type", pa.int8()), ("numRows", pa.int32()), ("numCols", pa.int32())),
        *((name, pa.list_(pa.int32())) for name in ("colPtrs", "rowIndices")),
        *(("values", pa.list_(pa.float64())), ("isTransposed", pa.bool_())),
    ]
    column = pa.array([dict(zip(names, parts, strict=True))], pa.struct(fields))
    batch = pa.RecordBatch.from_arrays([column], names=["m"])
    for read in (
        lambda: to_columns(batch, ["m"]),
        lambda: to_columns(batch, None),
        lambda: rows(batch),
    ):
        with pytest.raises(FeedTypeError, match=r"matrices of Spark ML.*toArray"):
            read()
