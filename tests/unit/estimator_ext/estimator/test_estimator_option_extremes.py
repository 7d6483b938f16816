"""Extreme values of options of the Estimator: refused in two sentences, or accepted."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from option_table import ESTIMATOR_OPTIONS, Values, check_refusal, refusal_of

import hostopt
from hostopt.options import shown

OPTIONS = [
    (kind, name, values)
    for kind, options in ESTIMATOR_OPTIONS.items()
    for name, values in options.items()
]


def make(kind: str, **option: Any) -> Any:
    """Returns an object of a class of `estimator_ext` with one option."""
    import estimator_ext

    others: dict[str, Any] = {
        "RunConfig": lambda: {"train_distribute": estimator_ext.HostOffloadStrategy()},
        "Estimator": lambda: {"model_fn": lambda features: None, "model_dir": "unused"},
        "LossScaleOptimizer": lambda: {"optimizer": None},
    }
    return getattr(estimator_ext, kind)(**others.get(kind, dict)(), **option)


@pytest.mark.parametrize(("kind", "name", "values"), OPTIONS)
def test_an_option_refuses(kind: str, name: str, values: Values) -> None:
    for value in values.refused:
        text = refusal_of(value, lambda v: make(kind, **{name: v}), ValueError)
        given = f"(option )?{name} is {re.escape(shown(value))}"
        check_refusal(text, given, values.wanted, "(Give|Correct)")


@pytest.mark.parametrize(("kind", "name", "values"), OPTIONS)
def test_an_option_accepts(kind: str, name: str, values: Values) -> None:
    for value in values.accepted:
        make(kind, **{name: value})


@pytest.mark.parametrize("value", ["x", 3, [], {}, object(), True])
def test_a_resolver_may_be_none(value: Any) -> None:
    with pytest.raises(hostopt.ConfigError, match=r"resolver is of type .*, wanted .*\. Give one"):
        make("HostOffloadStrategy", cluster_resolver=value)


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
