"""`hvd.Compression`: gradients travel in half the bytes, with PyTorch and with TensorFlow.

https://github.com/horovod/horovod/blob/v0.28.1/horovod/torch/compression.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


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


class FP16Compressor(Compressor):
    """Floating-point numbers travel as float16, others as they are.

    float16 has 11 bits of precision; sums beyond 65504 overflow.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in float16, and its own dtype."""
        if hasattr(tensor, "is_floating_point"):  # of PyTorch
            is_wide = tensor.is_floating_point() and tensor.element_size() > 2
        else:
            is_wide = tensor.dtype.is_floating and tensor.dtype.size > 2
        return (_cast(tensor, "float16"), tensor.dtype) if is_wide else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its own dtype again."""
        return tensor if ctx is None else _cast(tensor, ctx)


def _cast(tensor: Any, dtype: Any) -> Any:
    if hasattr(tensor, "is_floating_point"):
        import torch

        return tensor.to(torch.float16 if dtype == "float16" else dtype)
    import tensorflow as tf

    return tf.cast(tensor, dtype)


class Compression:
    """The compressions to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor


def narrowed(
    tensors: Sequence[Any], compression: type[Compressor]
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Return what travels of tensors, and what makes tensors like the first ones of it."""
    pairs = [compression.compress(tensor) for tensor in tensors]

    def widened(results: Sequence[Any]) -> list[Any]:
        contexts = (ctx for _, ctx in pairs)
        return [compression.decompress(*pair) for pair in zip(results, contexts, strict=True)]

    return [narrow for narrow, _ in pairs], widened
