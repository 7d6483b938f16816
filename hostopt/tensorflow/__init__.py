"""Collectives over tensors and optimizers that reduce gradients, with the names of Horovod.

`import hostopt.tensorflow as hvd` replaces `import horovod.tensorflow as hvd`, and
`import hostopt.tensorflow as sdp` replaces `import smdistributed.dataparallel.tensorflow as sdp`.
"""

from __future__ import annotations

from hostopt.collectives.reduce_op import ReduceOp
from hostopt.tensorflow.allreduce import allreduce, grouped_allreduce, oob_allreduce
from hostopt.tensorflow.collectives import (
    allgather,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_reducescatter,
    reducescatter,
)
from hostopt.tensorflow.compression import Compression
from hostopt.tensorflow.ops import all_reduce
from hostopt.tensorflow.optimizer import DistributedOptimizer
from hostopt.tensorflow.reductions import reduce_in_buckets
from hostopt.tensorflow.refusals import (
    Adasum,
    ProcessSet,
    add_process_set,
    global_process_set,
    missing_attribute,
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
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    rocm_built,
    shutdown,
    size,
    size_op,
)
from hostopt.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from hostopt.tensorflow.variables import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from hostopt.tensorflow.xla import overlap

# Horovod's names of the operators
Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "all_reduce",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "oob_allreduce",
    "overlap",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reduce_in_buckets",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
]

__getattr__ = missing_attribute(__name__)
