"""Horovod's API for models of Keras 3 on TensorFlow.

`import hostopt.keras as hvd` replaces `import horovod.keras as hvd`.
"""

from __future__ import annotations

from typing import Any

from hostopt.keras import callbacks
from hostopt.keras._keras_3 import keras
from hostopt.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from hostopt.tensorflow import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    ProcessSet,
    Product,
    ReduceOp,
    Sum,
    add_process_set,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    keras_models,
    keras_optimizers,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
)
from hostopt.tensorflow.keras_collectives import allgather, allreduce, broadcast, reducescatter
from hostopt.tensorflow.keras_optimizers import PartialDistributedOptimizer
from hostopt.tensorflow.refusals import missing_attribute

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesCallback",
    "Compression",
    "DistributedOptimizer",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "Max",
    "MetricAverageCallback",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
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
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
]


def DistributedOptimizer(  # noqa: N802 - the name that programs know
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | None = None,
    num_groups: int = 0,
    groups: Any = None,
    **others: Any,
) -> Any:
    """Makes an optimizer reduce its gradients over the ranks before it applies them.

    See `hostopt.tensorflow.DistributedOptimizer` for the arguments.
    """
    return keras_optimizers.DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        num_groups=num_groups,
        groups=groups,
        **others,
    )


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a model, and makes its optimizer a `DistributedOptimizer`.

    Args:
      filepath: file or directory of the model.
      custom_optimizers: classes of optimizers that are not part of Keras.
      custom_objects: other objects by the names that the file has for them.
      compression: as for `DistributedOptimizer`.
      legacy_opts: accepted for programs of Horovod, without effect: the optimizer stays of the
        kind that was saved.

    Returns:
      The model.
    """
    del legacy_opts
    return keras_models.load_model(keras, filepath, custom_optimizers, custom_objects, compression)


__getattr__ = missing_attribute(__name__)
