"""Who asks the strategy of an unmodified program for the number of ranks, and what it gets."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

import estimator_ext
from estimator_ext._tf_private import DIVIDE_LOSSES
from estimator_ext.errors import UnsupportedError
from estimator_ext.reduction.gradient_reduction import GradientReduction
from estimator_ext.strategy.extended import ReplicaContext
from estimator_ext.strategy.strategy import StrategyOfRanks

estimator_ext.install()


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Iterator[StrategyOfRanks]:
    """The strategy of one of two ranks, which never connects."""
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    result = StrategyOfRanks("data")
    result.extended.reduction = GradientReduction(result, False, at_backward=True)
    with tf.Graph().as_default(), ReplicaContext(result):
        yield result
    result.close()


def evaluated(tensor: tf.Tensor) -> float:
    with tf.compat.v1.Session() as session:
        return float(session.run(tensor))


def test_functions_that_divide_a_loss_get_the_number_of_one_process(
    strategy: StrategyOfRanks,
) -> None:
    assert evaluated(tf.nn.compute_average_loss(tf.constant([1.0, 2.0]))) == 1.5
    assert evaluated(tf.nn.scale_regularization_loss(tf.constant([1.0, 2.0]))) == 3.0
    assert strategy.extended.reduction.model_knows_size == ""


def test_the_loss_of_a_keras_model_is_not_divided(strategy: StrategyOfRanks) -> None:
    _ = tf.keras.losses  # imports Keras, or loads it
    name = "scale_loss_for_distribution"
    found = [module for module, each in DIVIDE_LOSSES if each == name and module in sys.modules]
    assert found  # the Keras of this TensorFlow
    for module in found:
        scale = sys.modules[module].scale_loss_for_distribution
        assert evaluated(scale(tf.constant(2.0))) == 2.0
    assert strategy.extended.reduction.model_knows_size == ""


def test_a_program_gets_the_number_of_ranks(strategy: StrategyOfRanks) -> None:
    assert strategy.num_replicas_in_sync == 2
    reduction = strategy.extended.reduction
    assert Path(reduction.model_knows_size.rpartition(":")[0]).name == Path(__file__).name
    assert not reduction.follows_gradients
    # as under any strategy
    assert evaluated(tf.nn.compute_average_loss(tf.constant([1.0, 2.0]))) == 0.75


def test_a_program_that_asks_a_replica_context_is_noticed(strategy: StrategyOfRanks) -> None:
    context = tf.distribute.get_replica_context()
    assert context is not None
    assert context.num_replicas_in_sync == 2
    assert __file__ in strategy.extended.reduction.model_knows_size


@pytest.mark.parametrize("module", ["hostopt_models", "__main__", "tensorflow_ranking.losses"])
def test_names_that_begin_like_a_library_belong_to_the_program(
    strategy: StrategyOfRanks, module: str
) -> None:
    names = {"__name__": module, "strategy": strategy}
    exec("number = strategy.num_replicas_in_sync", names)
    assert names["number"] == 2
    assert strategy.extended.reduction.model_knows_size != ""


@pytest.mark.parametrize("module", ["tensorflow.python.data", "keras", "estimator_ext.spec"])
def test_other_functions_of_libraries_do_not_count(strategy: StrategyOfRanks, module: str) -> None:
    names = {"__name__": module, "strategy": strategy}
    exec("number = strategy.num_replicas_in_sync", names)
    assert names["number"] == 2
    assert strategy.extended.reduction.model_knows_size == ""


def test_a_program_that_asks_after_a_loss_was_divided_is_refused(
    strategy: StrategyOfRanks,
) -> None:
    tf.nn.compute_average_loss(tf.constant([1.0, 2.0]))
    with pytest.raises(UnsupportedError, match="Read it before the loss, or not at all"):
        _ = strategy.num_replicas_in_sync


def test_the_functions_that_divide_losses_exist() -> None:
    found = set()
    for module, name in DIVIDE_LOSSES:
        try:
            source = inspect.getsource(importlib.import_module(module))
        except ImportError:  # of another Keras
            continue
        assert f"def {name}(" in source, module
        assert "num_replicas_in_sync" in source, module
        found.add(module.partition(".")[0])
    assert {"tensorflow", "tensorflow_estimator"} < found
