"""The one door to tensorflow_estimator: all names that this package uses of it."""

from __future__ import annotations

from typing import Any

from estimator_ext._tf_estimator._loading import load

# the modules `tf.estimator` and `tf.compat.v1.estimator`, which new releases no longer have
estimator_v2: Any = load("api._v2.estimator")
estimator_v1: Any = load("api._v1.estimator")
_training = load("training")

BestExporter = estimator_v2.BestExporter
Estimator = estimator_v2.Estimator
EstimatorSpec = estimator_v2.EstimatorSpec
EvalSpec = estimator_v2.EvalSpec
ExportOutput = estimator_v2.export.ExportOutput
ModeKeys = estimator_v2.ModeKeys
RunConfig = estimator_v2.RunConfig
TrainSpec = estimator_v2.TrainSpec
WarmStartSettings = estimator_v2.WarmStartSettings

train_and_evaluate = _training.train_and_evaluate
# checks TrainSpec and EvalSpec, runs the local loop, evaluates and exports checkpoints
TrainingExecutor = _training._TrainingExecutor
Evaluator = _training._TrainingExecutor._Evaluator
parse_input_fn_result = load("util").parse_input_fn_result
make_early_stopping_hook = load("early_stopping").make_early_stopping_hook
fn_args = load("util").fn_args  # names of the arguments of a function
feeding: Any = load("inputs.queues.feeding_functions")  # of numpy_input_fn and pandas_input_fn
