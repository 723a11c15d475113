"""Arrow columns become the numpy arrays that training code expects."""

from __future__ import annotations

from datetime import datetime, timezone
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from pyspark.ml.linalg import DenseVector, SparseVector
from pyspark.sql import Row

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.feed.batch import RowEncoder
from sparkdl.feed.columns import concat, slice_columns, to_columns, to_numpy

VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)


def encoded(rows: list[Any]) -> dict[str, np.ndarray[Any, Any]]:
    (batch,) = RowEncoder().batches(rows)
    return to_columns(batch)


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@given(st.sampled_from(["i1", "u4", "i8", "f2", "f4", "f8"]).flatmap(lambda t: npst.arrays(t, 7)))
def test_numbers_without_nulls_are_a_view(values: np.ndarray[Any, Any]) -> None:
    column = pa.array(values)
    array = to_numpy(column.slice(2))
    assert same(array, values[2:])
    assert np.shares_memory(array, to_numpy(column))


@given(
    st.sampled_from(["?", "i4", "f4", ">f8", "c8", "M8[ns]", "U2"]).flatmap(
        lambda t: npst.arrays(t, npst.array_shapes(min_dims=1, max_dims=4))
    ),
    st.data(),
)
def test_arrays_of_one_shape_are_stacked(stacked: np.ndarray[Any, Any], data: Any) -> None:
    (batch,) = RowEncoder().batches(list(stacked[..., None]))
    start = data.draw(st.integers(0, len(stacked) - 1))
    array = to_columns(batch.slice(start))["value"]
    assert same(array, stacked[start:, ..., None])
    assert stacked.dtype == bool or np.shares_memory(array, to_columns(batch)["value"])


def test_nulls_are_nan_in_floats_and_refused_in_integers() -> None:
    array = to_numpy(pa.array([1.5, None], pa.float32()))
    assert array.dtype == np.float32
    assert np.isnan(array[1])
    batch = pa.record_batch({"n": [1, None], "flag": [True, None], "list": [[1], None]})
    for name in batch.schema.names:
        with pytest.raises(FeedTypeError, match=f"column '{name}' holds 1 nulls.*fillna"):
            to_columns(batch, [name])


def test_values_that_are_no_numbers_have_their_numpy_types() -> None:
    assert same(to_numpy(pa.array([True, False])), np.array([True, False]))
    assert to_numpy(pa.array(["x", None])).tolist() == ["x", None]
    assert to_numpy(pa.array([b"x"])).tolist() == [b"x"]
    instant = datetime(2020, 1, 1, tzinfo=timezone.utc)
    for kind in (pa.timestamp("us"), pa.timestamp("us", tz="Asia/Tokyo")):
        array = to_numpy(pa.array([instant, None], kind))
        assert array.dtype == "M8[us]"
        assert array[0] == np.datetime64("2020-01-01")
        assert np.isnat(array[1])
    money = to_numpy(pa.array([Decimal("1.25"), None], pa.decimal128(10, 2)))
    assert money.dtype == np.float64
    assert money[0] == 1.25


def test_lists_of_equal_length_are_reshaped_without_a_copy() -> None:
    flat = pa.array(np.arange(24, dtype=np.float32))
    lists = pa.ListArray.from_arrays(pa.array([0, 6, 12, 18, 24], pa.int32()), flat)
    for column in (lists, pa.FixedSizeListArray.from_arrays(flat, 6)):
        array = to_numpy(column.slice(1))
        assert array.tolist() == np.arange(6, 24).reshape(3, 6).tolist()
        assert np.shares_memory(array, to_numpy(flat))
    cube = to_numpy(pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]))
    assert cube.shape == (2, 2, 2)
    assert to_numpy(pa.array([], pa.list_(pa.float32(), 3))).shape == (0, 3)
    assert to_numpy(pa.array([["a"], ["b"]])).tolist() == [["a"], ["b"]]


def test_lists_of_different_lengths_are_an_array_of_arrays() -> None:
    array = to_numpy(pa.array([[1.0], [], [2.0, 3.0]]))
    assert array.dtype == object
    assert [row.tolist() for row in array] == [[1.0], [], [2.0, 3.0]]


def test_ml_vectors_are_dense_rows() -> None:
    dense = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]}
    sparse = {"type": 0, "size": 3, "indices": [2], "values": [9.0]}
    expected = {"d": [1.0, 2.0, 3.0], "s": [0.0, 0.0, 9.0]}
    for order in ("dd", "ss", "dsd"):
        column = pa.array([dense if kind == "d" else sparse for kind in order], VECTOR)
        assert to_numpy(column).tolist() == [expected[kind] for kind in order]
        assert to_numpy(column.slice(1)).tolist() == [expected[kind] for kind in order[1:]]
    with pytest.raises(FeedTypeError, match="vectors of 2 to 3 elements"):
        to_numpy(pa.array([dense, sparse | {"size": 2, "indices": [0]}], VECTOR))


def test_structs_and_maps_are_refused_with_a_way_out() -> None:
    for column in (pa.array([{"a": 1}]), pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))):
        with pytest.raises(FeedTypeError, match=r"columns of their own.*df\.select"):
            to_numpy(column)


def test_columns_of_rows_are_named_after_their_fields() -> None:
    assert list(encoded([(1, 2.0)])) == ["0", "1"]
    assert list(encoded([[1, 2.0]])) == ["0", "1"]
    assert list(encoded([Row(x=1, y=2)])) == ["x", "y"]
    assert list(encoded([{"x": 1, "y": 2}])) == ["x", "y"]
    assert list(encoded([5, 6])) == ["value"]


def test_columns_of_encoded_rows_are_arrays() -> None:
    when = datetime(2020, 1, 1)
    row = (
        [1.0, 2.0], 3, np.float32(1.5), Decimal("2.5"), DenseVector([1, 2]),
        SparseVector(3, {1: 4.0}), [[1, 2], [3, 4]], when, (1, 2.5), np.zeros((2, 2), np.uint8),
    )  # fmt: skip
    columns = list(encoded([row, row]).values())
    assert [column.shape[1:] for column in columns] == [
        (2,), (), (), (), (2,), (3,), (2, 2), (), (2,), (2, 2)
    ]  # fmt: skip
    assert [column.dtype.str for column in columns] == [
        "<f8", "<i8", "<f4", "<f8", "<f8", "<f8", "<i8", "<M8[us]", "<f8", "|u1"
    ]  # fmt: skip
    assert columns[5].tolist() == [[0, 4, 0]] * 2


def test_numbers_of_alternating_types_get_their_common_dtype() -> None:
    array = encoded([(i if i % 2 else i / 2) for i in range(40)])["value"]
    assert array.dtype == np.float64
    mixed = encoded([(i if i % 2 else str(i)) for i in range(40)])["value"]
    assert mixed.tolist()[:3] == ["0", 1, "2"]
    with pytest.raises(FeedTypeError, match="None among numbers"):
        encoded([(None, 1, 2.0)[i % 3] for i in range(40)])
    with pytest.raises(FeedTypeError, match="column 'x' holds a dict, which is no array"):
        encoded([{"x": {"a": 1}}])


def test_arrays_of_different_shapes_are_an_array_of_arrays() -> None:
    array = encoded([np.zeros((2, 3)), np.zeros((1, 3)), np.zeros((0, 3))])["value"]
    assert [row.shape for row in array] == [(2, 3), (1, 3), (0, 3)]


def test_an_unknown_column_is_an_error_that_lists_those_there_are() -> None:
    batch = pa.record_batch({"image": [1], "label": [2]})
    assert list(to_columns(batch, ["label"])) == ["label"]
    with pytest.raises(ConfigError, match="no column 'x'; its columns are 'image', 'label'"):
        to_columns(batch, ["x"])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_concat_undoes_slicing(lengths: list[int], data: Any) -> None:
    total = sum(lengths)
    whole = {"x": np.arange(total * 2.0).reshape(total, 2), "y": np.arange(total)}
    ends = np.cumsum([0, *lengths]).tolist()
    parts = [slice_columns(whole, a, b) for a, b in pairwise(ends)]
    assert all(np.shares_memory(part["x"], whole["x"]) or not part["x"].size for part in parts)
    back = concat(parts)
    assert all(same(back[name], whole[name]) for name in whole)


def test_concat_keeps_rows_whose_shapes_differ_apart() -> None:
    ragged = to_numpy(pa.array([[1.0], [2.0, 3.0]]))
    back = concat([{"x": np.zeros((2, 3))}, {"x": ragged}, {"x": np.zeros((1, 4))}])
    assert [row.shape for row in back["x"]] == [(3,), (3,), (1,), (2,), (4,)]


def test_concat_refuses_parts_that_do_not_fit() -> None:
    assert concat([]) == {}
    with pytest.raises(FeedTypeError, match=r"columns \['x'\] at first and \['y'\] later"):
        concat([{"x": np.zeros(1)}, {"y": np.zeros(1)}])
    with pytest.raises(FeedTypeError, match="column 'x' holds values of types that do not mix"):
        concat([{"x": np.zeros(1)}, {"x": np.zeros(1, "M8[us]")}])
