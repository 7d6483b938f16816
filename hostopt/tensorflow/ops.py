"""Operations of a graph: collectives matched by name, checks, and edges of XLA clusters."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.tensorflow._tf_private import call_python
from hostopt.tensorflow.background import HOST_DEVICE, abort_on_error, call_in_background
from hostopt.tensorflow.sparse import map_values, values_of


def all_reduce(
    tensor: tf.Tensor, communicator: Communicator, op: ReduceOp = ReduceOp.SUM, name: str = ""
) -> tf.Tensor:
    """Reduces one tensor over the ranks.

    Any number of these can wait at the same time, and they may be built and run in another order
    on each rank: they are matched by name.

    Args:
      tensor: tensor of any shape, one of `hostopt.collectives.reduce_op.DTYPES`.
      communicator: reaches all ranks.
      op: the operator.
      name: name of the tensor, the same on all ranks; by default its name in the graph.

    Returns:
      Tensor like `tensor`, on the host.
    """
    channel = communicator.duplicate(name or tensor.op.name)
    return _array_op(
        communicator, lambda array: channel.all_reduce(array, op), tensor, "HostAllReduce"
    )


_FLAG_BASE = 4096  # more than the number of ranks; two such digits are exact in float32


@dataclasses.dataclass
class StopSaveFlags:
    """Requests of the ranks to stop training and to save, exchanged once in each step."""

    stop: bool = False  # of this rank
    save: bool = False
    ranks_stopping: int = 0  # in the last step
    ranks_saving: int = 0
    travel: bool = False  # with a sum that the graph starts in each step

    @property
    def local(self) -> int:
        """This rank's flags as an integer; the sum over all ranks counts each flag."""
        return self.stop + _FLAG_BASE * self.save

    def set_total(self, total: float) -> None:
        """Decodes the sum of `local` over all ranks."""
        self.ranks_saving, self.ranks_stopping = divmod(int(total), _FLAG_BASE)


class SumWithFlags:
    """Sums a scalar over the ranks, and flags in the same messages."""

    def __init__(self, communicator: Communicator, name: str, flags: StopSaveFlags) -> None:
        self._sum = communicator.open_scalar_sum(f"the sum of {name}")
        self._flags = flags

    def start(self, value: Array) -> None:
        """Starts the sum of a float32, without waiting."""
        self._sum.start(float(value), float(self._flags.local))

    def wait(self) -> np.float32:
        """Returns the sum, when every rank has started it."""
        total, flags_total = self._sum.wait()
        self._flags.set_total(float(flags_total))
        return total


def start_scalar_sum(
    scalar: tf.Tensor,
    name: str,
    communicator: Communicator,
    after: Sequence[tf.Tensor],
    flags: StopSaveFlags,
) -> tf.Tensor:
    """Sums a scalar over the ranks without blocking backward.

    The sum starts as soon as the local scalar is computed, and is waited for later.

    Args:
      scalar: tensor of shape [], float32.
      after: tensors that are computed before this rank waits for the sum.
      flags: flags that are summed in the same messages.
    """
    scalar_sum = SumWithFlags(communicator, name, flags)
    flags.travel = True

    def start(value: Array) -> Any:
        scalar_sum.start(value)
        return [np.int32(0)]

    with tf.device(HOST_DEVICE):
        (token,) = call_python(start, [scalar], [tf.int32], "HostPost")
        with tf.control_dependencies(after):
            call = abort_on_error(communicator, lambda _: [scalar_sum.wait()])
            (result,) = call_in_background(call, [token], [tf.float32], name="HostCollect")
    result.set_shape([])
    return result


def broadcast(tensor: tf.Tensor, communicator: Communicator, name: str) -> tf.Tensor:
    """Sends the tensor of rank 0, of any shape and fixed-size dtype, to all ranks."""
    channel = communicator.duplicate(name)
    return _array_op(communicator, channel.broadcast, tensor, "HostBroadcast")


def _array_op(
    communicator: Communicator, function: Callable[[Array], Array], tensor: tf.Tensor, name: str
) -> tf.Tensor:
    call = abort_on_error(communicator, lambda array: [function(array)])
    (result,) = call_in_background(call, [tensor], [tensor.dtype], name)
    result.set_shape(tensor.shape)
    return result


def check_gradients(
    values: Sequence[Any], names: Sequence[str], communicator: Communicator, check: NonFiniteCheck
) -> list[Any]:
    """Checks the gradients of a single rank, at least one, which are not reduced.

    Returns:
      The same gradients. The first one depends on the check of all.
    """
    steps = itertools.count()

    def run(finite: Array) -> Any:
        nonfinite = {name: "NaN or Inf" for name, good in zip(names, finite) if not good}
        call = CollectiveCall(0, next(steps), name="the gradients of one rank")
        check.check(call, not nonfinite, lambda: nonfinite, lambda: nonfinite)
        return [np.int32(0)]

    first, *rest = values
    with tf.device(HOST_DEVICE), tf.name_scope("host_check"):
        finite = [_is_finite(values_of(value)) for value in values]
        (device, _), *_ = Counter(each.device for each in finite).most_common(1)
        with tf.device(device):  # one copy of all flags
            flags = tf.stack(finite)
        (token,) = call_python(abort_on_error(communicator, run), [flags], [tf.int32])
        with tf.control_dependencies([token]):  # backward computes this one last
            return [map_values(tf.identity, first), *rest]


def _is_finite(tensor: tf.Tensor) -> tf.Tensor:
    """Checks a gradient where backward computes it, as its memory is faster than the host's."""
    while tensor.op.type == "Identity":  # its copy on the host
        (source,) = tensor.op.inputs
        if source.dtype != source.dtype.base_dtype:
            break  # a variable of TensorFlow 1, which may have another value by now
        tensor = source
    with tf.device(tensor.device):
        if tensor.dtype.is_floating:
            return tf.reduce_all(tf.math.is_finite(tensor))
        return tf.constant(True)


_SAME_ON_ALL_RANKS = re.compile(
    r"(.*/)?(Host(AllFinite|AllGather|AllReduce|Broadcast|Exchange|Reduced)"
    r"|host_reduce(_\d+)?/(wait|reduce))(_\d+)*$"
)


def is_same_on_all_ranks(op: tf.Operation) -> bool:
    """Returns True for a reduction or a broadcast of this package, by its name."""
    types = ("DatasetToSingleElement", "Identity", "PlaceholderWithDefault", "PyFunc")
    return op.type in types and _SAME_ON_ALL_RANKS.match(op.name) is not None


def overlap(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor, and splits the XLA cluster that it belongs to.

    An XLA cluster delivers its results when all of it has run. If a model is one cluster, its
    gradients are reduced after backward instead of beside it. This splits the cluster in forward
    and in backward. It applies to automatic clustering; a function with jit_compile=True is
    always one cluster.

    Args:
      tensor: output of a layer, for example.
    """
    split = tf.custom_gradient(lambda each: (_outside_clusters(each), _outside_clusters))
    return split(tensor)


def _outside_clusters(tensor: Any) -> tf.Tensor:
    with tf.xla.experimental.jit_scope(compile_ops=False):
        # an identity that TensorFlow does not remove from the graph
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)
