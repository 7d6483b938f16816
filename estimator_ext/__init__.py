"""estimator_ext: tf.estimator with the optimizer on the host and gradients over a ring."""

from __future__ import annotations

from estimator_ext.compat import install
from estimator_ext.estimator import Estimator, adopt
from estimator_ext.gradients import reduce_gradients
from estimator_ext.hooks import BroadcastVariablesHook
from estimator_ext.loss_scale import LossScaleOptimizer
from estimator_ext.run_config import RunConfig
from estimator_ext.spec import EstimatorSpec
from estimator_ext.strategy import HostOffloadStrategy
from estimator_ext.training import train_and_evaluate

__all__ = [
    "BroadcastVariablesHook",
    "Estimator",
    "EstimatorSpec",
    "HostOffloadStrategy",
    "LossScaleOptimizer",
    "RunConfig",
    "adopt",
    "install",
    "reduce_gradients",
    "train_and_evaluate",
]
