"""Horovod's names that its APIs for TensorFlow, Keras 2 and Keras 3 share."""

from __future__ import annotations

from hostopt.collectives.reduce_op import ReduceOp
from hostopt.tensorflow.compression import Compression
from hostopt.tensorflow.refusals import (
    Adasum,
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hostopt.tensorflow.ring import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
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
