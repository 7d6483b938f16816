"""Reductions anywhere in a step: as in one process on whole batches, or refused."""

from __future__ import annotations

import tensorflow as tf

from estimator_ext.reduction.deferred import DeferredReductions
from hostopt.tensorflow.reductions import Reduction


def test_each_reduction_has_a_unique_name() -> None:
    """The program may number its tensors in the same way."""
    with tf.Graph().as_default() as graph:
        deferred = DeferredReductions(None, graph, None)
        values = [tf.constant(float(number)) for number in range(6)]
        for value, name in zip(values, ["w", "w#2", "w", "w", "w#2", "v"]):
            deferred.add(Reduction(value, name))
        names = [each.reduction.name for each in deferred._deferred]
    assert len({*names}) == 6
    assert names[:2] == ["w", "w#2"]
