"""`hostopt.tensorflow` for programs that use tf.estimator: importing this also restores it.

`import estimator_ext.horovod as hvd` replaces `import horovod.tensorflow as hvd` on every release
of TensorFlow, also on those without tf.estimator.
"""

from __future__ import annotations

from estimator_ext.compat.compat import install
from hostopt.tensorflow import *  # noqa: F403 - the same names
from hostopt.tensorflow.refusals import missing_attribute

__path__: list[str] = []  # a package, as `horovod.tensorflow` is
__getattr__ = missing_attribute(__name__)

install()
