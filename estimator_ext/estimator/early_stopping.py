"""Early stopping with the hooks of TensorFlow.

`tf.estimator.experimental.make_early_stopping_hook` creates all of these hooks. It refuses
run_every_secs, which is 60 by default, if `estimator.config.train_distribute` is a
MultiWorkerMirroredStrategy. Its condition is a generator expression, which is always true, so it
refuses any strategy.

With a HostOffloadStrategy any rank may request a stop at any time, and all ranks stop after the
same step. The hook for a single process is therefore right on every rank. `config_for` shows
TensorFlow the configuration of a single process.
"""

from __future__ import annotations

import inspect
from types import FrameType

from estimator_ext._tf_estimator import RunConfig, make_early_stopping_hook
from estimator_ext.strategy.strategy import HostOffloadStrategy

_MAKES_HOOK = inspect.unwrap(make_early_stopping_hook).__code__  # without the deprecation wrapper


def config_for(caller: FrameType, config: RunConfig) -> RunConfig:
    """Changes the copy of the configuration that a caller of `Estimator.config` gets.

    For `make_early_stopping_hook` it has no strategy, as in a process that trains alone.
    """
    if caller.f_code is _MAKES_HOOK and isinstance(config.train_distribute, HostOffloadStrategy):
        config._train_distribute = None
        config._is_chief = True
    return config
