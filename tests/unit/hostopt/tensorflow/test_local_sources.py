"""Variables whose gradients are not reduced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import hostopt
import hostopt.tensorflow as hvd
from hostopt.tensorflow.wrapping import LocalSources, variables_of_layers


class TenRanks:
    """A reduction over ten ranks that all have the same gradients."""

    size = 10

    def ring(self) -> TenRanks:
        return self

    def reduce(self, gradients: list[Any], sources: list[Any]) -> list[Any]:
        assert len(gradients) == len(sources)
        return [each * 10.0 for each in gradients]


@pytest.mark.parametrize(("is_scaled", "expected"), [(True, 0.05), (False, 0.5)])
def test_only_the_others_are_reduced(is_scaled: bool, expected: float) -> None:
    shared, local, rows, unused = (tf.Variable([1.0]) for _ in range(4))
    sources = LocalSources(is_scaled, 0.5)
    for each in (local, rows, unused):
        sources.add(each)
    assert local in sources and shared not in sources
    slices = tf.IndexedSlices(tf.ones([1]), tf.constant([0]), tf.constant([1]))
    reduction: Any = TenRanks()
    gradients = [tf.ones([1]), tf.ones([1]), slices, None]
    one, two, three, none = sources.reduce(reduction, gradients, [local, shared, rows, unused])
    np.testing.assert_allclose([one, two, three.values], [[expected], [10.0], [expected]])
    assert none is None


def test_generic_names_do_not_depend_on_the_variables() -> None:
    reduction: Any = TenRanks()
    seen: list[Any] = []
    reduction.reduce = lambda gradients, sources: seen.extend(sources) or gradients
    variable = tf.Variable([1.0])
    for use_generic_names in (False, True):
        LocalSources(False).reduce(reduction, [tf.ones([1])], [variable], use_generic_names)
    assert seen[0] is variable and seen[1] is None


def test_a_variable_is_known_by_its_wrapper_as_well() -> None:
    """Keras 3 wraps variables of TensorFlow; a tape may be given either."""

    class Wrapper:
        def __init__(self, value: tf.Variable) -> None:
            self.value = value

    variable = tf.Variable([1.0])
    sources = LocalSources(is_scaled=False)
    sources.add(Wrapper(variable))
    assert variable in sources and Wrapper(variable) in sources
    assert Wrapper(tf.Variable([1.0])) not in sources


def test_a_tape_with_local_layers(ring: None) -> None:
    layer, other = tf_keras.layers.Dense(1), tf_keras.layers.Dense(1)
    model = tf_keras.Sequential([tf_keras.Input((2,)), layer, other])
    with tf.GradientTape() as plain:
        loss = tf.reduce_sum(model(tf.ones([1, 2])))
    tape = hvd.PartialDistributedGradientTape(plain, local_layers=layer)
    local, shared = tape.get_local_and_global_gradients(loss, model.trainable_variables)
    assert [id(v) for v, _ in local] == [id(v) for v in layer.trainable_variables]
    assert [id(v) for v, _ in shared] == [id(v) for v in other.trainable_variables]
    np.testing.assert_array_equal(shared[1][1], [1.0])


def test_layers_without_variables_are_refused() -> None:
    with pytest.raises(hostopt.ConfigError, match="'unbuilt' of local_layers has no variables"):
        variables_of_layers([tf_keras.layers.Dense(1, name="unbuilt")])
    with pytest.raises(hostopt.ConfigError, match=r"type str, .* register_local_source"):
        variables_of_layers(["dense"])
    assert variables_of_layers(None) == []
