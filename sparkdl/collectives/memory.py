"""Memory of large results that nobody holds any more, to be used again.

Runs in: child

A fresh array of 100 MB costs its page faults: as much time as a third of reducing it.
"""

from __future__ import annotations

import sys
from itertools import compress
from typing import Any

import numpy as np

ALIGN_NBYTES = 64
"""Eigen's with AVX-512: where TensorFlow takes an array over without copying it."""
_SMALL_NBYTES = 1 << 20
_MAX_NBYTES = 512 << 20


def _references(arrays: list[np.ndarray[Any, Any]]) -> list[int]:
    """Return how many references there are to each array."""
    return [sys.getrefcount(array) for array in arrays]


_UNUSED = _references([np.empty(0)])[0]
"""References to an array that only a list has. Interpreters count them differently."""


class Reused:
    """Gives arrays whose contents are whatever they are; not for several threads."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray[Any, Any]] = []

    def empty(self, size: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an aligned array `[size]`: memory that is free, or fresh."""
        nbytes = size * dtype.itemsize
        raw = self._free(nbytes + ALIGN_NBYTES)
        start = -raw.ctypes.data % ALIGN_NBYTES
        whole: np.ndarray[Any, Any] = raw[start : start + nbytes].view(dtype)
        return whole

    def _free(self, nbytes: int) -> np.ndarray[Any, Any]:
        if nbytes < _SMALL_NBYTES:
            return np.empty(nbytes, np.uint8)
        is_unused = [count <= _UNUSED for count in _references(self._kept)]
        for raw, unused in zip(self._kept, is_unused, strict=True):
            if unused and raw.nbytes == nbytes:
                return raw
        self._kept = [*compress(self._kept, [not unused for unused in is_unused])]
        raw = np.empty(nbytes, np.uint8)
        if nbytes + sum(kept.nbytes for kept in self._kept) <= _MAX_NBYTES:
            self._kept.append(raw)
        return raw
