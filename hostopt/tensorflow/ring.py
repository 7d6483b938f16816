"""The ring of this process, with Horovod's names."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hostopt import process_ring
from hostopt.errors import ConfigError
from hostopt.tensorflow._tf_private import fork_guard
from hostopt.tensorflow.calls import call
from hostopt.tensorflow.process_sets import refuse_process_set


def init(comm: Any = None, process_sets: Any = None, only_once: bool = False) -> None:
    """Joins the ring that TF_CONFIG or a launcher describes; a second call does nothing.

    TF_CONFIG is hidden from TensorFlow until `shutdown`, so that each rank trains as a single
    process.

    Collective: all ranks must call it.

    Args:
      comm: must be None.
      process_sets: must be None or an empty list.
      only_once: True raises an error in a second call, as SageMaker's library does.

    Raises:
      ConfigError: TF_CONFIG, a launcher or an option cannot be used, this is a forbidden second
        call, or this process was forked from one that had used TensorFlow, gRPC or a ring.
      RendezvousTimeoutError: a rank did not start in time.
    """
    if comm is not None:
        raise ConfigError(
            "init is given comm, but TF_CONFIG or the launcher describes the ring. Leave it out, "
            "and start the program with `hostopt run` or another launcher"
        )
    refuse_process_set(process_sets or None)
    fork_guard.check()
    process_ring.init(only_once)


def shutdown() -> None:
    """Leaves the ring. `init` may be called again."""
    process_ring.shutdown()


def is_initialized() -> bool:
    """Returns True between `init` and `shutdown`."""
    return process_ring.is_initialized()


def rank() -> int:
    """Returns this rank, 0..size-1."""
    return process_ring.current().rank


def size() -> int:
    """Returns the number of ranks."""
    return process_ring.current().size


def local_rank() -> int:
    """Returns the index of this rank among the ranks of its host."""
    ring = process_ring.current()
    return ring.local_ranks.index(ring.rank)


def local_size() -> int:
    """Returns the number of ranks on this host."""
    return len(process_ring.current().local_ranks)


def cross_rank() -> int:
    """Returns the index of this host among the hosts that have a rank of this local rank."""
    return _cross_ranks().index(process_ring.current().rank)


def cross_size() -> int:
    """Returns the number of hosts that have a rank of this local rank."""
    return len(_cross_ranks())


def join() -> tf.Tensor:
    """Waits, on a rank that has run out of data, until all ranks have called this.

    Meanwhile this rank takes part in the collectives and the reductions of gradients of the other
    ranks. It adds zeros to sums, the neutral element to other reductions, and no rows to what is
    gathered. Averages still divide by `size()`, so it counts as zeros there. The values of
    broadcasts do not reach its variables. `alltoall`, collectives of objects, and broadcasts from
    this rank raise an error on all ranks.

    A rank must have run or traced one step before, as it cannot take part in reductions of
    gradients that it has not built.

    Returns:
      The rank that joined last, the same on all ranks, an int32 scalar. In a graph of TensorFlow 1
      the operation waits when it is run.

    Raises:
      ConfigError: this is called in a `tf.function`, or another thread is in a collective.
      HostOptError: a rank failed, left, or made a call that this rank cannot take part in.
    """
    joining = process_ring.current().named.joining
    if tf.compat.v1.get_default_graph().building_function:
        raise ConfigError(
            "join() is called in a tf.function, where other calls may run at the same time. Call "
            "it after the function"
        )

    def wait(*_: Any) -> list[Any]:
        return [np.int32(joining.join())]

    return call(wait, [], [(tf.int32, [])], "HostJoin", "join")[0]


def _cross_ranks() -> list[int]:
    index = local_rank()
    groups = process_ring.current().hosts.groups
    return [group[index] for group in groups if len(group) > index]
