"""Fields and numbers are found in bytes as protobuf finds them, many messages at a time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparkdl.data import wire
from sparkdl.data.protos import message_class
from tests.data.records import chunk

INT64 = st.integers(-(2**63), 2**63 - 1)


def message(values: list[bytes]) -> bytes:
    data: bytes = message_class("BytesList")(value=values).SerializeToString()
    return data


@given(st.lists(st.lists(st.binary(max_size=200), max_size=5), max_size=40))
@example([[b"x"] * 3] * 40)  # all have as many
@example([[b"x"] * 20, *([[b"y"]] * 40)])  # few have more
@example([[b"z" * 20000]] * 40)  # lengths of three bytes
def test_fields_are_found_in_their_order(lists: list[list[bytes]]) -> None:
    records = chunk(map(message, lists))
    found = wire.fields(records.data, records.starts, records.ends)
    values = wire.gather(records.data, found.start, found.end).to_pylist()
    assert values == [value for values in lists for value in values]
    assert found.parent.tolist() == [i for i, values in enumerate(lists) for _ in values]
    assert set(found.tag.tolist()) <= {0x0A}


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",  # no length
        b"\x0a\x05abc",  # longer than its message
        b"\x0a\xff\xff\xff\xff\xff\xff\x01",  # longer than any message
        b"\x08\x01",  # a number, not a field with a length
        b"\x82\x01\x00",  # field 16
    ],
)
def test_other_fields_are_left_to_protobuf(data: bytes, count: int) -> None:
    records = chunk([data] * count)
    with pytest.raises(wire.IrregularError):
        wire.fields(records.data, records.starts, records.ends)


def test_one_field_or_none_is_found_and_two_are_left_to_protobuf() -> None:
    records = chunk([message([b"a"]), message([]), message([b"bc"])])
    tag, start, end = wire.only_field(records.data, records.starts, records.ends)
    assert tag.tolist() == [0x0A, 0, 0x0A]
    assert wire.gather(records.data, start, end).to_pylist() == [b"a", b"", b"bc"]
    records = chunk([message([b"a", b"b"]), message([])])
    with pytest.raises(wire.IrregularError):
        wire.only_field(records.data, records.starts, records.ends)


@given(st.lists(st.lists(INT64, max_size=5)))
@example([[0, 127]] * 3)
@example([[128, -1, 2**63 - 1]])
def test_varints_are_those_of_protobuf(lists: list[list[int]]) -> None:
    flat = np.array([value for values in lists for value in values], np.int64)
    data, offsets = wire.encode_varints(flat)
    packed = message_class("Int64List")(value=flat.tolist()).SerializeToString()
    assert packed.endswith(data.tobytes())
    ends = offsets[np.cumsum([0, *map(len, lists)])]
    numbers, before = wire.decode_varints(data, ends)
    assert numbers.tolist() == flat.tolist()
    assert np.diff(before).tolist() == [len(values) for values in lists]


@pytest.mark.parametrize("data", [b"\x80", b"\x01\x80", b"\x80" * 10 + b"\x01"])
def test_numbers_that_do_not_end_are_left_to_protobuf(data: bytes) -> None:
    with pytest.raises(wire.IrregularError):
        wire.decode_varints(np.frombuffer(data, np.uint8), np.array([0, len(data)]))


def test_prefixes_are_put_before_what_is_there_only() -> None:
    array = pa.array([b"zero", b"a", None, b"", b"bc"], pa.large_binary())[1:]
    out = wire.prefixed(array, lambda length: b"%d:" % length)
    assert out.to_pylist() == [b"1:a", None, b"0:", b"2:bc"]
    offsets, data = wire.contents(out)
    assert data.tobytes() == b"1:a0:2:bc"
    assert offsets.tolist() == [0, 3, 3, 5, 9]
    assert wire.contents(out[:0])[0].tolist() == [0]
