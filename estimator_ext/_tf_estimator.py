"""The one door to tensorflow_estimator: everything that this package takes from it."""

from __future__ import annotations

import tensorflow as tf
from tensorflow_estimator.python.estimator import training as _training
from tensorflow_estimator.python.estimator import util as _util

__all__: list[str] = []

Estimator = tf.estimator.Estimator
EstimatorSpec = tf.estimator.EstimatorSpec
EvalSpec = tf.estimator.EvalSpec
ModeKeys = tf.estimator.ModeKeys
RunConfig = tf.estimator.RunConfig
TrainSpec = tf.estimator.TrainSpec

# checks TrainSpec and EvalSpec, runs the local loop, and evaluates and exports a checkpoint
TrainingExecutor = _training._TrainingExecutor
Evaluator = _training._TrainingExecutor._Evaluator
parse_input_fn_result = _util.parse_input_fn_result
