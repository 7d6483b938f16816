"""The ring of this process, and other names that the APIs for TensorFlow and Keras share."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hostopt import process_ring
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import ConfigError
from hostopt.process_ring import is_initialized, shutdown
from hostopt.tensorflow._tf_private import fork_guard
from hostopt.tensorflow.calls import call
from hostopt.tensorflow.compression import Compression
from hostopt.tensorflow.refusals import (
    Adasum,
    ProcessSet,
    add_process_set,
    global_process_set,
    refuse_process_set,
    refuse_process_set_id,
    remove_process_set,
)
from hostopt.tensorflow.variables import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
)

# Horovod's names of the operators
Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
]


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


def is_homogeneous() -> bool:
    """Returns True if every host has the same number of ranks."""
    return len({len(group) for group in process_ring.current().hosts.groups}) == 1


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


# -- ranks and sizes as tensors ----------------------------------------------------------------


def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this rank as a tensor, int32 []; `name` is that of the operation in a graph."""
    return tf.constant(rank(), tf.int32, name=name or "rank")


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks as a tensor; see `rank_op`.

    Raises:
      ConfigError: `process_set_id` is not 0, which is the process set of all ranks.
    """
    refuse_process_set_id(process_set_id)
    return tf.constant(size(), tf.int32, name=name or "size")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns the index of this rank among the ranks of its host; see `rank_op`."""
    return tf.constant(local_rank(), tf.int32, name=name or "local_rank")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks on this host as a tensor; see `rank_op`."""
    return tf.constant(local_size(), tf.int32, name=name or "local_size")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns 1 as a tensor: this rank is part of the process set of all ranks; see `size_op`."""
    refuse_process_set_id(process_set_id)
    return tf.constant(1, tf.int32, name=name or "process_set_included")


# -- libraries that Horovod was built with, which programs ask for: MPI, if it is in use -------


def mpi_enabled() -> bool:
    """Returns True if the ring of this process uses `communication="mpi"`.

    `mpi_built` and `mpi_threads_supported` return the same: hostopt is built without any library,
    and requires MPI's support of threads.
    """
    return is_initialized() and process_ring.current().communicator.world is not None


mpi_built = mpi_threads_supported = mpi_enabled


def nccl_built() -> int:
    """Returns 0, in the place of a version: there is no NCCL."""
    return 0


def _is_built() -> bool:
    """Returns False: hostopt has no such library, and reduces on the host."""
    return False


gloo_built = gloo_enabled = ddl_built = ccl_built = cuda_built = rocm_built = _is_built
