"""One Arrow column becomes the array that training code expects, without a copy where it can."""

from __future__ import annotations

from datetime import datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from sparkdl.core.errors import FeedTypeError
from sparkdl.feed.values.columns import to_numpy


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@given(st.sampled_from(["i1", "u4", "i8", "f2", "f4", "f8"]).flatmap(lambda t: npst.arrays(t, 7)))
def test_numbers_without_nulls_are_a_view(values: np.ndarray[Any, Any]) -> None:
    column = pa.array(values)
    array = to_numpy(column.slice(2))
    assert same(array, values[2:])
    assert np.shares_memory(array, to_numpy(column))


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


def test_structs_and_maps_are_refused_with_a_way_out() -> None:
    for column in (pa.array([{"a": 1}]), pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))):
        with pytest.raises(FeedTypeError, match=r"columns of their own.*df\.select"):
            to_numpy(column)


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed_size_list"])
@pytest.mark.parametrize("may_hold_nulls", [False, True])
def test_lists_of_lists_are_a_view_also_in_a_slice(kind: str, may_hold_nulls: bool) -> None:
    numbers = np.arange(24, dtype=np.float32)
    flat = pa.array(numbers)
    if kind == "fixed_size_list":
        inner = pa.FixedSizeListArray.from_arrays(flat, 2)
        outer = pa.FixedSizeListArray.from_arrays(inner, 3)
    else:
        make = pa.ListArray if kind == "list" else pa.LargeListArray
        width = pa.int32() if kind == "list" else pa.int64()
        inner = make.from_arrays(pa.array(range(0, 25, 2), width), flat)
        outer = make.from_arrays(pa.array(range(0, 13, 3), width), inner)
    if may_hold_nulls:  # the last row is null, and is not among those that are read
        bits = pa.py_buffer(bytes([0b0111]))
        buffers = [bits, *outer.buffers()[1 : outer.type.num_buffers]]
        outer = pa.Array.from_buffers(outer.type, 4, buffers, children=[inner])
        assert outer.null_count == 1
    array = to_numpy(outer.slice(1, 2))
    assert same(array, numbers.reshape(4, 3, 2)[1:3])
    assert np.shares_memory(array, flat.to_numpy())


def test_a_column_that_may_hold_nulls_and_holds_none_is_a_view() -> None:
    for kind in (pa.int8(), pa.int64(), pa.float32(), pa.timestamp("us"), pa.duration("us")):
        column = pa.array([1, 2, None], pa.int64()).cast(kind)
        array = to_numpy(column.slice(0, 2))
        assert array.astype(np.int64).tolist() == [1, 2]
        assert array.ctypes.data == column.buffers()[1].address


def test_lists_of_lists_of_different_lengths_keep_their_depth() -> None:
    array = to_numpy(pa.array([[[1], [2, 3]], [], [[4, 5, 6]]]))
    assert [[inner.tolist() for inner in row] for row in array] == [[[1], [2, 3]], [], [[4, 5, 6]]]
    even_outside = to_numpy(pa.array([[[1], [2, 3]], [[], [4]]]))
    assert even_outside.shape == (2, 2)
    assert even_outside[1, 1].tolist() == [4]


def test_nulls_within_lists_are_as_in_columns() -> None:
    assert np.isnan(to_numpy(pa.array([[1.5, None]]))[0, 1])
    assert to_numpy(pa.array([["x", None]])).tolist() == [["x", None]]
    for column in (pa.array([[1, None]]), pa.array([[[1], None]]), pa.array([[True, None]])):
        with pytest.raises(FeedTypeError, match="the column holds 1 nulls"):
            to_numpy(column)


def test_types_of_64_bits_of_offsets_are_like_the_others() -> None:
    assert to_numpy(pa.array(["x", None], pa.large_string())).tolist() == ["x", None]
    assert to_numpy(pa.array([b"x"], pa.large_binary())).tolist() == [b"x"]
    ragged = to_numpy(pa.array([[1], []], pa.large_list(pa.int8())))
    assert [row.tolist() for row in ragged] == [[1], []]


def test_times_are_the_time_since_midnight() -> None:
    for kind in (pa.time64("ns"), pa.time64("us"), pa.time32("s")):
        array = to_numpy(pa.array([time(1, 2, 3), None], kind))
        assert array.dtype == "m8[ns]"
        assert array[0] == np.timedelta64(timedelta(hours=1, minutes=2, seconds=3))
        assert np.isnat(array[1])


@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),
    [
        (pa.int8(), "i1", ()),
        (pa.bool_(), "?", ()),
        (pa.float32(), "f4", ()),
        (pa.decimal128(9, 2), "f8", ()),
        (pa.date32(), "M8[D]", ()),
        (pa.timestamp("us", "UTC"), "M8[us]", ()),
        (pa.string(), "O", ()),
        (pa.list_(pa.int16()), "i2", (0,)),
        (pa.list_(pa.list_(pa.float32(), 2), 3), "f4", (3, 2)),
    ],
)
def test_no_rows_keep_dtype_and_shape(kind: pa.DataType, dtype: str, shape: Any) -> None:
    array = to_numpy(pa.array([], kind))
    assert (array.dtype, array.shape) == (np.dtype(dtype), (0, *shape))
