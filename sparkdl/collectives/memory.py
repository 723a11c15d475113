"""Memory of large results that nobody holds any more, to be used again.

Runs in: child

A fresh array of 100 MB costs its page faults: as much time as a third of reducing it.
"""

from __future__ import annotations

import sys
from itertools import compress
from typing import Any

import numpy as np

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
        """Return an array `[size]`: memory that is free, or fresh."""
        nbytes = size * dtype.itemsize
        if nbytes < _SMALL_NBYTES:
            return np.empty(size, dtype)
        is_unused = [count <= _UNUSED for count in _references(self._kept)]
        for place, unused in enumerate(is_unused):
            if unused and self._kept[place].nbytes == nbytes:
                return self._kept[place].view(dtype)
        held = [not unused for unused in is_unused]
        self._kept = [*compress(self._kept, held)]
        array = np.empty(nbytes, np.uint8)
        if nbytes + sum(kept.nbytes for kept in self._kept) <= _MAX_NBYTES:
            self._kept.append(array)
        return array.view(dtype)
