"""`hvd.Compression`: gradients travel in half the bytes.

Runs in: child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/torch/compression.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Compressor:
    """What a compression does before and after a reduction; subclass it for one of your own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what travels, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor as it was, but for what was lost."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Nothing is changed."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


class _Narrowing(Compressor):
    """Numbers with a point travel in a narrower dtype."""

    dtype = ""

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor in the narrower dtype, and its own."""
        import torch

        if not tensor.is_floating_point():
            return tensor, None
        return tensor.to(getattr(torch, cls.dtype)), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its own dtype."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Narrowing):
    """16 bits with 10 of precision: sums beyond 65504 overflow."""

    dtype = "float16"


class BF16Compressor(_Narrowing):
    """16 bits with the range of float32 and 7 bits of precision. Horovod has it in MXNet only."""

    dtype = "bfloat16"


class Compression:
    """The compressions to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
