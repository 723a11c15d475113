"""Rows go into Arrow batches and come back with the same types and values."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as npst
from pyspark.ml.linalg import DenseVector, SparseVector
from pyspark.mllib.linalg import DenseVector as OldDenseVector
from pyspark.sql import Row

from sparkdl.core.errors import FeedTypeError, ProtocolError
from sparkdl.values import ndarrays as tensors
from sparkdl.values.columns import to_columns
from sparkdl.values.rows import encode_rows, frame_rows, row_schema, rows

Pair = namedtuple("Pair", "x y")

DTYPES = ["?", "i1", "i4", "i8", "u2", "u8", "f2", "f4", "f8"]
SCALAR_DTYPES = [np.bool_, np.int8, np.int64, np.uint64, np.float16, np.float32, np.float64]

LEAVES: list[st.SearchStrategy[Any]] = [
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.binary(max_size=5).map(bytearray),
    st.dates(),
    st.datetimes(),
    st.decimals(allow_nan=False),
    *(npst.from_dtype(np.dtype(kind)) for kind in SCALAR_DTYPES),
    *(npst.arrays(d, npst.array_shapes(min_dims=0, max_dims=3, min_side=0)) for d in DTYPES),
    st.lists(st.floats(), max_size=4).map(DenseVector),
    st.lists(st.floats(), max_size=4).map(OldDenseVector),
    st.dictionaries(st.integers(0, 9), st.floats(), max_size=4).map(
        lambda items: SparseVector(10, items)
    ),
]
KEYS = st.text(max_size=3)


def around(kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return strategies for values that hold others; drawn: one strategy, so one type."""
    inner = kinds.map(lambda kind: st.none() | kind)
    return st.one_of(
        inner.map(lambda kind: st.lists(kind, max_size=3)),
        inner.map(lambda kind: st.lists(kind, max_size=3).map(tuple)),
        inner.map(lambda kind: st.dictionaries(KEYS, kind, max_size=3)),
        st.tuples(inner, inner).map(
            lambda two: st.tuples(*two).map(lambda pair: Row(a=pair[0], label=pair[1]))
        ),
        st.tuples(inner, inner).map(
            lambda two: st.tuples(*two).map(lambda pair: {"a": pair[0], "label": pair[1]})
        ),
    )


TYPES = st.recursive(st.sampled_from(LEAVES), around, max_leaves=4)
COLUMNS = TYPES.flatmap(lambda kind: st.lists(st.none() | kind, min_size=1, max_size=12))
"""Values of one type, and None."""


def same(a: Any, b: Any) -> bool:
    """Compare type and value; NaN equals NaN, and -0.0 does not equal 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, str | bytes):  # numpy's == and repr ignore NUL characters at the end
        return len(a) == len(b) and list(a) == list(b)
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and repr(a) == repr(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        names = getattr(a, "__fields__", ()), getattr(b, "__fields__", ())
        return tuple(names[0]) == tuple(names[1]) and len(a) == len(b) and all(map(same, a, b))
    if type(a).__module__.endswith(".linalg"):
        return same(vars(a), vars(b))
    return bool(a == b)


def roundtrip(given_rows: list[Any], **limits: int) -> list[Any]:
    batches = list(encode_rows(given_rows, **limits))
    assert all(row_schema(batch) for batch in batches)
    return [row for batch in batches for row in rows(batch)]


def assert_roundtrip(given_rows: list[Any], **limits: int) -> None:
    back = roundtrip(given_rows, **limits)
    assert len(back) == len(given_rows)
    for row, expected in zip(back, given_rows, strict=True):
        assert same(row, expected), (row, expected)


@given(
    COLUMNS, COLUMNS, st.sampled_from(["value", "tuple", "list", "row", "dict"]), st.integers(1, 20)
)
def test_rows_of_columns_of_one_type_come_back_as_they_were(
    first: list[Any], second: list[Any], kind: str, max_rows: int
) -> None:
    make: Any = {
        "value": lambda pair: pair[0],
        "tuple": tuple,
        "list": list,
        "row": lambda pair: Row(x=pair[0], y=pair[1]),
        "dict": lambda pair: {"x": pair[0], "y": pair[1]},
    }[kind]
    pairs = zip(first, second, strict=False)
    assert_roundtrip([(make(pair), 0) for pair in pairs], max_rows=max_rows)
    assert_roundtrip([(*pair,) for pair in zip(first, second, strict=False)], max_rows=max_rows)


@given(COLUMNS, st.data())
def test_a_slice_of_a_batch_has_the_rows_of_the_slice(given_rows: list[Any], data: Any) -> None:
    wrapped = [((row, 0), [row, None, row]) for row in given_rows]
    (batch,) = encode_rows(wrapped)
    start = data.draw(st.integers(0, batch.num_rows))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch.slice(start))
    (received,) = pa.ipc.open_stream(sink.getvalue()) if start < batch.num_rows else (None,)
    for part in (batch.slice(start), *([received] if received is not None else [])):
        assert all(map(same, rows(part), wrapped[start:]))


def test_a_slice_of_arrays_among_nulls_has_its_own() -> None:
    many = [None, (np.array([[1], [2]]), 0), None, (np.array([[3], [4]]), 0)]
    (batch,) = encode_rows([([row, None],) for row in many])
    assert same(rows(batch.slice(3)), [([many[3], None],)])
    deep = pa.array([[[0]], [[1]], None, [[2]]], pa.list_(pa.list_(pa.int8(), 1), 1))
    found = frame_rows(pa.record_batch({"x": deep}).slice(1))
    assert found == [Row(x=[[1]]), Row(x=None), Row(x=[[2]])]


def test_a_change_of_kind_or_width_starts_a_new_batch() -> None:
    given_rows = [1, 2, (1, 2.0), (1, 2.0), (1, 2, 3), {"a": 1}]
    batches = list(encode_rows(given_rows))
    assert [batch.num_rows for batch in batches] == [2, 2, 1, 1]
    assert [row for batch in batches for row in rows(batch)] == given_rows


def test_rows_whose_width_alternates_share_a_batch() -> None:
    ragged = [[7] * (i % 5 + 1) for i in range(100)]
    assert len(list(encode_rows(ragged))) == 1
    assert_roundtrip(ragged)


@pytest.mark.parametrize(
    ("given_rows", "found"),
    [
        ([(1, 2), (1, 2.5)], "field '1' holds values of several types: float and int"),
        ([1, "a"], "the row holds values of several types: int and str"),
        ([[1, [0.5]], [1, (0.5,)]], "field '1' holds .*: list and tuple"),
        ([(0, [1, 2.5]), (0, [1])], "field '1' holds .*: float and int"),
        ([np.zeros(1, "f4"), np.zeros(1)], "the row holds .*: ndarray <f4 and ndarray <f8"),
        ([{"a": 1, "b": {"c": 1, "d": "e"}}, {"a": 1, "b": {"c": 1}}], "same keys"),
    ],
)
def test_values_of_several_types_in_a_column_are_refused(given_rows: list[Any], found: str) -> None:
    with pytest.raises(FeedTypeError, match=found):
        list(encode_rows(given_rows))


def test_batches_are_bounded_by_rows_and_by_bytes() -> None:
    by_rows = list(encode_rows(((i, i) for i in range(25)), max_rows=10))
    assert [batch.num_rows for batch in by_rows] == [10, 10, 5]
    small, huge = np.zeros(8), np.zeros(10_000)
    by_nbytes = list(encode_rows([small] * 20 + [huge] + [small], max_nbytes=1000))
    assert [batch.num_rows for batch in by_nbytes] == [15, 5, 1, 1]


def test_encoding_takes_no_more_rows_than_a_batch_needs() -> None:
    taken = 0

    def source() -> Iterator[int]:
        nonlocal taken
        for number in range(1, 1000):
            taken = number
            yield number

    next(iter(encode_rows(source(), max_rows=10)))
    assert taken == 11


def test_dicts_that_share_few_keys_or_no_order_are_values() -> None:
    bags = [{f"word{i}": 1} for i in range(40)]
    swapped: list[dict[str, Any]] = [{"a": 1, "b": 2}, {"b": 1, "a": 2}] * 20
    for dicts in (bags, swapped):
        (batch,) = encode_rows(dicts)
        assert batch.schema.names == ["value"]
        assert [list(row.items()) for row in rows(batch)] == [list(row.items()) for row in dicts]


def test_what_passes_32_bits_of_offsets_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if 2 GiB were 100 bytes: no offset and no fixed size may be larger."""
    monkeypatch.setattr(tensors, "INT32_MAX", 100)
    long = np.arange(101)
    given_rows = [([1.5] * 101, long)] * 2
    (batch,) = encode_rows(given_rows)
    assert batch.schema.field("0").type == pa.large_list(pa.float64())
    assert batch.schema.field("1").type.field("data").type == pa.large_list(pa.int64())
    assert all(map(same, rows(batch), given_rows))
    assert all(map(same, rows(batch.slice(1)), given_rows[1:]))
    assert [array.shape for array in to_columns(batch).values()] == [(2, 101), (2, 101)]


def test_decoded_arrays_are_writable_copies() -> None:
    (batch,) = encode_rows([np.zeros(3), np.zeros(3)])
    first, second = rows(batch)
    first += 1
    assert second.sum() == 0


def test_subclasses_of_tuple_and_dict_come_back_as_plain() -> None:
    back = roundtrip([Pair(1, 2), Pair(3, 4)])
    assert back == [(1, 2), (3, 4)]
    assert type(back[0]) is tuple
    assert type(roundtrip([OrderedDict(a=1)])[0]) is dict


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((1, object()), r"field '1' holds a builtins\.object.*Convert it before feeding"),
        ({"x": {1, 2}}, r"field 'x' holds a builtins\.set"),
        (Row(x=1, y=[1j]), r"field 'y'\.0 holds a builtins\.complex"),
        (Row(x=Row(y=object())), r"field 'x'\.y holds a builtins\.object"),
        (2**63, r"the row holds a int too large.*feed it as float or str"),
        ((1, np.array([None])), r"field '1' holds a numpy value of dtype object"),
        ((1, np.array(["a"])), r"field '1' holds a numpy value of dtype <U1.*tolist"),
        ("\ud800", r"the row holds a str that is not valid Unicode"),
    ],
)
def test_a_value_that_cannot_travel_is_named(row: Any, message: str) -> None:
    with pytest.raises(FeedTypeError, match=message):
        list(encode_rows([row]))


def test_rows_are_named_tuples_where_pyspark_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    (batch,) = encode_rows([Row(x=1, y="a")])
    monkeypatch.setitem(sys.modules, "pyspark.sql.types", None)
    (row,) = rows(batch)
    assert (row.x, row.y) == (1, "a")


def test_a_broken_row_schema_is_a_protocol_error() -> None:
    batch = pa.record_batch({"x": [1]}).replace_schema_metadata({"sparkdl.rows": "{}"})
    with pytest.raises(ProtocolError, match="describes its rows wrongly"):
        rows(batch)


def test_vectors_of_an_unknown_module_are_refused() -> None:
    (batch,) = encode_rows([DenseVector([1.0])])
    data = batch.schema.metadata[b"sparkdl.rows"].replace(b"pyspark.ml.linalg", b"os.path")
    with pytest.raises(ProtocolError, match=r"os\.path"):
        rows(batch.replace_schema_metadata({"sparkdl.rows": data}))


def test_rows_of_slices_and_of_large_types_are_the_same() -> None:
    kind = pa.map_(pa.string(), pa.list_(pa.int8()))
    maps = pa.array([[("a", [1])], [], None, [("b", [2]), ("c", [])]], kind)
    large = pa.array([[b"x"], [], None, [b"y", None]], pa.large_list(pa.large_binary()))
    fixed = pa.array([[1.5, None], [2.5, 3.5], None, [0.0, 1.0]], pa.list_(pa.float32(), 2))
    batch = pa.record_batch({"m": maps, "l": large, "f": fixed})
    expected = [
        Row(m={"a": [1]}, l=[b"x"], f=[1.5, None]),
        Row(m={}, l=[], f=[2.5, 3.5]),
        Row(m=None, l=None, f=None),
        Row(m={"b": [2], "c": []}, l=[b"y", None], f=[0.0, 1.0]),
    ]
    for start in range(5):
        for stop in range(start, 5):
            back = rows(batch.slice(start, stop - start))
            assert len(back) == stop - start
            assert all(map(same, back, expected[start:stop]))


def test_rows_without_columns_are_counted() -> None:
    batch = pa.record_batch({"x": [1, 2], "e": pa.array([{}, None], pa.struct([]))})
    assert rows(batch) == [Row(x=1, e=Row()), Row(x=2, e=None)]
    assert rows(batch.select([])) == [Row(), Row()]
