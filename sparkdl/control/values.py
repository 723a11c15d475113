"""Plain values as bytes and back: how the result of `map_fun` reaches the driver.

Runs in: child, driver

MessagePack with extension types for tuples, sets, complex numbers and numpy arrays. Unlike pickle,
decoding runs no code of the sender's.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np

from sparkdl.control.messages import MAX_MESSAGE_NBYTES
from sparkdl.core.errors import ProtocolError, ResultError

MAX_VALUE_NBYTES = MAX_MESSAGE_NBYTES // 4 * 3 - 4096
"""An encoded value at most: what fits into one message, as base64 beside the other fields."""

_TUPLE, _SET, _COMPLEX, _ARRAY, _SCALAR, _FROZENSET = 1, 2, 3, 4, 5, 6
_DTYPE = re.compile(r"[<>|][biufcSUVmM]\d+(\[[\w/]+\])?")
_PLAIN = (bool, int, float, str, bytes, type(None))


def encode_value(value: Any) -> bytes:
    """Return `value` as MessagePack.

    Args:
        value: None, booleans, numbers, strings, bytes, numpy arrays and scalars, and lists,
            tuples, sets and dicts of them. Numpy dtypes without objects only.
    """
    try:
        data = msgspec.msgpack.encode(_lower(value, "result"))
    except (OverflowError, RecursionError, UnicodeError) as error:
        raise ResultError(f"the value cannot be encoded: {error}") from None
    if len(data) > MAX_VALUE_NBYTES:
        raise ResultError(
            f"the value takes {len(data)} bytes, and {MAX_VALUE_NBYTES} at most can travel to the "
            "driver. Save it to a file in map_fun and return its path instead"
        )
    return data


def decode_value(data: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(data, ext_hook=_raise_up)
    except (msgspec.MsgspecError, ValueError, TypeError, SyntaxError, RecursionError) as error:
        raise ProtocolError(f"a node sent a result that cannot be decoded: {error}") from None


def _lower(value: Any, path: str) -> Any:  # noqa: C901 (one branch a type)
    if type(value) is int and not -(2**63) <= value < 2**64:
        raise ResultError(f"{path} is the integer {value}, which takes more than 64 bits")
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, _array_bytes(value, path))
    if isinstance(value, np.generic):
        return msgspec.msgpack.Ext(_SCALAR, _array_bytes(np.asarray(value), path))
    if isinstance(value, dict):
        return {_key(key, path): _lower(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list):
        return [_lower(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return _ext(_TUPLE, [_lower(item, f"{path}[{i}]") for i, item in enumerate(value)])
    if isinstance(value, (set, frozenset)):
        code = _FROZENSET if isinstance(value, frozenset) else _SET
        return _ext(code, [_lower(item, f"{path}{{}}") for item in value])
    if isinstance(value, complex):
        return _ext(_COMPLEX, [value.real, value.imag])
    if isinstance(value, (int, float, str, bytes)):  # an enum or another subclass
        # `str` of an enum gives its name, `str.__str__` its text.
        kinds: tuple[Any, ...] = (int, float, bytes)
        kind = next((kind for kind in kinds if isinstance(value, kind)), str.__str__)
        return _lower(kind(value), path)
    raise ResultError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}; only None, numbers, "
        "strings, bytes, numpy arrays, and lists, tuples, sets and dicts of them can travel. "
        "Return history.history, model.get_weights() or the path of a saved file instead"
    )


def _key(key: Any, path: str) -> Any:
    if type(key) in _PLAIN:
        return key
    if isinstance(key, np.generic):
        return key.item()
    raise ResultError(f"{path} has the key {key!r}; keys must be numbers or strings")


def _ext(code: int, items: list[Any]) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(items))


def _array_bytes(array: np.ndarray[Any, Any], path: str) -> bytes:
    if isinstance(array, np.ma.MaskedArray):
        raise ResultError(f"{path} is a masked array, whose mask would be lost; return .filled()")
    # `dtype.str` loses the fields of a structured dtype.
    if array.dtype.hasobject or np.dtype(array.dtype.str) != array.dtype:
        raise ResultError(f"{path} is an array of dtype {array.dtype}; only plain dtypes travel")
    return msgspec.msgpack.encode(
        (array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes())
    )


def _raise_up(code: int, data: memoryview) -> Any:
    items = msgspec.msgpack.decode(data, ext_hook=_raise_up)
    if code == _TUPLE:
        return tuple(items)
    if code in (_SET, _FROZENSET):
        return set(items) if code == _SET else frozenset(items)
    if code == _COMPLEX:
        real, imaginary = items
        if type(real) is not float or type(imaginary) is not float:
            raise TypeError("a complex number that is not two floats")
        return complex(real, imaginary)
    if code in (_ARRAY, _SCALAR):
        dtype, shape, raw = items
        if not _DTYPE.fullmatch(dtype):  # numpy reads more than it writes, with warnings at times
            raise ValueError(f"no dtype that an array has: {dtype}")
        # A view would be read-only, and would keep the whole message in memory.
        array = np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()
        return array if code == _ARRAY else array[()]
    raise ValueError(f"unknown extension type {code}")
