"""Memory of results is used again, but never while somebody holds a result."""

from __future__ import annotations

import pytest

from sparkdl.collectives.memory import ALIGN_NBYTES, BufferPool

pytestmark = pytest.mark.torch

MB = 1 << 20


def test_memory_of_a_result_that_is_held_is_left_alone() -> None:
    import torch

    memory = BufferPool()
    whole = memory.empty(MB, torch.float32).fill_(1)
    part = whole[10:20].view(2, 5)
    lent = torch.utils.dlpack.to_dlpack(part)  # as to TensorFlow
    at = whole.data_ptr()
    del whole, part
    other = memory.empty(MB, torch.float32).fill_(2)
    part = torch.utils.dlpack.from_dlpack(lent)
    assert part.tolist() == [[1] * 5] * 2
    assert other.data_ptr() != at
    del part, lent
    again = memory.empty(MB // 2, torch.float64)
    assert again.data_ptr() == at
    assert again.shape == (MB // 2,)
    assert again.data_ptr() % ALIGN_NBYTES == 0


def test_much_or_little_memory_is_not_kept() -> None:
    import torch

    memory = BufferPool()
    for count in (10, 700 * MB):
        assert memory.empty(count, torch.uint8).shape == (count,)
        assert memory._kept == []
