"""Horovod's API for models of Keras 3 on TensorFlow.

`import hostopt.keras as hvd` replaces `import horovod.keras as hvd`.
"""

from __future__ import annotations

from typing import Any

from hostopt import tensorflow as hvd
from hostopt.keras import callbacks
from hostopt.keras.callbacks import *  # noqa: F403 - the same names
from hostopt.tensorflow import _keras_api
from hostopt.tensorflow._keras_api import *  # noqa: F403 - the same names
from hostopt.tensorflow._keras_api import model_loader
from hostopt.tensorflow.refusals import missing_attribute

__all__ = ["DistributedOptimizer", "callbacks", "load_model"]
__all__ += callbacks.__all__
__all__ += _keras_api.__all__


def DistributedOptimizer(  # noqa: N802 - the name that programs know
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: hvd.ReduceOp | None = None,
    num_groups: int = 0,
    groups: Any = None,
    **others: Any,
) -> Any:
    """Makes an optimizer reduce its gradients over the ranks before it applies them.

    See `hostopt.tensorflow.DistributedOptimizer` for the arguments.
    """
    return _keras_api.DistributedOptimizer(
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


load_model = model_loader(callbacks.keras)

__getattr__ = missing_attribute(__name__)
