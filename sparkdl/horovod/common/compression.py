"""`hvd.Compression`: gradients travel in half the bytes, with PyTorch and with TensorFlow.

https://github.com/horovod/horovod/blob/v0.28.1/horovod/torch/compression.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """A compression of tensors for a reduction. This base class changes nothing; subclass it."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and the context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Undo `compress`, up to the precision it lost."""
        return tensor


class NoneCompressor(Compressor):
    """Nothing is changed."""


class _Cast(Compressor):
    """Floating-point numbers travel in a narrower dtype, others as they are."""

    dtype = ""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in the narrower dtype, and its own."""
        if hasattr(tensor, "is_floating_point"):  # of PyTorch
            is_wide = tensor.is_floating_point() and tensor.element_size() > 2
        else:
            is_wide = tensor.dtype.is_floating and tensor.dtype.size > 2
        return (_cast(tensor, cls.dtype), tensor.dtype) if is_wide else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its own dtype again."""
        return tensor if ctx is None else _cast(tensor, ctx)


def _cast(tensor: Any, dtype: Any) -> Any:
    if hasattr(tensor, "is_floating_point"):
        import torch

        return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    import tensorflow as tf

    return tf.cast(tensor, dtype)


class FP16Compressor(_Cast):
    """float16: 11 bits of precision; sums beyond 65504 overflow."""

    dtype = "float16"


class BF16Compressor(_Cast):
    """bfloat16: 8 bits of precision, the range of float32. Horovod has it in MXNet only."""

    dtype = "bfloat16"


class Compression:
    """The compressions to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def narrowed(
    tensors: Sequence[Any], compression: type[Compressor]
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Return what travels of tensors, and what makes tensors like the first ones of it."""
    pairs = [compression.compress(tensor) for tensor in tensors]

    def widened(results: Sequence[Any]) -> list[Any]:
        contexts = (ctx for _, ctx in pairs)
        return [compression.decompress(*pair) for pair in zip(results, contexts, strict=True)]

    return [narrow for narrow, _ in pairs], widened
