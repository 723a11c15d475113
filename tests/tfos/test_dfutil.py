"""TensorFlowOnSpark's contract for `dfutil`'s functions on Examples, and what was mended in it.

https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/dfutil.py
"""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import Row

from sparkdl.core.errors import ReadError
from sparkdl.data.examples import Kind, example_class
from sparkdl.tfos import dfutil
from tests.data.records import example

INT64, FLOAT, BYTES = Kind.INT64, Kind.FLOAT, Kind.BYTES
BINARY = ["bytes", "blobs"]


def test_examples_become_rows() -> None:
    cells: dict[str, tuple[Any, Any]] = {  # a feature, and what becomes of it
        "long": ((INT64, [-(2**40)]), -(2**40)),
        "float": ((FLOAT, [0.5]), 0.5),
        "text": ((BYTES, ["é".encode()]), "é"),
        "bytes": ((BYTES, [b"\xff"]), bytearray(b"\xff")),
        "ints": ((INT64, [1, 2]), [1, 2]),
        "texts": ((BYTES, [b"a", b"b"]), ["a", "b"]),
        "blobs": ((BYTES, [b"\xff", b""]), [bytearray(b"\xff"), bytearray(b"")]),
        "none": ((INT64, []), None),
    }
    record = example({name: feature for name, (feature, _) in cells.items()})
    (found,) = dfutil.fromTFExample([record], BINARY)
    assert found.asDict() == {name: value for name, (_, value) in cells.items()}
    assert list(found.asDict()) == sorted(cells)


def test_any_form_of_an_example_is_taken() -> None:
    data = example({"x": (INT64, [1])})
    message = example_class().FromString(data)
    for record in (data, bytearray(data), memoryview(data), message, (data, None), (message, 1)):
        assert list(dfutil.fromTFExample([record])) == [Row(x=1)]
    with pytest.raises(ReadError, match="no serialised Example"):
        list(dfutil.fromTFExample([b"\x0a\x7f"]))


def test_the_schema_of_one_example() -> None:
    numbers = {"z": (INT64, [1]), "float": (FLOAT, [1]), "floats": (FLOAT, [1, 2])}
    texts = {"text": (BYTES, [b"a"]), "bytes": (BYTES, [b"a"]), "blobs": (BYTES, [b"a", b"b"])}
    record = example({**numbers, **texts, "empty": (INT64, []), "nothing": None})
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
