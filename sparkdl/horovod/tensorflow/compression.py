"""Smaller floating-point types for the way between the members, as Horovod's `Compression`.

Runs in: child
"""

from __future__ import annotations

from typing import Any


class Compressor:
    """Nothing changes; others override."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what travels, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor as it was before `compress`, but for what has happened to it."""
        return tensor


class _Cast(Compressor):
    dtype = ""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return floating-point tensors in the smaller type, others as they are."""
        import tensorflow as tf

        if not tensor.dtype.is_floating or tensor.dtype.size <= 2:
            return tensor, None
        return tf.cast(tensor, cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its own type again."""
        import tensorflow as tf

        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_Cast):
    """float16: half the bytes, 11 bits, up to 65504."""

    dtype = "float16"


class BF16Compressor(_Cast):
    """bfloat16: half the bytes, 8 bits, the range of float32."""

    dtype = "bfloat16"


class Compression:
    """What can be passed as `compression`."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
