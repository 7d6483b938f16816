"""Stock programs on one and two ranks: input tensors, early stopping, later evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from programs import ways_of_stock

import estimator_ext

# -- train_and_evaluate without a HostOffloadStrategy --------------------------------------


def test_the_stock_function_refuses_a_second_evaluator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"cluster": {"chief": ["127.0.0.1:1"]}, "task": {"type": "evaluator", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    estimator = estimator_ext.Estimator(
        ways_of_stock.model_fn_of({"counts": True}), str(tmp_path), estimator_ext.RunConfig()
    )
    specs = tf.estimator.TrainSpec(tensors, max_steps=1), tf.estimator.EvalSpec(tensors)
    with pytest.raises(ValueError, match="there can only be one `evaluator` task"):
        estimator_ext.train_and_evaluate(estimator, *specs)


def test_an_evaluator_of_the_stock_function_returns_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_fn = ways_of_stock.model_fn_of({"counts": True})
    specs = (
        tf.estimator.TrainSpec(tensors, max_steps=1),
        tf.estimator.EvalSpec(tensors, steps=1, start_delay_secs=0, throttle_secs=0),
    )
    estimator = estimator_ext.Estimator(model_fn, tmp_path, estimator_ext.RunConfig())
    metrics, exports = estimator_ext.train_and_evaluate(estimator, *specs)
    assert metrics is not None
    assert (metrics["global_step"], exports) == (1, [])
    config = {"cluster": {"chief": ["127.0.0.1:1"]}, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    evaluator = estimator_ext.Estimator(model_fn, tmp_path, estimator_ext.RunConfig())
    assert estimator_ext.train_and_evaluate(evaluator, *specs) == (None, [])


def tensors() -> Any:
    return tf.constant(ways_of_stock.X), tf.constant(ways_of_stock.Y)


# -- limits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [
        {"steps": 0},
        {"steps": -1},
        {"max_steps": 0},
        {"max_steps": -5},
        {"steps": 1, "max_steps": 1},
    ],
)
def test_limits_are_refused_with_the_message_of_stock(
    tmp_path: Path, limits: dict[str, int]
) -> None:
    model_fn = ways_of_stock.model_fn_of({"counts": True})
    with pytest.raises(ValueError, match=r"ust specify|not provide both") as stock:
        tf.estimator.Estimator(model_fn, str(tmp_path)).train(tensors, **limits)
    config = estimator_ext.RunConfig(train_distribute=estimator_ext.HostOffloadStrategy())
    with pytest.raises(ValueError, match=r"ust specify|not provide both") as ours:
        estimator_ext.Estimator(model_fn, str(tmp_path), config).train(tensors, **limits)
    assert str(ours.value) == str(stock.value)


# -- the job "master" ----------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1])
def test_a_master_is_the_chief_to_both_configurations(
    monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    jobs = {"master": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
    task = {"type": ["master", "worker"][index], "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": task}))
    stock = tf.estimator.RunConfig()
    ours = estimator_ext.RunConfig(train_distribute=estimator_ext.HostOffloadStrategy())
    for name in (
        "task_type",
        "task_id",
        "is_chief",
        "global_id_in_cluster",
        "num_worker_replicas",
        "num_ps_replicas",
    ):
        assert getattr(ours, name) == getattr(stock, name), name
    assert not ours.session_config.device_filters
    assert not ours.master
