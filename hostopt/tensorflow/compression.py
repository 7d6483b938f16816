"""Compression of tensors that travel, as Horovod names it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__: list[str] = []


class Compressor:
    """Base of compressors. A subclass of a program may override both methods.

    Attributes:
      wire_format: "fp16" or "bf16" if hostopt itself compresses, block by block, while tensors
        travel between hosts; sums are then in float32, and `compress` is not called. None calls
        `compress` and `decompress`.
    """

    wire_format: str | None = None

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor that travels, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """Returns the tensor in the form before `compress`."""
        del context
        return tensor


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""


class FP16Compressor(Compressor):
    """Sends float32 as float16 between hosts."""

    wire_format = "fp16"


class BF16Compressor(Compressor):
    """Sends float32 as bfloat16 between hosts."""

    wire_format = "bf16"


def wire_format_of(compression: Any) -> str | None:
    """Returns the wire format of a compressor; one of a program need not be a `Compressor`."""
    return getattr(compression, "wire_format", None)


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
