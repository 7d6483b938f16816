"""Horovod's API for models of Keras 3 on TensorFlow.

`import hostopt.keras as hvd` replaces `import horovod.keras as hvd`.
"""

from __future__ import annotations

from hostopt import tensorflow as hvd
from hostopt.keras import callbacks
from hostopt.keras.callbacks import *  # noqa: F403 - the same names
from hostopt.tensorflow import _keras_api
from hostopt.tensorflow._keras_api import *  # noqa: F403 - the same names
from hostopt.tensorflow._keras_api import OPTIMIZER, model_loader, reordered
from hostopt.tensorflow._keras_api import __all__ as __all__  # mypy does not see the `+=` below
from hostopt.tensorflow.refusals import missing_attribute

__all__ = ["DistributedOptimizer", "callbacks", "load_model"]  # noqa: F811
__all__ += callbacks.__all__
__all__ += _keras_api.__all__

DistributedOptimizer = reordered(
    f"{OPTIMIZER} num_groups groups * backward_passes_per_step average_aggregated_gradients "
    "process_set scale_local_gradients bucket_cap_mb"
)(hvd.DistributedOptimizer)
load_model = model_loader(callbacks.keras)

__getattr__ = missing_attribute(__name__)
