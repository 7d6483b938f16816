"""estimator_ext: tf.estimator with the optimizer on the host and gradients over a ring."""

from __future__ import annotations

from estimator_ext.compat.compat import install
from estimator_ext.estimator.estimator import Estimator, adopt
from estimator_ext.estimator.run_config import RunConfig
from estimator_ext.estimator.training import train_and_evaluate
from estimator_ext.session.hooks import BroadcastVariablesHook
from estimator_ext.spec import EstimatorSpec
from estimator_ext.strategy.gradients import LossScaleOptimizer, reduce_gradients
from estimator_ext.strategy.strategy import HostOffloadStrategy

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
