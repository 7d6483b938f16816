"""Extreme values of options of the Estimator: refused in two sentences, or accepted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

import hostopt
from hostopt.options import MAX_COUNT

HUGE = 10**5000  # Python does not print it
OTHERS: list[Any] = [None, "1", b"1", [1], {}, object(), np.array([1, 2]), 1j]
NO_COUNTS: list[Any] = [0, -1, 1.0, True, float("nan"), MAX_COUNT + 1, HUGE, -HUGE, np.int64(2)]
NO_SCALES: list[Any] = [0, -1, float("nan"), float("inf"), 1e308, 1e-300, True, HUGE, -HUGE]
NO_DEVICES: list[Any] = [
    *("", "x", "\0", "/device:CPU:99999999999", "/device:CPU:-1", "localhost", "/job:worker"),
    *(3, b"/device:CPU:0", [], True),
]
NO_FLAGS: list[Any] = [0, 1, "false", np.True_, HUGE, *OTHERS]
NO_WORDS: list[Any] = ["", "DATA", 1, True, HUGE, *OTHERS[1:]]


def strategy(name: str, value: Any) -> Any:
    import estimator_ext

    return estimator_ext.HostOffloadStrategy(**{name: value})


def run_config(name: str, value: Any) -> Any:
    import estimator_ext

    own = estimator_ext.HostOffloadStrategy()
    return estimator_ext.RunConfig(train_distribute=own, **{name: value})


def estimator(name: str, value: Any) -> Any:
    import estimator_ext

    return estimator_ext.Estimator(lambda features: None, model_dir="unused", **{name: value})


def loss_scale(name: str, value: Any) -> Any:
    import estimator_ext

    return estimator_ext.LossScaleOptimizer(None, **{name: value})


REFUSED: list[tuple[Callable[[str, Any], Any], str, list[Any]]] = [
    (strategy, "accelerator", NO_DEVICES),
    (strategy, "variables_on_host", NO_FLAGS),
    (strategy, "sparse_as_dense", NO_FLAGS),
    (strategy, "auto_shard", NO_WORDS),
    (strategy, "collective_timeout_s", [99999999999, *OTHERS]),
    (run_config, "accumulate_steps", [*NO_COUNTS, *OTHERS]),
    (run_config, "iterations_per_loop", [*NO_COUNTS, *OTHERS]),
    (run_config, "prefetch_depth", [*NO_COUNTS, *OTHERS[1:]]),
    (run_config, "uneven_data", [None, *NO_WORDS]),
    (run_config, "resume_data", [None, *NO_WORDS]),
    (run_config, "strict", NO_FLAGS),
    (run_config, "timeline", ["", "/", "a\0b", 3, True, b"x"]),
    (estimator, "train_batch_size", [*NO_COUNTS, *OTHERS[1:]]),
    (estimator, "eval_batch_size", [*NO_COUNTS, *OTHERS[1:]]),
    (estimator, "predict_batch_size", [*NO_COUNTS, *OTHERS[1:]]),
    (loss_scale, "scale", [*NO_SCALES, *OTHERS]),
    (loss_scale, "growth_steps", [-1, 1.5, True, MAX_COUNT + 1, HUGE, *OTHERS]),
]


@pytest.mark.parametrize(
    ("make", "name", "values"),
    REFUSED,
    ids=[f"{make.__name__}-{name}" for make, name, _ in REFUSED],
)
def test_an_option_refuses(make: Callable[[str, Any], Any], name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises((hostopt.ConfigError, ValueError)) as caught:
            make(name, value)
        text = rf"(option )?{name} is .*, wanted .*\. (Give|Correct) .*"
        assert re.fullmatch(text, str(caught.value), re.DOTALL), caught.value
        assert len(str(caught.value)) < 500


TAKEN: list[tuple[Callable[[str, Any], Any], str, list[Any]]] = [
    (strategy, "accelerator", [None, "/device:CPU:0", "/cpu:0", "/device:GPU:1023"]),
    (strategy, "variables_on_host", [True, False]),
    (strategy, "sparse_as_dense", [True, False]),
    (strategy, "auto_shard", [None, "data", "file", "off"]),
    (run_config, "accumulate_steps", [1, MAX_COUNT]),
    (run_config, "iterations_per_loop", [1, MAX_COUNT]),
    (run_config, "prefetch_depth", [None, 1, MAX_COUNT]),
    (run_config, "uneven_data", ["join", "stop"]),
    (run_config, "resume_data", ["state", "skip"]),
    (run_config, "strict", [True, False]),
    (run_config, "timeline", [None, "trace.json", Path("trace.json")]),
    (loss_scale, "scale", [2.0**-126, 3e38, 1, np.float32(2)]),
    (loss_scale, "growth_steps", [0, MAX_COUNT, np.int64(2)]),
]


@pytest.mark.parametrize(
    ("make", "name", "values"), TAKEN, ids=[f"{make.__name__}-{name}" for make, name, _ in TAKEN]
)
def test_an_option_accepts(make: Callable[[str, Any], Any], name: str, values: list[Any]) -> None:
    for value in values:
        make(name, value)


@pytest.mark.parametrize("value", ["x", 3, [], {}, object(), True])
def test_a_resolver_may_be_none(value: Any) -> None:
    with pytest.raises(hostopt.ConfigError, match=r"resolver is of type .*, wanted .*\. Give one"):
        strategy("cluster_resolver", value)


@pytest.mark.parametrize("value", [None, 3, "x", {}, [None], [[]], np.array([1])])
def test_a_missing_eval_spec_is_refused_like_stock(value: Any) -> None:
    import estimator_ext
    from estimator_ext._tf_estimator import TrainSpec

    spec = TrainSpec(lambda: None, max_steps=1)
    own = estimator_ext.Estimator(lambda features: None, model_dir="unused")
    with pytest.raises(TypeError, match=r"`eval_spec` must have type `tf.estimator.EvalSpec`, or"):
        estimator_ext.train_and_evaluate(own, spec, value)


@pytest.mark.parametrize("names", [[], [None, None], ["a", "a"], ["a", None], ["", "b"]])
def test_eval_specs_need_unique_names(names: list[Any]) -> None:
    import estimator_ext
    from estimator_ext._tf_estimator import EvalSpec, TrainSpec

    spec = TrainSpec(lambda: None, max_steps=1)
    own = estimator_ext.Estimator(lambda features: None, model_dir="unused")
    specs = [EvalSpec(lambda: None, name=name) for name in names]
    with pytest.raises(hostopt.ConfigError, match=r"named .*, wanted .*\. Give each a name"):
        estimator_ext.train_and_evaluate(own, spec, specs)


@pytest.mark.parametrize("pairs", [[], [(None, None)]])
def test_missing_gradients_are_refused_like_stock(pairs: Any) -> None:
    import estimator_ext

    with pytest.raises(ValueError, match=r"no gradients provided .*\. Check whether"):
        estimator_ext.reduce_gradients(pairs)
