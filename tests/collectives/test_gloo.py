"""Memory of results is used again, but never while somebody holds a result."""

from __future__ import annotations

import numpy as np

from sparkdl.collectives.gloo import ALIGN_NBYTES, BufferPool

MB = 1 << 20


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_of_a_result_that_is_held_is_left_alone() -> None:
    memory = BufferPool()
    whole = memory.empty(MB, np.dtype(np.float32))
    whole[:] = 1
    part = whole[10:20].reshape(2, 5)
    at = address(whole)
    del whole
    other = memory.empty(MB, np.dtype(np.float32))
    other[:] = 2
    assert part.tolist() == [[1] * 5] * 2
    assert address(other) != at
    del part
    again = memory.empty(MB // 2, np.dtype(np.float64))
    assert address(again) == at
    assert again.shape == (MB // 2,)
    assert address(again) % ALIGN_NBYTES == 0


def test_much_or_little_memory_is_not_kept() -> None:
    memory = BufferPool()
    for count in (10, 700 * MB):
        array = memory.empty(count, np.dtype(np.uint8))
        assert array.shape == (count,)
        assert memory._kept == []
