"""Compression of tensors that travel, as Horovod names it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Base of compressors. A subclass of a program may override both methods."""

    # "fp16" or "bf16" if hostopt itself compresses, block by block, while tensors travel between
    # hosts; sums are then in float32. A subclass that overrides a method is called instead.
    wire_format: str | None = None

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor that travels, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """Returns the tensor in the form before `compress`."""
        return tensor


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""


class _HalfCompressor(Compressor):
    """Sends float32 with 16 bits between hosts."""

    dtype: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns a floating tensor in the dtype of 16 bits, and its own dtype."""
        return _cast(tensor, cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """Returns the tensor in the dtype before `compress`."""
        return _cast(tensor, context)


class FP16Compressor(_HalfCompressor):
    """Sends float32 as float16 between hosts."""

    wire_format = "fp16"
    dtype = tf.float16


class BF16Compressor(_HalfCompressor):
    """Sends float32 as bfloat16 between hosts."""

    wire_format = "bf16"
    dtype = tf.bfloat16


def _cast(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tensor, dtype) if tensor.dtype.is_floating else tensor


def wire_format_of(compression: Any) -> str | None:
    """Returns the wire format of a compressor; None if it has to be called itself.

    A compressor of a program need not be a `Compressor`.
    """
    methods = (getattr(compression, name, None) for name in ("compress", "decompress"))
    if any(getattr(each, "__module__", None) != __name__ for each in methods):
        return None
    return getattr(compression, "wire_format", None)


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
