"""Plain values as bytes and back: how the result of `map_fun` reaches the driver.

Runs in: child, driver

MessagePack with extension types for tuples, sets, complex numbers and numpy arrays. Unlike pickle, decoding runs no
code of the sender's.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from sparkdl.core.errors import ProtocolError, ResultError

_TUPLE, _SET, _COMPLEX, _ARRAY, _SCALAR = 1, 2, 3, 4, 5
_PLAIN = (bool, int, float, str, bytes, type(None))


def encode_value(value: Any) -> bytes:
    """Return `value` as MessagePack.

    Args:
        value: None, booleans, numbers, strings, bytes, numpy arrays and scalars, and lists,
            tuples, sets and dicts of them. Numpy dtypes without objects only.

    Raises:
        ResultError: for anything else; the message names the place inside `value`.
    """
    try:
        return msgspec.msgpack.encode(_lower(value, "result"))
    except (OverflowError, RecursionError) as error:
        raise ResultError(f"the value cannot be encoded: {error}") from None


def decode_value(data: bytes) -> Any:
    """Return the value that `encode_value` was given.

    Raises:
        ProtocolError: if `data` is not MessagePack of this kind.
    """
    try:
        return msgspec.msgpack.decode(data, ext_hook=_raise_up)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ProtocolError(f"a node sent a result that cannot be decoded: {error}") from None


def _lower(value: Any, path: str) -> Any:
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
        return _ext(_SET, [_lower(item, f"{path}{{}}") for item in value])
    if isinstance(value, complex):
        return _ext(_COMPLEX, [value.real, value.imag])
    if isinstance(value, (bool, int, float, str, bytes)):  # an enum or another subclass
        return next(kind(value) for kind in (int, float, str, bytes) if isinstance(value, kind))
    raise ResultError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}; map_fun can return "
        "None, numbers, strings, bytes, numpy arrays, and lists, tuples, sets and dicts of them. "
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
    if array.dtype.hasobject or array.dtype.names:
        raise ResultError(f"{path} is an array of dtype {array.dtype}; only plain dtypes travel")
    return msgspec.msgpack.encode(
        (array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes())
    )


def _raise_up(code: int, data: memoryview) -> Any:
    items = msgspec.msgpack.decode(data, ext_hook=_raise_up)
    if code == _TUPLE:
        return tuple(items)
    if code == _SET:
        return set(items)
    if code == _COMPLEX:
        return complex(*items)
    if code in (_ARRAY, _SCALAR):
        dtype, shape, raw = items
        array = np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape).copy()
        return array if code == _ARRAY else array[()]
    raise ValueError(f"unknown extension type {code}")
