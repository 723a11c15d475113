"""TensorFlowOnSpark's contract for `dfutil`'s functions on Examples, and what was mended in it.

https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/dfutil.py
"""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest
from pyspark.sql import Row

from sparkdl.core.errors import ConfigError, ReadError
from sparkdl.data.examples import Kind, example_class
from sparkdl.tfos import dfutil
from tests.data.records import example, read_example

INT64, FLOAT, BYTES = Kind.INT64, Kind.FLOAT, Kind.BYTES
DTYPES = [
    ("int", "int"),
    ("long", "bigint"),
    ("flag", "boolean"),
    ("float", "float"),
    ("double", "double"),
    ("text", "string"),
    ("bytes", "binary"),
    ("ints", "array<int>"),
    ("doubles", "array<double>"),
    ("texts", "array<string>"),
    ("blobs", "array<binary>"),
]
ROW = {
    "int": 1,
    "long": -(2**40),
    "flag": True,
    "float": 0.5,
    "double": 0.25,
    "text": "é",
    "bytes": bytearray(b"\xff"),
    "ints": [1, 2],
    "doubles": [0.5, 1.5],
    "texts": ["a", "b"],
    "blobs": [bytearray(b"\xff"), bytearray(b"")],
}
BINARY = ["bytes", "blobs"]


def to_examples(rows: list[Row]) -> list[tuple[bytearray, None]]:
    to_example = cloudpickle.loads(cloudpickle.dumps(dfutil.toTFExample(DTYPES)))
    return list(to_example(iter(rows)))


def test_rows_become_pairs_of_an_example_and_none() -> None:
    ((data, nothing),) = to_examples([Row(**ROW)])
    assert isinstance(data, bytearray)
    assert nothing is None
    found = read_example(bytes(data))
    assert found["flag"] == (INT64, [1])
    assert found["double"] == (FLOAT, [0.25])
    assert found["blobs"] == (BYTES, [b"\xff", b""])


def test_examples_become_rows_again() -> None:
    rows = [Row(**ROW)] * 1001  # more than one batch
    back = list(dfutil.fromTFExample(to_examples(rows), BINARY))
    assert [row.asDict() for row in back] == [{**ROW, "flag": 1}] * 1001
    assert list(back[0].asDict()) == sorted(ROW)


def test_a_null_is_a_feature_left_out_not_the_text_none() -> None:
    empty: dict[str, Any] = {**dict.fromkeys(ROW), "ints": []}
    ((data, _),) = to_examples([Row(**empty)])
    assert read_example(bytes(data)) == {"ints": (INT64, [])}
    assert list(dfutil.fromTFExample([data])) == [Row(ints=None)]


def test_any_form_of_an_example_is_taken() -> None:
    data = example({"x": (INT64, [1])})
    message = example_class().FromString(data)
    for record in (data, bytearray(data), memoryview(data), message, (data, None), (message, 1)):
        assert list(dfutil.fromTFExample([record])) == [Row(x=1)]
    with pytest.raises(ReadError, match="no serialised Example"):
        list(dfutil.fromTFExample([b"\x0a\x7f"]))


def test_the_schema_of_one_example() -> None:
    record = example(
        {
            "z": (INT64, [1]),
            "float": (FLOAT, [1]),
            "floats": (FLOAT, [1, 2]),
            "text": (BYTES, [b"a"]),
            "bytes": (BYTES, [b"a"]),
            "blobs": (BYTES, [b"a", b"b"]),
            "empty": (INT64, []),
            "nothing": None,
        }
    )
    expected = (
        "struct<blobs:array<binary>,bytes:binary,empty:bigint,float:double,floats:array<double>,"
        "nothing:string,text:string,z:bigint>"
    )
    for given in (record, example_class().FromString(record)):
        schema = dfutil.infer_schema(given, BINARY)
        assert schema.simpleString() == expected
        assert all(field.nullable for field in schema)


def test_bytes_that_are_no_text_must_be_named() -> None:
    record = example({"x": (BYTES, [b"\xff"])})
    with pytest.raises(ReadError, match=r"'x' holds .*binary_features"):
        list(dfutil.fromTFExample([record]))
    assert list(dfutil.fromTFExample([record], ["x"])) == [Row(x=bytearray(b"\xff"))]


@pytest.mark.parametrize(
    "dtype", ["timestamp", "decimal(9,2)", "array<array<int>>", "map<int,int>"]
)
def test_types_without_a_place_are_refused_before_any_row(dtype: str) -> None:
    with pytest.raises(ConfigError):
        dfutil.toTFExample([("x", dtype)])
