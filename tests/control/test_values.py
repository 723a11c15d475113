"""Plain values come back equal and of the same type; the rest is refused by its place."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as npst

from sparkdl.control.messages import MAX_MESSAGE_NBYTES, ChildReturned, encode
from sparkdl.control.values import MAX_VALUE_NBYTES, decode_value, encode_value
from sparkdl.core.errors import ProtocolError, ResultError

DTYPES = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.unsigned_integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    npst.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    npst.datetime64_dtypes(endianness="="),
    npst.timedelta64_dtypes(endianness="="),
    npst.byte_string_dtypes(min_len=1),
    npst.unicode_string_dtypes(min_len=1, endianness="="),
)
ARRAYS = DTYPES.flatmap(lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, min_side=0)))
HASHABLE = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.frozensets(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
KEYS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
VALUES: st.SearchStrategy[Any] = st.recursive(
    KEYS
    | st.floats()
    | st.complex_numbers()
    | ARRAYS
    | ARRAYS.filter(lambda a: a.size).map(lambda a: a.ravel()[0])
    | st.sets(HASHABLE),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=10,
)


def assert_same(left: Any, right: Any) -> None:
    """Assert equality of types, structure and bits; NaN equals NaN."""
    assert type(left) is type(right)
    if isinstance(left, (np.ndarray, np.generic)):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, float):
        assert np.float64(left).tobytes() == np.float64(right).tobytes() or left != left
    elif isinstance(left, complex):
        assert_same([left.real, left.imag], [right.real, right.imag])
    else:
        assert left == right


@given(VALUES)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert_same(decode_value(encode_value(value)), value)


def test_arrays_come_back_writable_and_from_any_memory_layout() -> None:
    whole = np.arange(24.0).reshape(2, 3, 4)
    for array in (whole.T, whole[:, ::2, ::-1], np.asfortranarray(whole), whole[0, 0, 0:0]):
        back = decode_value(encode_value(array))
        np.testing.assert_array_equal(back, array)
        back[...] = 0
    assert_same(decode_value(encode_value(np.array(1.5))), np.array(1.5))


class Colour(str, enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Metres(float):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (Metres(1.5), 1.5),
        (Point(1, 2), (1, 2)),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        ({np.int64(3): 1, np.str_("k"): 2}, {3: 1, "k": 2}),
    ],
)
def test_values_of_subclasses_come_back_plain(value: Any, plain: Any) -> None:
    assert_same(decode_value(encode_value(value)), plain)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "result is a builtins.object;"),
        ({"model": [1, Path("x")]}, "result['model'][1] is a pathlib."),
        ((0, {"a": {1: lambda: 0}}), "result[1]['a'][1] is a builtins.function"),
        ({"s": {Ellipsis}}, "result['s']{} is a builtins.ellipsis"),
        ([{(1, 2): 3}], "result[0] has the key (1, 2); keys must be"),
        ({"n": [0, 2**64]}, f"result['n'][1] is the integer {2**64}, which takes more than 64"),
        ([-(2**63) - 1], "result[0] is the integer -9223372036854775809, which"),
        ([np.array([None])], "result[0] is an array of dtype object; only plain"),
        ({"a": np.zeros(2, "i4,f8")}, "result['a'] is an array of dtype [('f0',"),
        ([np.void(b"ab"), np.zeros(1, "i4,f8")[0]], "result[1] is an array of dtype [('f0',"),
        ([np.ma.masked_array([1, 2], [True, False])], "result[0] is a masked array"),
        ("\ud800", "cannot be encoded: 'utf-8' codec"),
    ],
)
def test_what_cannot_travel_is_refused_by_its_place(value: Any, words: str) -> None:
    with pytest.raises(ResultError) as refused:
        encode_value(value)
    assert words in str(refused.value)


def test_the_largest_value_still_fits_into_a_message_and_a_larger_one_is_refused() -> None:
    largest = encode_value(bytes(MAX_VALUE_NBYTES - 5))  # behind five bytes that tell its length
    assert len(largest) == MAX_VALUE_NBYTES
    assert len(encode(ChildReturned(2**31, largest))) <= MAX_MESSAGE_NBYTES
    with pytest.raises(ResultError, match=r"takes \d+ bytes.*return its path"):
        encode_value(bytes(MAX_VALUE_NBYTES - 4))


@pytest.mark.parametrize(
    "items",
    [
        *((dtype, (1,), bytes(8)) for dtype in ("a8", "i4,f8", "O", "|O8", "f8", 7, None)),
        ("(1,2", (1,), b""),
        ("f8", (2**62, 2**62), b"12345678"),
        ("f8", (2,), b"12345678"),
        ("no such dtype", (1,), b""),
        ("f8", (1,)),
        7,
    ],
)
def test_an_array_that_does_not_add_up_is_a_protocol_error(items: Any) -> None:
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(4, msgspec.msgpack.encode(items)))
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        decode_value(data)


@pytest.mark.parametrize("data", [b"", b"\x91" * 100_000, b"\x00\x00", b"\xc1"])
def test_bytes_that_are_no_value_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        decode_value(data)
