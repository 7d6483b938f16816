"""Collectives as operations of a graph, each matched by its name on all ranks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from hostopt.communicator import Communicator, ReduceOp
from hostopt.posted_sum import open_posted_sum
from hostopt.ring import Array
from hostopt.tensorflow.background import HOST_DEVICE, abort_on_error, call_in_background

__all__: list[str] = []


def all_reduce(
    tensor: tf.Tensor, communicator: Communicator, op: ReduceOp = ReduceOp.SUM, what: str = ""
) -> tf.Tensor:
    """Reduces one tensor over the ranks.

    Any number of these can wait at the same time, and they may be built and run in another order
    on each rank: they are matched by name.

    Args:
      tensor: tensor of any shape, one of `hostopt.communicator.DTYPES`.
      communicator: reaches all ranks.
      op: how to reduce.
      what: name of the tensor, the same on all ranks; by default its name in the graph.

    Returns:
      Tensor like `tensor`, on the host.
    """
    channel = communicator.duplicate(what or tensor.op.name)
    return _array_op(
        communicator, lambda array: channel.all_reduce(array, op), tensor, "HostAllReduce"
    )


_FLAG_BASE = 4096  # more than there are ranks; two such digits are exact in a float32


@dataclasses.dataclass
class Flags:
    """What a rank asks the others for between two steps; it travels with a posted number.

    Args:
      stop: this rank asks for a stop.
      save: this rank is about to save.
      ranks_stopping: how many ranks asked for a stop in the last step.
      ranks_saving: how many were about to save.
      travel: whether a number that carries the flags is posted in each step.
    """

    stop: bool = False
    save: bool = False
    ranks_stopping: int = 0
    ranks_saving: int = 0
    travel: bool = False

    @property
    def own(self) -> int:
        """This rank's flags as a number whose sum tells how many ranks have set each."""
        return self.stop + _FLAG_BASE * self.save

    def agree(self, total: float) -> None:
        """Take in the sum of all ranks' flags."""
        self.ranks_saving, self.ranks_stopping = divmod(int(total), _FLAG_BASE)


def sum_posted(
    scalar: tf.Tensor,
    name: str,
    communicator: Communicator,
    after: Sequence[tf.Tensor],
    flags: Flags,
) -> tf.Tensor:
    """Sum one number over the ranks, without making them wait for each other.

    Each rank posts its number when it has it, and reads the sum later on.

    Args:
      scalar: tensor of shape [], float32.
      name: what all ranks call it.
      communicator: all ranks build the same operations on it, in the same order.
      after: the sum is read when these have been computed, from all ranks.
      flags: travel with the number.

    Returns:
      Tensor of shape [], on the host.
    """
    posted = open_posted_sum(communicator, f"the sum of {name}")

    def post(value: Array) -> Any:
        posted.post(float(value), float(flags.own))
        return np.int32(0)

    def collect() -> Any:
        total, agreed = posted.collect()
        flags.agree(float(agreed))
        return total

    flags.travel = True

    with tf.device(HOST_DEVICE):
        token = tf.numpy_function(post, [scalar], tf.int32, name="HostPost")
        with tf.control_dependencies(after):
            call = abort_on_error(communicator, lambda _: [collect()])
            (result,) = call_in_background(call, [token], [tf.float32], name="HostCollect")
    result.set_shape([])
    return result


def broadcast(
    tensor: tf.Tensor, communicator: Communicator, root: int = 0, what: str = ""
) -> tf.Tensor:
    """Gives every rank the tensor of one.

    Args:
      tensor: tensor of any shape and fixed-size dtype.
      communicator: reaches all ranks.
      root: rank whose values hold.
      what: name of the tensor, the same on all ranks; by default its name in the graph.

    Returns:
      Tensor like `tensor`, on the host.
    """
    channel = communicator.duplicate(what or tensor.op.name)
    return _array_op(
        communicator, lambda array: channel.broadcast(array, root), tensor, "HostBroadcast"
    )


def _array_op(
    communicator: Communicator,
    function: Callable[[Array], Array],
    tensor: tf.Tensor,
    name: str,
) -> tf.Tensor:
    call = abort_on_error(communicator, lambda array: [function(array)])
    (result,) = call_in_background(call, [tensor], [tensor.dtype], name)
    result.set_shape(tensor.shape)
    return result


_SAME_ON_ALL_RANKS = re.compile(
    r"(.*/)?(Host(AllFinite|AllReduce|Broadcast|Exchange|Reduced)"
    r"|host_reduce(_\d+)?/(wait|reduce))(_\d+)*$"
)


def is_same_on_all_ranks(op: tf.Operation) -> bool:
    """Whether an operation is one of these, whose results all ranks have alike.

    Args:
      op: an operation of a graph.

    Returns:
      True for a reduction or a broadcast.
    """
    types = ("DatasetToSingleElement", "PlaceholderWithDefault", "PyFunc")
    return op.type in types and _SAME_ON_ALL_RANKS.match(op.name) is not None
