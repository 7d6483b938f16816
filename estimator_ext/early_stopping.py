"""What TensorFlow's early-stopping hooks learn of a training with a HostOffloadStrategy.

`tf.estimator.experimental.make_early_stopping_hook`, which makes all of these hooks, looks at
`estimator.config`. It means to ask whether train_distribute is a MultiWorkerMirroredStrategy, for
which run_every_secs cannot work; but its condition is a generator, which is always true, so it
takes any strategy for one and refuses run_every_secs, which is 60 by default. Here any rank may
ask to stop at any time, and all stop after the same step. So the hook that TensorFlow makes for
one process is right on every rank, and this is the answer that it gets.
"""

from __future__ import annotations

import inspect
from types import FrameType

from estimator_ext._tf_estimator import RunConfig, make_early_stopping_hook
from estimator_ext.strategy import HostOffloadStrategy

__all__: list[str] = []

_MAKES_HOOK = inspect.unwrap(make_early_stopping_hook).__code__  # below "is deprecated"


def config_for(caller: FrameType, config: RunConfig) -> RunConfig:
    """The configuration that an Estimator shows to whoever asks for it.

    Args:
      caller: frame of the function that asks.
      config: a copy of the Estimator's own, which may be changed.

    Returns:
      The configuration; without the strategy, as of a process that trains alone, if TensorFlow
      makes an early-stopping hook of it.
    """
    if caller.f_code is _MAKES_HOOK and isinstance(config.train_distribute, HostOffloadStrategy):
        config._train_distribute = None
        config._is_chief = True
    return config
