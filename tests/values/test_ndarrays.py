"""Spark ML's vectors are dense arrays; its matrices are refused."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparkdl.core.errors import FeedTypeError
from sparkdl.values.columns import convert

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
