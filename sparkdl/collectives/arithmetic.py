"""What members compute by themselves, before and after they reduce.

Runs in: child
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.collectives.base import Op

if TYPE_CHECKING:
    import torch


def dtypes() -> list[torch.dtype]:
    """Return the dtypes that can be reduced."""
    import torch

    whole = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
    return [torch.float32, torch.float64, torch.float16, torch.bfloat16, *whole]


def wider() -> dict[torch.dtype, torch.dtype]:
    """Return what is reduced in the place of dtypes that gloo does not know."""
    import torch

    return {torch.int16: torch.int32, torch.bool: torch.uint8}


def scale_(tensor: torch.Tensor, factor: float, divisor: int = 1) -> torch.Tensor:
    """Multiply by `factor / divisor` in place; whole numbers are rounded towards zero."""
    import torch

    if factor == divisor:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor / divisor)
    if factor == 1.0:
        return tensor.copy_(torch.div(tensor, divisor, rounding_mode="trunc"))
    return tensor.copy_((tensor.to(torch.float64) * factor / divisor).trunc())


def reduced(parts: torch.Tensor, op: Op) -> torch.Tensor:
    """Return `[size, …]` reduced over the first dimension, in the same dtype."""
    import torch

    if op in (Op.SUM, Op.AVERAGE):
        return parts.sum(0, dtype=parts.dtype)
    if op is Op.PRODUCT:
        return parts.prod(0, dtype=parts.dtype)
    return torch.amin(parts, 0) if op is Op.MIN else torch.amax(parts, 0)
