"""Arrow columns become the arrays that training code expects, without a copy where possible."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as npst
from pyspark.ml.linalg import DenseVector, SparseVector
from pyspark.sql import Row

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.values.columns import concat, convert, slice_columns, to_columns
from sparkdl.values.rows import encode_rows


def encoded(rows: list[Any]) -> dict[str, np.ndarray[Any, Any]]:
    (batch,) = encode_rows(rows)
    return to_columns(batch)


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@given(
    st.sampled_from(["?", "i4", "f4"]).flatmap(
        lambda t: npst.arrays(t, npst.array_shapes(min_dims=1, max_dims=4))
    ),
    st.data(),
)
def test_arrays_of_one_shape_are_stacked(stacked: np.ndarray[Any, Any], data: Any) -> None:
    (batch,) = encode_rows(list(stacked[..., None]))
    start = data.draw(st.integers(0, len(stacked) - 1))
    array = to_columns(batch.slice(start))["value"]
    assert same(array, stacked[start:, ..., None])
    assert stacked.dtype == bool or np.shares_memory(array, to_columns(batch)["value"])


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1.5, None, 2.5]),
        pa.array([1, None, 2]),
        pa.array([True, None, False]),
        pa.array(["a", None, "b"]),
        pa.array([b"a", None, b"b"]),
        pa.array([date(2020, 1, 1), None, date(2020, 1, 1)]),
        pa.array([datetime(2020, 1, 1), None, datetime(2020, 1, 1)]),
        pa.array([time(1), None, time(2)]),
        pa.array([timedelta(1), None, timedelta(2)]),
        pa.array([Decimal("1.25"), None, Decimal("2.5")]),
        pa.array([[1.5], None, [2.5]]),
        pa.array([[1.5], [None], [2.5]]),
        pa.array([[1.5], [None, 2.5], []]),
        pa.array([["a"], [None], ["b"]]),
        pa.array([[[1.5]], [[None]], [[2.5]]]),
        pa.array([[1.5], [None], [2.5]], pa.list_(pa.float32(), 1)),
        pa.array([{"f": 1.5}, None, {"f": 2.5}]),
        pa.array([{"f": 1.5}, {"f": None}, {"f": 2.5}]),
        pa.nulls(3),
    ],
    ids=lambda values: str(values.type),
)
def test_a_null_is_refused_whatever_the_type_by_column(values: pa.Array) -> None:
    """It is never a NaN, a NaT or a None in a training that was not asked."""
    batch = pa.record_batch({"ok": [1.0, 2.0, 3.0], "c": values})
    with pytest.raises(FeedTypeError, match=r"^column 'c(\.f)?' holds \d nulls? among.*df\.fillna"):
        to_columns(batch)
    assert to_columns(batch, ["ok"])["ok"].tolist() == [1, 2, 3]  # nobody reads the null
    if not pa.types.is_null(values.type):
        assert len(next(iter(to_columns(batch.slice(2), ["c"]).values()))) == 1


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
        SparseVector(3, {1: 4.0}), [[1, 2], [3, 4]], when, (1.5, 2.5), np.zeros((2, 2), np.uint8),
    )  # fmt: skip
    columns = list(encoded([row, row]).values())
    assert [column.shape[1:] for column in columns] == [
        (2,), (), (), (), (2,), (3,), (2, 2), (), (2,), (2, 2)
    ]  # fmt: skip
    assert [column.dtype.str for column in columns] == [
        "<f8", "<i8", "<f4", "<f8", "<f8", "<f8", "<i8", "<M8[us]", "<f8", "|u1"
    ]  # fmt: skip
    assert columns[5].tolist() == [[0, 4, 0]] * 2


def test_dicts_and_tuples_of_several_types_are_refused() -> None:
    for value, kind in (({"a": 1}, "a dict"), ({1: 2}, "a map"), ((1, "a"), "a struct")):
        with pytest.raises(FeedTypeError, match=f"column 'x' (holds|is) {kind}.*no array"):
            encoded([{"x": value}])


def test_structs_become_a_column_for_each_field() -> None:
    kind = pa.struct({"city": pa.string(), "at": pa.struct({"x": pa.float32(), "n": pa.int8()})})
    values = [{"city": "Ulm", "at": {"x": 1.5, "n": 1}}, {"city": "Bonn", "at": {"x": 2.5, "n": 2}}]
    batch = pa.record_batch({"a": pa.array([None, *values], kind), "ab": pa.array([0, 1, 2])})
    arrays = to_columns(batch.slice(1))
    assert list(arrays) == ["a.city", "a.at.x", "a.at.n", "ab"]
    assert arrays["a.city"].tolist() == ["Ulm", "Bonn"]
    assert arrays["a.at.x"].dtype == np.float32
    assert arrays["a.at.n"].tolist() == [1, 2]
    assert list(to_columns(batch.slice(1), ["a.at"])) == ["a.at.x", "a.at.n"]
    assert list(to_columns(batch.slice(1), ["a.city"])) == ["a.city"]
    with pytest.raises(FeedTypeError, match=r"column 'a\.at\.n' holds 1 null "):
        to_columns(batch, ["a.at.n"])
    with pytest.raises(ConfigError, match=r"no column 'a\.y'; its columns are 'a\.city'"):
        to_columns(batch, ["a.y"])


def test_two_columns_of_one_name_are_refused_if_wanted() -> None:
    names = ["id", "x", "id"]
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=names)
    assert to_columns(batch, ["x"])["x"].tolist() == [2]
    for wanted in (None, ["id"]):
        with pytest.raises(FeedTypeError, match="2 columns 'id'"):
            to_columns(batch, wanted)


def test_arrays_of_different_shapes_are_an_array_of_arrays() -> None:
    array = encoded([np.zeros((2, 3)), np.zeros((1, 3)), np.zeros((0, 3))])["value"]
    assert [row.shape for row in array] == [(2, 3), (1, 3), (0, 3)]


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
    ragged = convert(pa.array([[1.0], [2.0, 3.0]]))
    back = concat([{"x": np.zeros((2, 3))}, {"x": ragged}, {"x": np.zeros((1, 4))}])
    assert [row.shape for row in back["x"]] == [(3,), (3,), (1,), (2,), (4,)]


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["f4", "f8"], "f8"),
        (["i8", "f4"], "f8"),
        (["?", "i4"], "i4"),
        (["M8[D]", "M8[us]"], "M8[us]"),
        (["O", "i8"], "O"),
    ],
)
def test_concat_promotes_as_numpy_does(dtypes: list[str], expected: str) -> None:
    for order in (dtypes, dtypes[::-1]):
        parts = [{"x": np.ones(2, np.int64).astype(dtype)} for dtype in order]
        back = concat(parts)["x"]
        assert back.dtype == np.dtype(expected)
        assert all(back == [parts[0]["x"][0]] * 2 + [parts[1]["x"][0]] * 2)


@pytest.mark.parametrize("dtypes", [["m8[us]", "i8"], ["U2", "f8"], ["S2", "U2"], ["?", "m8[s]"]])
def test_concat_refuses_what_numpy_would_make_something_else(dtypes: list[str]) -> None:
    for order in (dtypes, dtypes[::-1]):
        with pytest.raises(FeedTypeError, match="column 'x' holds values of types that do not mix"):
            concat([{"x": np.zeros(1, dtype)} for dtype in order])


def test_parts_without_rows_change_neither_dtype_nor_shape() -> None:
    empty = {"x": convert(pa.array([], pa.list_(pa.float64())))}
    full = {"x": np.ones((2, 3), np.float32)}
    for parts in ([empty, full], [full, empty], [empty, full, empty]):
        assert same(concat(parts)["x"], full["x"])
    assert concat([empty, empty])["x"].dtype == np.float64


def test_concat_refuses_parts_that_do_not_fit() -> None:
    assert concat([]) == {}
    with pytest.raises(FeedTypeError, match=r"columns \['x'\] at first and \['y'\] later"):
        concat([{"x": np.zeros(1)}, {"y": np.zeros(1)}])


@given(st.sampled_from(["i1", "u4", "i8", "f2", "f4", "f8"]).flatmap(lambda t: npst.arrays(t, 7)))
def test_numbers_without_nulls_are_a_view(values: np.ndarray[Any, Any]) -> None:
    column = pa.array(values)
    array = convert(column.slice(2))
    assert same(array, values[2:])
    assert np.shares_memory(array, convert(column))


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
    array = convert(outer.slice(1, 2))
    assert same(array, numbers.reshape(4, 3, 2)[1:3])
    assert np.shares_memory(array, flat.to_numpy())


def test_a_column_that_may_hold_nulls_and_holds_none_is_a_view() -> None:
    for kind in (pa.int8(), pa.int64(), pa.float32(), pa.timestamp("us"), pa.duration("us")):
        column = pa.array([1, 2, None], pa.int64()).cast(kind)
        array = convert(column.slice(0, 2))
        assert array.astype(np.int64).tolist() == [1, 2]
        assert array.ctypes.data == column.buffers()[1].address


def test_lists_of_lists_of_different_lengths_keep_their_depth() -> None:
    array = convert(pa.array([[[1], [2, 3]], [], [[4, 5, 6]]]))
    assert [[inner.tolist() for inner in row] for row in array] == [[[1], [2, 3]], [], [[4, 5, 6]]]
    even_outside = convert(pa.array([[[1], [2, 3]], [[], [4]]]))
    assert even_outside.shape == (2, 2)
    assert even_outside[1, 1].tolist() == [4]


def test_times_are_the_time_since_midnight() -> None:
    for kind in (pa.time64("ns"), pa.time64("us"), pa.time32("s")):
        array = convert(pa.array([time(1, 2, 3)], kind))
        assert array.dtype == "m8[ns]"
        assert array[0] == np.timedelta64(timedelta(hours=1, minutes=2, seconds=3))


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
