"""Tests of the search for updates that can be divided, and of the operations it accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from estimator_ext.reduction.elementwise import _ELEMENTWISE, Update, UpdateSearch
from hostopt.tensorflow.background import HOST_DEVICE

v1, raw = tf.compat.v1, tf.raw_ops
SIZE = 1000
# by operation, of a tensor and a scalar
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "AddV2": lambda x, s: raw.AddV2(x=x, y=s),
    "AddN": lambda x, s: raw.AddN(inputs=[x, x, x]),
    "Sub": lambda x, s: raw.Sub(x=s, y=x),
    "Mul": lambda x, s: raw.Mul(x=x, y=s),
    "MulNoNan": lambda x, s: raw.MulNoNan(x=x, y=s),
    "RealDiv": lambda x, s: raw.RealDiv(x=s, y=x),
    "DivNoNan": lambda x, s: raw.DivNoNan(x=x, y=s),
    "Square": lambda x, s: raw.Square(x=x),
    "SquaredDifference": lambda x, s: raw.SquaredDifference(x=x, y=s),
    "Sqrt": lambda x, s: raw.Sqrt(x=x),
    "Rsqrt": lambda x, s: raw.Rsqrt(x=x),
    "Reciprocal": lambda x, s: raw.Reciprocal(x=x),
    "Pow": lambda x, s: raw.Pow(x=x, y=s),
    "Exp": lambda x, s: raw.Exp(x=x),
    "Log": lambda x, s: raw.Log(x=x),
    "Log1p": lambda x, s: raw.Log1p(x=x),
    "Tanh": lambda x, s: raw.Tanh(x=x),
    "Sigmoid": lambda x, s: raw.Sigmoid(x=x),
    "Maximum": lambda x, s: raw.Maximum(x=x, y=s),
    "Minimum": lambda x, s: raw.Minimum(x=x, y=s),
    "ClipByValue": lambda x, s: raw.ClipByValue(t=x, clip_value_min=s / 2, clip_value_max=s),
    "Sign": lambda x, s: raw.Sign(x=x),
    "SelectV2": lambda x, s: raw.SelectV2(condition=raw.Greater(x=x, y=s), t=x, e=s),
    "Select": lambda x, s: raw.Select(condition=s > 0, x=x, y=x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_part_of_a_result_is_the_result_of_the_part(name: str, dtype: Any) -> None:
    values = np.random.RandomState(0).rand(SIZE).astype(dtype) + dtype(0.1)
    scalar = tf.constant(0.7, dtype)
    whole = FUNCTIONS[name](tf.constant(values), scalar).numpy()
    assert _ELEMENTWISE.fullmatch(name)
    for part in (slice(0, 336), slice(336, 672), slice(672, SIZE)):  # at multiples of 64 bytes
        result = FUNCTIONS[name](tf.constant(values[part]), scalar).numpy()
        np.testing.assert_array_equal(result, whole[part])


@pytest.fixture(name="graph")
def _graph() -> Iterator[None]:
    device = f"/job:localhost/replica:0/task:0{HOST_DEVICE}"
    with tf.Graph().as_default(), tf.device(device):
        v1.enable_resource_variables()
        yield


def variable(name: str, trainable: bool = True, shape: tuple[int, ...] = (3, 4)) -> Any:
    initial = v1.zeros_initializer()
    return v1.get_variable(name, shape, initializer=initial, trainable=trainable)


def gradient(shape: tuple[int, ...] = (3, 4)) -> tf.Tensor:
    return v1.placeholder(tf.float32, shape)


def momentum(weights: Any, slot: Any, slope: Any) -> tuple[tf.Tensor, list[tf.Operation]]:
    new = 0.9 * slot + slope
    return new, [weights.assign_sub(new, read_value=False), slot.assign(new, read_value=False)]


def found(*updates: Any) -> list[Update]:
    search = UpdateSearch([tf.group(tf.group(*updates))], on_one_host=True)
    return search.in_order(search.find())


def names(updates: list[Update]) -> list[str]:
    return [each.variable.op.name for each in updates]


@pytest.mark.usefixtures("graph")
def test_a_slot_belongs_to_the_update_that_uses_it() -> None:
    (update,) = found(*momentum(variable("w"), variable("m", False), gradient())[1])
    assert update.names_of_slots == ["m"]
    assert {op.type for op in update.writes} == {"AssignSubVariableOp", "AssignVariableOp"}


@pytest.mark.usefixtures("graph")
def test_a_new_value_that_something_else_uses_stays_whole() -> None:
    new, updates = momentum(variable("w"), variable("m", False), gradient())
    v1.summary.histogram("new", new)
    assert not found(*updates)


@pytest.mark.usefixtures("graph")
def test_a_norm_of_what_depends_on_a_slot_stays_whole() -> None:
    weights, slot, slope = variable("w"), variable("m", False), gradient()
    change, updates = momentum(weights, slot, slope)
    assert names(found(*updates)) == ["w"]
    assert not found(weights.assign_sub(change / tf.norm(change), read_value=False), *updates)
    # of what is known before the update, each rank can compute it
    change = weights / tf.norm(weights) + slope / tf.norm(slope)
    assert names(found(weights.assign_sub(change, read_value=False))) == ["w"]


@pytest.mark.usefixtures("graph")
def test_a_factor_of_another_shape_is_applied_to_the_whole() -> None:
    weights, slope = variable("w"), gradient()
    (update,) = found(weights.assign_sub(slope * tf.ones([1, 4]), read_value=False))
    assert [op.type for op, _ in update.whole] == ["AssignSubVariableOp"]
    with tf.control_dependencies([weights.assign_sub(slope, read_value=False)]):
        late = weights.read_value() * tf.ones([1, 4])
    assert not found(weights.assign_sub(late, read_value=False))


@pytest.mark.usefixtures("graph")
def test_a_random_initial_value_of_a_slot_is_not_drawn_again() -> None:
    slot = v1.get_variable("m", [3, 4], trainable=False)  # Glorot's initializer
    assert not found(*momentum(variable("w"), slot, gradient())[1])


@pytest.mark.usefixtures("graph")
def test_updates_that_wait_for_each_other_stay_whole() -> None:
    first, second, third = map(variable, "abc")
    decays = [each.assign_sub(0.1 * each, read_value=False) for each in (first, second)]
    with tf.control_dependencies(decays):
        changes = [each.assign_sub(gradient(), read_value=False) for each in (first, second)]
    with tf.control_dependencies(changes):  # the last waits for both
        last = third.assign_sub(gradient(), read_value=False)
    assert names(found(*changes, last)) == ["c"]


@pytest.mark.usefixtures("graph")
def test_an_update_after_another_has_the_next_level() -> None:
    first, second = map(variable, "ab")
    change = second.assign_sub(gradient(), read_value=False)
    with tf.control_dependencies([tf.group(change)]):
        updates = found(first.assign_sub(gradient(), read_value=False))
    assert [(each.variable.op.name, each.level) for each in updates] == [("a", 1), ("b", 0)]


@pytest.mark.usefixtures("graph")
def test_between_two_writes_only_a_scalar_may_be_computed() -> None:
    first, second, rate = variable("a"), variable("b"), variable("rate", False, ())
    updates, slope = [], gradient()
    for each, factor in ((first, rate), (second, second)):
        with tf.control_dependencies([each.assign_sub(0.1 * each, read_value=False)]):
            scale = tf.norm(factor.read_value()) if factor is second else factor.read_value()
            updates.append(each.assign_sub(scale * slope, read_value=False))
    assert names(found(*updates)) == ["a"]


@pytest.mark.usefixtures("graph")
def test_a_scalar_is_updated_by_a_kernel_only() -> None:
    scale, other = variable("scale", shape=()), variable("other", shape=())
    kernel = v1.train.AdamOptimizer().apply_gradients([(gradient(()), scale)])
    assert names(found(kernel, other.assign_sub(gradient(()), read_value=False))) == ["scale"]
