"""Horovod's API for models of Keras 2.

`import hostopt.tensorflow.keras as hvd` replaces `import horovod.tensorflow.keras as hvd`.
"""

from __future__ import annotations

from typing import Any

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
from hostopt.tensorflow.keras import callbacks
from hostopt.tensorflow.keras._keras_2 import keras
from hostopt.tensorflow.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from hostopt.tensorflow.keras_collectives import allgather, allreduce, broadcast, reducescatter
from hostopt.tensorflow.keras_optimizers import DistributedOptimizer, PartialDistributedOptimizer
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
