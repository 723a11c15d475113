"""`BufferPool`: memory of large results on CPUs, used again.

Runs in: child
"""

from __future__ import annotations

import sys
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

ALIGN_NBYTES = 64
"""Eigen's with AVX-512: where TensorFlow takes memory over without copying it."""
_SMALL_NBYTES = 1 << 20
_MAX_NBYTES = 512 << 20


def _references(arrays: list[np.ndarray[Any, Any]]) -> list[int]:
    """Return how many references there are to each array."""
    return [sys.getrefcount(array) for array in arrays]


_UNUSED = _references([np.empty(0)])[0]
"""References to an array that only a list has. Interpreters count them differently."""


class BufferPool:
    """Memory of large results, used again when nobody refers to it. Not for several threads.

    A fresh array of 100 MB costs its page faults: as much time as a third of reducing it.
    """

    def __init__(self) -> None:
        self._kept: list[np.ndarray[Any, Any]] = []

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor `[numel]`; a large one is aligned, in memory that is free, or fresh."""
        import torch

        nbytes = numel * dtype.itemsize
        if nbytes < _SMALL_NBYTES:
            return torch.empty(numel, dtype=dtype)
        raw = self._free(nbytes + ALIGN_NBYTES)
        start = -raw.__array_interface__["data"][0] % ALIGN_NBYTES  # `.ctypes` is slower
        return torch.from_numpy(raw[start : start + nbytes]).view(dtype)

    def _free(self, nbytes: int) -> np.ndarray[Any, Any]:
        is_unused = [count <= _UNUSED for count in _references(self._kept)]
        for raw, unused in zip(self._kept, is_unused, strict=True):
            if unused and raw.nbytes == nbytes:
                return raw
        self._kept = [*compress(self._kept, [not unused for unused in is_unused])]
        raw = np.empty(nbytes, np.uint8)
        if nbytes + sum(kept.nbytes for kept in self._kept) <= _MAX_NBYTES:
            self._kept.append(raw)
        return raw
