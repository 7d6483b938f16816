"""What programs that train without a strategy, or as a rank of one, have in common.

The argument "single" means that there is no strategy.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import tensorflow as tf

import estimator_ext

SINGLE = "single" in sys.argv
STRATEGY = None if SINGLE else estimator_ext.HostOffloadStrategy()
SCOPE = contextlib.nullcontext if STRATEGY is None else STRATEGY.scope
RANK = 0 if STRATEGY is None else STRATEGY.cluster.rank

X = tf.random.stateless_normal([64, 5], [1, 2])
Y = tf.reduce_sum(X, axis=1, keepdims=True) ** 2
DATA = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)


def refusal(function: Callable[[], object]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"
