"""Work on a GPU's tensors that another thread goes on with.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def handed_over(tensor: torch.Tensor, work: Callable[[], T]) -> Callable[[], T]:
    """Return `work` for another thread, which waits there for what made `tensor`, on its GPU.

    Its result is complete when it returns. On the CPU that is so anyway.
    """
    if not tensor.is_cuda:
        return work
    import torch

    made = torch.cuda.Event()
    made.record(torch.cuda.current_stream(tensor.device))

    def on_gpu() -> T:
        with torch.cuda.device(tensor.device):
            stream = torch.cuda.current_stream()
            stream.wait_event(made)
            result = work()
            stream.synchronize()
            return result

    return on_gpu
