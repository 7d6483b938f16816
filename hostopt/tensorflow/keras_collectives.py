"""Collectives with the order of arguments of `horovod.keras`."""

from __future__ import annotations

from typing import Any

from hostopt.collectives.reduce_op import ReduceOp
from hostopt.tensorflow import collectives
from hostopt.tensorflow.allreduce import allreduce as allreduce_with_other_arguments
from hostopt.tensorflow.compression import Compression


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduces a value over the ranks; see `hostopt.tensorflow.allreduce` for the arguments."""
    return allreduce_with_other_arguments(
        value,
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Joins the values of all ranks along the first dimension."""
    return collectives.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the value of one rank."""
    return collectives.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = ReduceOp.AVERAGE) -> Any:
    """Reduces a value over the ranks, and returns a part of its rows to each rank."""
    return collectives.reducescatter(value, op=op, name=name)
