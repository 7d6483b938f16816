"""Horovod's API for models of Keras 2.

`import hostopt.tensorflow.keras as hvd` replaces `import horovod.tensorflow.keras as hvd`.
"""

from __future__ import annotations

from hostopt.tensorflow import _keras_api
from hostopt.tensorflow._keras_api import *  # noqa: F403 - the same names
from hostopt.tensorflow._keras_api import DistributedOptimizer, model_loader
from hostopt.tensorflow._keras_api import __all__ as __all__  # mypy does not see the `+=` below
from hostopt.tensorflow.keras import callbacks
from hostopt.tensorflow.keras.callbacks import *  # noqa: F403 - the same names
from hostopt.tensorflow.refusals import missing_attribute

__all__ = ["DistributedOptimizer", "callbacks", "load_model"]  # noqa: F811
__all__ += callbacks.__all__
__all__ += _keras_api.__all__

load_model = model_loader(callbacks.keras)

__getattr__ = missing_attribute(__name__)
