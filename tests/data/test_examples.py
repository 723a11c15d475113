"""Columns become Examples and come back, and protobuf itself agrees on what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from sparkdl.core.errors import ConfigError, RecordError, WriteError
from sparkdl.data.examples import Kind, columns_of, decode, encode, list_type
from tests.data.records import Features, chunk, example, read_example

INT64, FLOAT, BYTES = Kind.INT64, Kind.FLOAT, Kind.BYTES
LEAVES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-(2**7), 2**7 - 1),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(width=32, allow_nan=False),
    pa.string(): st.text(max_size=5),
    pa.binary(): st.binary(max_size=5),
}


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Return what a column of this type can hold and a TFRecord can tell."""
    if not pa.types.is_list(kind):
        return st.none() | LEAVES[kind]
    return st.none() | st.lists(LEAVES[kind.value_type], max_size=4)


@st.composite
def tables(draw: st.DrawFn) -> pa.RecordBatch:
    leaves = st.sampled_from(list(LEAVES))
    kinds = draw(st.lists(leaves | st.builds(list_type, leaves), max_size=5))
    length = len(kinds)
    names = draw(st.lists(st.text(max_size=5), min_size=length, max_size=length, unique=True))
    count = draw(st.integers(0, 40))
    arrays = [
        pa.array(draw(st.lists(values(kind), min_size=count, max_size=count)), kind)
        for kind in kinds
    ]
    if not kinds:
        return pa.record_batch({"only": pa.nulls(count, pa.int64())})
    return pa.RecordBatch.from_arrays(arrays, names=names)


def there_and_back(batch: pa.RecordBatch) -> tuple[list[bytes], pa.RecordBatch]:
    columns = columns_of(batch.schema)
    records = encode(batch, columns)
    arrays = decode(chunk(records), columns)
    back = pa.RecordBatch.from_arrays(arrays, schema=batch.schema)
    back.validate(full=True)
    return records, back


def told(value: Any) -> list[Any]:
    """Return a value of a column as protobuf has it."""
    each = value if isinstance(value, list) else [value]
    return [v.encode() if isinstance(v, str) else v for v in each]


@given(tables())
def test_rows_are_examples_and_come_back(batch: pa.RecordBatch) -> None:
    records, back = there_and_back(batch)
    assert back.equals(batch)
    for record, row in zip(records, batch.to_pylist(), strict=True):
        found = read_example(record)
        assert found.keys() == {name for name, value in row.items() if value is not None}
        for name, feature in found.items():
            assert feature is not None
            assert feature[1] == told(row[name])


def test_slices_are_written_as_they_are() -> None:
    batch = pa.record_batch(
        {
            "text": pa.array(["a", None, "ccc", "d"]),
            "lists": pa.array([[1], [2, 3], None, []], list_type(pa.int64())),
            "flags": pa.array([True, False, None, True]),
        }
    )
    part = batch.slice(1, 2)
    _, back = there_and_back(part)
    assert back.to_pylist() == batch.to_pylist()[1:3]


SCHEMA = pa.schema(
    [("one", pa.int64()), ("many", list_type(pa.float32())), ("texts", list_type(pa.string()))]
)


def read(records: list[bytes], schema: pa.Schema = SCHEMA) -> list[Any]:
    arrays = decode(chunk(records), columns_of(schema))
    rows: list[Any] = pa.RecordBatch.from_arrays(arrays, schema=schema).to_pylist()
    return rows


NOTHING = {"one": None, "many": None, "texts": None}


@pytest.mark.parametrize(
    ("features", "row"),
    [
        ({}, {}),
        ({"one": None, "many": None}, {}),
        (
            {"one": (INT64, []), "many": (FLOAT, []), "texts": (BYTES, [])},
            {"many": [], "texts": []},
        ),
        ({"one": (FLOAT, []), "many": (INT64, [])}, {"many": []}),  # empty, of any kind
        ({"one": (INT64, [-1]), "many": (FLOAT, [0.5])}, {"one": -1, "many": [0.5]}),
        ({"texts": (BYTES, [b"", "é".encode()])}, {"texts": ["", "é"]}),
        ({"other": (BYTES, [b"\xff"])}, {}),  # no column's
    ],
)
def test_what_is_missing_or_empty_is_null_or_empty(features: Features, row: dict[str, Any]) -> None:
    full: Features = {"one": (INT64, [7]), "many": (FLOAT, [1, 2]), "texts": (BYTES, [b"x"])}
    whole = {"one": 7, "many": [1, 2], "texts": ["x"]}
    records = [example(full), example(features), example(full)]
    assert read(records) == [whole, {**NOTHING, **row}, whole]
    assert read([example(features)]) == [{**NOTHING, **row}]


@pytest.mark.parametrize(
    ("features", "kind", "message"),
    [
        ({"f": (INT64, [1, 2])}, pa.int64(), r"has 2 values.*array<bigint>"),
        ({"f": (FLOAT, [1.0])}, pa.int64(), "holds a list of float, but int64 is read from int64"),
        ({"f": (BYTES, [b"ok", b"\xff"])}, list_type(pa.string()), r"xff'.*no string.*binary"),
        ({"f": (INT64, [128])}, pa.int8(), "128, which is no tinyint"),
        ({"f": (INT64, [1, 2])}, list_type(pa.bool_()), "2, which is no boolean"),
        ({}, pa.field("f", pa.int64(), nullable=False), "missing or empty.*nullable"),
        ({"f": (INT64, [])}, pa.field("f", pa.int64(), nullable=False), "missing or empty"),
    ],
)
def test_what_does_not_fit_its_column_is_an_error_with_its_place(
    features: Features, kind: Any, message: str
) -> None:
    field = kind if isinstance(kind, pa.Field) else pa.field("f", kind)
    good = {"f": (INT64, [1])} if pa.types.is_integer(field.type) else {}
    records = [example(good)] * 2 + [example(features)]
    with pytest.raises(RecordError, match=message) as caught:
        read(records, pa.schema([field]))
    assert caught.value.offset == 2 * (len(records[0]) + 4)
    assert "'f'" in str(caught.value)


def field_of(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


@pytest.mark.parametrize("data", [b"\x0a\x7f", b"not a message", b"\x0a\x04\x0a\x02\x0a\x7f"])
def test_what_is_no_example_is_an_error_with_its_place(data: bytes) -> None:
    good = example({"one": (INT64, [1])})
    with pytest.raises(RecordError, match="not an Example") as caught:
        read([good, data, good])
    assert caught.value.offset == len(good) + 4


def test_feature_lists_are_not_overlooked() -> None:
    lists = field_of(2, field_of(1, field_of(1, b"x")))
    with pytest.raises(RecordError, match="is a SequenceExample"):
        read([b"", lists])


def test_a_null_within_an_array_cannot_be_written() -> None:
    batch = pa.record_batch({"x": pa.array([[1, None]], list_type(pa.int64()))})
    with pytest.raises(WriteError, match="'x' has a null within an array"):
        there_and_back(batch)


def test_doubles_are_rounded_to_floats_but_not_to_infinity() -> None:
    batch = pa.record_batch({"x": pa.array([0.1, float("inf"), float("nan"), None])})
    _, back = there_and_back(batch)
    assert back["x"][0].as_py() == np.float32(0.1)
    assert back["x"][1].as_py() == float("inf")
    assert np.isnan(back["x"][2].as_py())
    with pytest.raises(WriteError, match=r"1e\+39, which is beyond float"):
        there_and_back(pa.record_batch({"x": pa.array([1e39])}))


@pytest.mark.parametrize(
    "kind", [pa.decimal128(9, 2), list_type(pa.timestamp("us")), list_type(list_type(pa.int64()))]
)
def test_types_without_a_place_are_refused(kind: pa.DataType) -> None:
    with pytest.raises(ConfigError, match="Cast it"):
        columns_of(pa.schema([("x", kind)]))
