"""Experiments of tf.contrib.learn and tf.contrib.predictor, with a small estimator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import estimator_v1 as estimators
from estimator_ext.compat.contrib import learn, predictor

v1 = tf.compat.v1


def model_fn(features: Any, labels: Any, mode: str) -> Any:
    weight = v1.get_variable("w", initializer=0.0)
    outputs = {"y": weight * features["x"]}
    export = estimators.export.PredictOutput({"twice": 2 * outputs["y"]})
    if mode == learn.ModeKeys.INFER:
        plain = estimators.export.PredictOutput(outputs)
        kinds = {"serving_default": export, "plain": plain}
        return estimators.EstimatorSpec(mode, outputs, export_outputs=kinds)
    loss = tf.reduce_mean((outputs["y"] - labels) ** 2)
    step = v1.train.get_or_create_global_step()
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    return estimators.EstimatorSpec(mode, outputs, loss, optimizer.minimize(loss, step))


def input_fn() -> Any:
    x = np.array([1.0, 2.0], np.float32)
    return tf.data.Dataset.from_tensors(({"x": x}, 3 * x)).repeat(20)


def serving_input_fn() -> Any:
    x = v1.placeholder(tf.float32, [None], "x")
    return learn.InputFnOps({"x": x}, None, {"x": x})


def experiment_fn(config: Any, steps: int) -> learn.Experiment:
    return learn.Experiment(
        estimators.Estimator(model_fn, config=config),
        input_fn,
        eval_input_fn=input_fn,
        train_steps=steps,
        eval_steps=1,
        eval_delay_secs=0,
        min_eval_frequency=1,
        export_strategies=learn.make_export_strategy(serving_input_fn, exports_to_keep=1),
    )


def test_an_experiment_trains_evaluates_and_exports(tmp_path: Path) -> None:
    config = learn.RunConfig(model_dir=str(tmp_path), gpu_memory_fraction=0.5, tf_random_seed=1)
    assert config.session_config.gpu_options.per_process_gpu_memory_fraction == 0.5
    assert config.tf_random_seed == 1
    metrics, _ = learn.run(experiment_fn, run_config=config, hparams=10)
    assert metrics["global_step"] == 10
    assert metrics["loss"] < 1e-3

    (exported,) = (tmp_path / "export" / "Servo").iterdir()
    weight = tf.train.load_variable(str(tmp_path), "w")
    x = np.array([1.0, 4.0], np.float32)
    twice = predictor.from_saved_model(str(exported))({"x": x})
    np.testing.assert_allclose(twice["twice"], 2 * weight * x, rtol=1e-6)

    estimator = estimators.Estimator(model_fn, config=config)
    predict = predictor.from_estimator(estimator, serving_input_fn)
    np.testing.assert_allclose(predict({"x": x})["twice"], 2 * weight * x, rtol=1e-6)
    of_output = predictor.from_estimator(estimator, serving_input_fn, "plain")
    np.testing.assert_allclose(of_output({"x": x})["y"], weight * x, rtol=1e-6)
    with pytest.raises(ValueError, match=r"The inputs are \['x'\], but \['z'\] were passed"):
        predict({"x": x, "z": x})


def test_a_schedule_is_a_method_of_the_experiment(tmp_path: Path) -> None:
    def of_directory(*, output_dir: str) -> learn.Experiment:
        experiment = experiment_fn(learn.RunConfig(model_dir=output_dir), 10)
        experiment.extend_train_hooks([tf.compat.v1.train.StopAtStepHook(last_step=4)])
        return experiment

    learn.run(of_directory, str(tmp_path), "train")
    assert tf.train.load_variable(str(tmp_path), "global_step") == 4
    assert not (tmp_path / "export").exists()
    assert learn.run(of_directory, str(tmp_path), schedule="evaluate")["global_step"] == 4


def test_what_cannot_work_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(hostopt.ConfigError, match="return eval_metric_ops"):
        learn.Experiment(None, input_fn, input_fn, eval_metrics={"accuracy": None})
    with pytest.raises(TypeError, match="unexpected keyword argument 'train_hooks'"):
        learn.Experiment(None, input_fn, input_fn, train_hooks=[])  # type: ignore[call-arg]
    estimator = estimators.Estimator(model_fn, str(tmp_path))
    with pytest.raises(ValueError, match=r"has no checkpoint in .* Train it first"):
        predictor.from_estimator(estimator, serving_input_fn)
