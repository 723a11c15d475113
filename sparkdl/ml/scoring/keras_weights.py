"""Holds a large variable of Keras once, as it is made, read from a file or written to one.

Keras itself makes three copies to draw random values, four to read them (first values, the file's,
and two on their way into TensorFlow) and three to write them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparkdl.core.patch import Function, Patch
from sparkdl.values.ndarrays import Array

_LARGE_NBYTES = 1 << 26
"""A variable above it is large. It is written by pieces of this size."""
_ALIGN_NBYTES = 64
"""TensorFlow's alignment of tensors: it shares no other memory."""


@dataclass(frozen=True)
class _Making:
    """How large variables are made at this time, see `large_weights`."""

    is_file: bool
    reads: bool
    left: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """Variables that have no value of the file yet, with their initializers, by id."""


_making: ContextVar[_Making | None] = ContextVar("_making", default=None)


@contextmanager
def large_weights(is_file: bool = True, reads: bool = True) -> Iterator[None]:
    """Hold large variables once, meanwhile: of Keras models that are made, or loaded from a file.

    Without `reads` those of a file are zeros, which take no memory. Nothing changes with another
    backend than TensorFlow, or a Keras that stores variables otherwise, as those before 3.12.
    """
    import keras

    if keras.backend.backend() != "tensorflow" or any(patch.objection() for patch in _PATCHES):
        yield
        return
    for patch in _PATCHES:
        patch.apply()
    making = _Making(is_file, reads)
    token = _making.set(making)
    try:
        yield
    finally:
        _making.reset(token)
    if reads:
        for variable, initializer in making.left.values():  # which their layers do not save
            variable.assign(initializer(variable.shape, dtype=variable.dtype))


def _make(stock: Function, variable: Any, initializer: Any) -> None:
    making, shape, dtype = _making.get(), variable._shape, variable._dtype
    if making is None or not _is_large(shape, dtype):
        stock(variable, initializer)
    elif making.is_file:
        making.left[id(variable)] = variable, initializer
        stock(variable, lambda shape, dtype: _tensor(_unwritten(shape, dtype)))
    else:
        import tensorflow as tf

        is_random = type(initializer).__module__ == "keras.src.initializers.random_initializers"
        # In a graph, operations reuse the memory of their inputs.
        stock(variable, tf.function(initializer, autograph=False) if is_random else initializer)


def _assign(stock: Function, variable: Any, value: Any) -> Any:
    if making := _making.get():
        making.left.pop(id(variable), None)
    return stock(variable, value)


def _read(stock: Function, store: Any, key: str) -> Any:
    from keras.src.saving.saving_lib import safe_get_h5_dataset

    making = _making.get()
    data = safe_get_h5_dataset(store._h5_entry_group, key)
    if making is None or "dtype" in data.attrs or not _is_large(data.shape, data.dtype.name):
        return stock(store, key)
    array = _unwritten(data.shape, data.dtype.name)
    if making.reads:
        data.read_direct(array)
    return _tensor(array)


def _write(stock: Function, store: Any, key: str, value: Any) -> None:
    shape, dtype = tuple(getattr(value, "shape", ())), getattr(value, "dtype", "")
    dtype = getattr(dtype, "name", dtype)  # that of Keras is a text
    if not _is_large(shape, dtype):
        stock(store, key, value)
        return
    stock(store, key, value[:0])  # makes the group of the store
    del store[key]
    data = store._h5_entry_group.create_dataset(key, shape, dtype)
    rows = max(1, _LARGE_NBYTES * shape[0] // _nbytes(shape, dtype))
    for first in range(0, shape[0], rows):
        data[first : first + rows] = np.asarray(value[first : first + rows])


def _fits(stock: Function, model: Any) -> bool:
    """Return whether a file is to be put together in memory; or on the disk, where it goes."""
    return _making.get() is None and bool(stock(model))


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _is_large(shape: tuple[int, ...], dtype: str) -> bool:
    return dtype in ("float16", "float32", "float64") and _nbytes(shape, dtype) > _LARGE_NBYTES


def _unwritten(shape: tuple[int, ...], dtype: str) -> Array:
    """Return zeros, of which a page takes memory once it is written, as TensorFlow aligns them."""
    buffer = np.zeros(_nbytes(shape, dtype) + _ALIGN_NBYTES, np.uint8)
    aligned = buffer[-buffer.ctypes.data % _ALIGN_NBYTES :]
    return aligned[: _nbytes(shape, dtype)].view(dtype).reshape(shape)


def _tensor(array: Array) -> Any:
    """Return a tensor that shares an array's memory."""
    import tensorflow as tf

    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


_STORE = "keras.src.saving.saving_lib:H5IOStore"
_GROUP = "_h5_entry_group"
_VARIABLE = "keras.src.backend:Variable"
_MAKING = ("self", "initializer")
_PATCHES = (
    Patch(f"{_VARIABLE}._initialize_with_initializer", _MAKING, _make, ("_shape", "_dtype")),
    Patch(f"{_VARIABLE}.assign", ("self", "value"), _assign),
    Patch("keras.src.saving.saving_lib:is_memory_sufficient", ("model",), _fits),
    Patch(f"{_STORE}.__getitem__", ("self", "key"), _read, (_GROUP, "safe_get_h5_dataset")),
    Patch(f"{_STORE}.__setitem__", ("self", "key", "value"), _write, (_GROUP,)),
)
