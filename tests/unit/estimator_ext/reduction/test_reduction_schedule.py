"""The schedule of deferred reductions, as a pure function of the graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

import estimator_ext
import hostopt
from estimator_ext.reduction.deferred import Deferred, make_schedule, needs_no_reduction
from hostopt.tensorflow.reductions import Reduction

estimator_ext.install()


class Program:
    """A graph whose reductions are noted, and identified by their names."""

    def __init__(self) -> None:
        self.deferred: list[Deferred] = []

    def reduce(self, name: str, value: Any, is_gradient: bool = True, **fields: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        result = tf.identity(value, name)
        reduction = Reduction(value, name, is_gradient=is_gradient)
        noted = {"weight": None, "nonfinite": None, **fields}
        self.deferred.append(Deferred(reduction, (result.op,), **noted))
        return result

    def schedule(
        self, *targets: tf.Tensor, loss: tf.Tensor, repeated: tuple[tf.Tensor, ...] = ()
    ) -> tuple[list[list[str]], int | None, list[str]]:
        """Names of the reductions in each exchange, the exchange of the loss, and the others."""
        made = make_schedule(
            [tensor.op for tensor in targets],
            self.deferred,
            [],
            loss.op,
            [tensor.op for tensor in repeated],
        )
        groups = [[each.reduction.name for each in group] for group in made.groups]
        return groups, made.with_loss, [each.reduction.name for each in made.outside]


@pytest.fixture
def program() -> Iterator[Program]:
    with tf.Graph().as_default():
        yield Program()


def test_independent_reductions_share_an_exchange_with_the_loss(program: Program) -> None:
    loss = tf.constant(1.0)
    a, b = program.reduce("a", 1.0), program.reduce("b", 2.0)
    assert program.schedule(a, b, loss=loss) == ([["a", "b"]], 0, [])


def test_a_chain_of_reductions_needs_one_exchange_each(program: Program) -> None:
    loss = tf.constant(1.0)
    norm = program.reduce("norm", 1.0, is_gradient=False)
    other = program.reduce("other", 1.0)
    scaled = program.reduce("scaled", norm * 2.0)
    assert program.schedule(scaled, other, loss=loss) == ([["other", "norm"], ["scaled"]], 1, [])


def test_a_loss_that_depends_on_the_last_exchange_has_a_separate_exchange(
    program: Program,
) -> None:
    norm = program.reduce("norm", 1.0, is_gradient=False)
    assert program.schedule(norm, loss=norm * 2.0) == ([["norm"]], None, [])


def test_unused_values_are_exchanged_and_unused_gradients_are_not(program: Program) -> None:
    loss = tf.constant(1.0)
    used = program.reduce("used", 1.0)
    program.reduce("value", 1.0, is_gradient=False)
    program.reduce("gradient", 1.0)
    assert program.schedule(used, loss=loss) == ([["used"], ["value"]], 0, ["gradient"])


def test_an_unused_value_that_changes_state_is_left_to_hooks(program: Program) -> None:
    loss = tf.constant(1.0)
    used = program.reduce("used", 1.0)
    counter = tf.compat.v1.get_variable("counter", initializer=0.0, use_resource=True)
    program.reduce("value", counter.assign_add(1.0), is_gradient=False)
    assert program.schedule(used, loss=loss) == ([["used"]], 0, ["value"])


def test_gradients_with_another_weight_or_check_have_a_separate_exchange(program: Program) -> None:
    loss = tf.constant(1.0)
    weight = tf.constant(0.5, tf.float64)
    results = [
        program.reduce("plain", 1.0),
        program.reduce("weighted", 1.0, weight=weight),
        program.reduce("value", 1.0, is_gradient=False),
        program.reduce("allowed", 1.0, nonfinite="allow"),
        program.reduce("weighted_too", 1.0, weight=weight),
    ]
    groups = [["plain", "value"], ["weighted", "weighted_too"], ["allowed"]]
    assert program.schedule(*results, loss=loss) == (groups, 2, [])


def test_reductions_of_different_micro_batches_are_separate(program: Program) -> None:
    loss = tf.constant(1.0)
    a, b = program.reduce("a", 1.0), program.reduce("b", 2.0)
    groups = [["a"], ["b"]]
    assert program.schedule(a, b, loss=loss, repeated=(b,)) == (groups, 0, [])


@pytest.mark.parametrize(
    ("op", "is_gradient", "is_same", "kind", "expected"),
    [
        ("AVERAGE", False, True, "variable", True),
        ("AVERAGE", False, False, "variable", False),
        ("AVERAGE", False, True, "constant", False),  # may be made of this rank's data
        ("SUM", False, True, "variable", False),
        ("AVERAGE", True, True, "variable", False),
    ],
)
def test_the_mean_of_a_mirrored_variable_needs_no_reduction(
    program: Program, op: str, is_gradient: bool, is_same: bool, kind: str, expected: bool
) -> None:
    del program
    value: Any = tf.constant(1.0)
    if kind == "variable":
        value = tf.compat.v1.get_variable("v", initializer=1.0, use_resource=True).read_value()
    reduction = Reduction(
        tf.identity(value), "v", getattr(hostopt.ReduceOp, op), is_gradient=is_gradient
    )
    assert needs_no_reduction(reduction, lambda tensor: is_same) is expected
