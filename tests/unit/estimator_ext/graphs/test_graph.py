"""Walks over graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf

import estimator_ext
from estimator_ext.graphs import walks

estimator_ext.install()


v1 = tf.compat.v1


def names(operations: list[tf.Operation]) -> list[str]:
    return [op.name for op in operations]


def test_operations_are_unique_and_in_topological_order() -> None:
    with tf.Graph().as_default():
        a = tf.constant(1.0, name="a")
        b = tf.negative(a, name="b")
        with tf.control_dependencies([tf.no_op("first")]):
            c = tf.multiply(a, b, name="c")
        tf.negative(c, name="unused")
        order = names(walks.walk([c.op, b.op]))
    assert sorted(order) == ["a", "b", "c", "first"]
    assert order.index("a") < order.index("b") < order.index("c") > order.index("first")


def test_data_and_control_inputs() -> None:
    with tf.Graph().as_default():
        a = tf.constant(1.0, name="a")
        with tf.control_dependencies([tf.no_op("first")]):
            b = tf.multiply(a, a, name="b")
    assert names(walks.data_before(b.op)) == ["a"]
    assert names(walks.runs_before(b.op)) == ["a", "first"]
    assert walks.depends_on([b.op], [a.op])
    assert not walks.depends_on([a.op], [b.op])
    first = a.graph.get_operation_by_name("first")
    assert walks.depends_on([b.op], [first])
    assert not walks.depends_on([b.op], [first], walks.data_before)


def test_ancestors_are_in_the_order_in_which_they_were_built() -> None:
    with tf.Graph().as_default():
        tensor = tf.constant(1.0)
        for _ in range(20):
            tensor = tf.add(tensor, tf.constant(2.0))
        ancestors = walks.ancestors([tensor.op])
        assert ancestors == tensor.graph.get_operations()


def test_a_graph_deeper_than_the_python_stack() -> None:
    with tf.Graph().as_default():
        tensor = tf.constant(1.0)
        for _ in range(3000):
            tensor = tf.identity(tensor)
        assert len(walks.walk([tensor.op])) == 3001


@pytest.fixture
def control_flow_v1() -> Iterator[None]:
    enabled = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    yield
    if enabled:
        v1.enable_control_flow_v2()


@pytest.mark.usefixtures("control_flow_v1")
def test_a_loop_exit_follows_its_entry() -> None:
    with tf.Graph().as_default():
        total = tf.while_loop(lambda i: i < 3, lambda i: i + 1, [tf.constant(0)], name="loop")
        order = [op.type for op in walks.walk([tf.nest.flatten(total)[0].op])]
    assert order.index("Merge") < order.index("NextIteration")
    assert order.index("Enter") < order.index("Merge") < order.index("Switch")


@pytest.mark.usefixtures("control_flow_v1")
def test_predicates_of_an_operation_are_listed_innermost_first() -> None:
    with tf.Graph().as_default():
        outer, inner = (v1.placeholder(tf.bool, [], name) for name in ("outer", "inner"))
        result = []

        def innermost() -> tf.Tensor:
            tensor = tf.negative(1.0)
            result.extend(walks.predicates_around(tensor.op))
            return tensor

        tf.cond(outer, lambda: tf.cond(inner, innermost, lambda: 0.0), lambda: 0.0)
        sources = [walks.walk([predicate.op], walks.data_before) for predicate in result]
    assert [inner.op in operations for operations in sources] == [True, False]
    assert [outer.op in operations for operations in sources] == [True, True]


def test_functions_called_by_an_operation() -> None:
    with tf.Graph().as_default() as graph:
        predicate = v1.placeholder(tf.bool, [])
        tf.cond(predicate, lambda: tf.negative(1.0), lambda: 0.0)
        (op,) = [op for op in graph.get_operations() if op.type in walks.BRANCHES]
        called = dict(walks.functions_called(op))
    assert called.keys() == {"then_branch", "else_branch"}
    assert "Neg" in {op.type for op in called["then_branch"].get_operations()}
