"""Ranks that train by themselves and synchronise every few steps, against NumPy."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tensorflow as tf

import estimator_ext
import hostopt
from estimator_ext.strategy.local_steps import LocalSteps

OUTER = tf.compat.v1.train.MomentumOptimizer(0.7, 0.9, use_nesterov=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_every": 0}, "sync_every is 0, wanted a whole number from 1"),
        ({"sync_every": True}, "sync_every is True"),
        ({"sync_every": 2, "sync_secs": 1.0}, "wanted None with sync_every"),
        ({"sync_secs": -1.0}, "sync_secs is -1.0"),
        ({"sync_warmup_steps": 5}, "have no effect"),
        ({"sync_every": 2, "sync_slots": "average?"}, "sync_slots is 'average?'"),
        ({"sync_every": 2, "sync_compression": "int2"}, "sync_compression is 'int2'"),
        ({"sync_every": 4, "sync_fragments": 3}, "sync_fragments is 3, wanted a divisor of 4"),
        ({"sync_every": 4, "sync_delay": 4}, "sync_delay is 4, wanted at most 3"),
        ({"sync_every": 2, "sync_fragments": 2, "sync_delay": 1}, "wanted at most 0"),
        ({"sync_every": 4, "sync_delay": 1, "sync_slots": "average"}, "'keep' with sync_delay"),
        ({"sync_every": 4, "sync_fragments": 2, "sync_slots": "reset"}, "with sync_fragments"),
        ({"outer_optimizer": "sgd"}, "outer_optimizer is 'sgd'"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(hostopt.ConfigError, match=re.escape(text)):
        estimator_ext.HostOffloadStrategy(**options)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"sync_every": 4}, "average"),
        ({"sync_every": 4, "sync_delay": 1}, "keep"),
        ({"sync_every": 4, "outer_optimizer": OUTER}, "keep"),  # as in the paper
        ({"sync_every": 4, "outer_optimizer": lambda: OUTER, "sync_fragments": 2}, "keep"),
        ({"sync_every": 4, "outer_optimizer": OUTER, "sync_slots": "average"}, "average"),
    ],
)
def test_slots_inside_of_an_outer_optimizer_are_kept(options: dict[str, Any], rule: str) -> None:
    assert LocalSteps(**options).slot_rule == rule


def test_loops_of_tensorflow_2_are_refused() -> None:
    strategy = estimator_ext.HostOffloadStrategy(sync_every=2)
    with pytest.raises(hostopt.ConfigError, match=r"Train with estimator_ext\.Estimator"):
        strategy.run(lambda: None)
