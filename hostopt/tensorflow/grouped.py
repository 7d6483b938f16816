"""Collectives over several tensors that give each rank other rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hostopt.collectives.reduce_op import ReduceOp
from hostopt.tensorflow.calls import call_name
from hostopt.tensorflow.collectives import allgather, reducescatter
from hostopt.tensorflow.compression import Compression
from hostopt.tensorflow.process_sets import refuse_process_set


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = None,
) -> list[tf.Tensor]:
    """Gathers several tensors; see `allgather` for the arguments.

    Args:
      tensors: the tensors, the same number on all ranks.

    Returns:
      The results, in the same order.
    """
    del ignore_name_scope
    refuse_process_set(process_set)
    name = call_name("grouped_allgather", name)
    return [allgather(each, f"{name}_{i}") for i, each in enumerate(tensors)]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduces several tensors; see `reducescatter` for the arguments.

    Args:
      tensors: the tensors, the same number on all ranks.

    Returns:
      The rows of this rank, in the same order.
    """
    name = call_name("grouped_reducescatter", name)
    return [
        reducescatter(
            each,
            device_dense,
            compression,
            op,
            f"{name}_{i}",
            process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        for i, each in enumerate(tensors)
    ]
