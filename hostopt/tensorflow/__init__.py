"""Collectives over tensors and optimizers that reduce gradients, with the names of Horovod.

`import hostopt.tensorflow as hvd` replaces `import horovod.tensorflow as hvd`, and
`import hostopt.tensorflow as sdp` replaces `import smdistributed.dataparallel.tensorflow as sdp`.
"""

from __future__ import annotations

from hostopt.tensorflow import _names
from hostopt.tensorflow._names import *  # noqa: F403 - the same names
from hostopt.tensorflow._names import __all__ as __all__  # mypy does not see the `+=` below
from hostopt.tensorflow._names import (
    is_homogeneous,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from hostopt.tensorflow.collectives import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    oob_allreduce,
    reducescatter,
)
from hostopt.tensorflow.ops import all_reduce, overlap
from hostopt.tensorflow.optimizer import DistributedOptimizer
from hostopt.tensorflow.reductions import reduce_in_buckets
from hostopt.tensorflow.refusals import missing_attribute
from hostopt.tensorflow.variables import (
    BroadcastGlobalVariablesHook,
    broadcast_,
    broadcast_object_fn,
)
from hostopt.tensorflow.wrapping import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [  # noqa: F811
    "BroadcastGlobalVariablesHook",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "all_reduce",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object_fn",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "is_homogeneous",
    "join",
    "local_rank_op",
    "local_size_op",
    "oob_allreduce",
    "overlap",
    "process_set_included_op",
    "rank_op",
    "reduce_in_buckets",
    "reducescatter",
    "size_op",
]
__all__ += _names.__all__

__getattr__ = missing_attribute(__name__)
