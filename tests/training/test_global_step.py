"""Changes of global_step, anywhere in a graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import estimator_ext
from estimator_ext.graphs.global_step import changes, read_before_changes

estimator_ext.install()


v1 = tf.compat.v1


def in_a_while_loop(step: Any) -> Any:
    def body(i: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([step.assign_add(1)]):
            return i + 1

    return tf.while_loop(lambda i: i < 3, body, [tf.constant(0)])


def in_nested_functions(step: Any) -> Any:
    @tf.function
    def inner() -> Any:
        return tf.cond(tf.constant(True), lambda: step.assign_add(1), step.read_value)

    return tf.function(lambda: inner() + 1)()


CHANGING: dict[str, Callable[[Any], Any]] = {
    "assign_add": lambda step: step.assign_add(1),
    "assign": lambda step: step.assign(step + 1),
    "assign_sub": lambda step: step.assign_sub(-1),
    "state_ops": lambda step: v1.assign_add(step, 1),
    "count_up_to": lambda step: v1.count_up_to(step, 100),
    "an optimizer": lambda step: v1.train.GradientDescentOptimizer(0.1).minimize(
        v1.get_variable("w", []) * 2.0, step
    ),
    "a branch": lambda step: tf.cond(
        tf.constant(True), lambda: step.assign_add(1), step.read_value
    ),
    "a loop": in_a_while_loop,
    "functions": in_nested_functions,
}
READING: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda step: None,
    "a value": lambda step: step + 1,
    "a branch": lambda step: tf.cond(step > 3, lambda: step + 1, lambda: step + 2),
    "a loop": lambda step: tf.while_loop(
        lambda i: i < tf.cast(step, tf.int32), lambda i: i + 1, [0]
    ),
    "a loop that passes it on": lambda step: tf.while_loop(
        lambda i, _: i < 3, lambda i, passed: (i + 1, passed), [tf.constant(0), step]
    ),
    "a function": tf.function(lambda step: step * 2),
    "a saver": lambda step: v1.train.Saver([step]),
    "an update that depends on it": lambda step: v1.get_variable("decayed", [], tf.int64).assign(
        step
    ),
}


def changes_of(build: Callable[[Any], Any], resource: bool, control_flow_v2: bool) -> list[str]:
    """Returns the types of the operations that change global_step in a graph."""
    switch = v1.enable_control_flow_v2 if control_flow_v2 else v1.disable_control_flow_v2
    with tf.Graph().as_default():
        had_v2 = v1.control_flow_v2_enabled()
        switch()
        try:
            v1.get_variable_scope().set_use_resource(resource)
            step = v1.train.create_global_step()
            build(step)
            return [op.type for op in changes(step)]
        finally:
            (v1.enable_control_flow_v2 if had_v2 else v1.disable_control_flow_v2)()


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize(("resource", "v2"), [(True, True), (True, False), (False, False)])
def test_changes_are_found(name: str, resource: bool, v2: bool) -> None:
    if name == "functions" and not resource:  # functions take no reference variables
        return
    result = changes_of(CHANGING[name], resource, v2)
    assert result
    assert all("Assign" in each or "CountUpTo" in each for each in result)


@pytest.mark.parametrize("name", READING)
@pytest.mark.parametrize(("resource", "v2"), [(True, True), (True, False), (False, False)])
def test_reading_and_restoring_are_not_changes(name: str, resource: bool, v2: bool) -> None:
    assert changes_of(READING[name], resource, v2) == []


# -- the training --------------------------------------------------------------------------


def input_fn() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(([[1.0]], [[2.0]])).repeat(50)


def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str, params: dict[str, Any]) -> Any:
    """Minimizes without global_step, as programs for an IPU estimator do, which counts itself."""
    loss = tf.reduce_mean((features * v1.get_variable("w", [1, 1]) - labels) ** 2)
    train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    hooks = [params["hook"]] if "hook" in params else []
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=hooks)


def make(model_dir: Path, with_strategy: bool, **params: Any) -> Any:
    strategy = estimator_ext.HostOffloadStrategy() if with_strategy else None
    config = estimator_ext.RunConfig(train_distribute=strategy)
    return estimator_ext.Estimator(model_fn, str(model_dir), config, params)


@pytest.mark.parametrize("with_strategy", [False, True])
@pytest.mark.parametrize("limit", ["steps", "max_steps"])
def test_a_training_that_would_never_end_is_refused(
    tmp_path: Path, with_strategy: bool, limit: str
) -> None:
    with pytest.raises(
        ValueError, match=r"global_step would stay.*Give it to the optimizer, as in"
    ):
        make(tmp_path, with_strategy).train(input_fn, **{limit: 5})
    assert not list(tmp_path.glob("*.index"))


@pytest.mark.parametrize("with_strategy", [False, True])
def test_one_process_trains_to_the_end_of_its_data(tmp_path: Path, with_strategy: bool) -> None:
    """The stock Estimator does so too; it takes the last step as saved already."""
    hook = Losses()
    make(tmp_path, with_strategy).train(input_fn, hooks=[hook])
    assert len(hook.found) == 50
    assert hook.found[-1] < 1e-3


class Losses(tf.estimator.SessionRunHook):
    """Records the loss of each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def before_run(self, run_context: Any) -> Any:
        loss = v1.get_collection(v1.GraphKeys.LOSSES)[-1]
        return tf.estimator.SessionRunArgs(loss)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.found.append(float(run_values.results))


@pytest.mark.parametrize("where", ["hooks", "training_hooks"])
@pytest.mark.parametrize("with_strategy", [False, True])
def test_a_hook_may_count_the_steps(tmp_path: Path, with_strategy: bool, where: str) -> None:
    class Count(tf.estimator.SessionRunHook):
        def begin(self) -> None:
            self._increment = v1.train.get_global_step().assign_add(1)

        def after_run(self, run_context: Any, run_values: Any) -> None:
            run_context.session.run(self._increment)

    params = {"hook": Count()} if where == "training_hooks" else {}
    hooks = [Count()] if where == "hooks" else []
    estimator = make(tmp_path, with_strategy, **params)
    estimator.train(input_fn, hooks=hooks, steps=5)
    # StopAtStepHook stops after the step that it sees, before or after the hook has counted
    assert estimator.get_variable_value("global_step") in (5, 6)


def test_reads_of_global_step_come_before_its_change() -> None:
    """BERT's program groups the change with an update that reads the step."""
    with tf.Graph().as_default():
        step = v1.train.create_global_step()
        change = step.assign(step + 1, read_value=False)
        rates = [step.read_value() * 2 for _ in range(3)]
        with tf.control_dependencies([change]):
            after = step.read_value()
        train_op = tf.group(change, after, *rates)
        read_before_changes([train_op])
        reads = {rate.op.inputs[0].op.inputs[0].op for rate in rates}
        assert {op.type for op in reads} == {"ReadVariableOp"}
        assert reads <= set(change.control_inputs)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for number in range(50):
                values = session.run([rates, after, train_op])
                assert values[:2] == [[2 * number] * 3, number + 1]


def in_nested_branches(step: Any) -> tf.Tensor:
    three = v1.placeholder_with_default(3, [])
    return tf.cond(
        three < 7,
        lambda: tf.cond(three < 5, lambda: step + 0, lambda: tf.constant(0, tf.int64)),
        lambda: tf.constant(0, tf.int64),
    )


def in_a_loop(step: Any) -> tf.Tensor:
    def body(i: tf.Tensor, last: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return i + 1, step + 0 * last

    zero = tf.constant(0, tf.int64)
    return tf.while_loop(lambda i, last: i < 3, body, [tf.constant(0), zero])[1]


READ_WITHIN: dict[str, Callable[[Any], tf.Tensor]] = {
    "a branch": lambda step: tf.cond(
        v1.placeholder_with_default(3, []) < 7, lambda: step + 0, lambda: tf.constant(0, tf.int64)
    ),
    "nested branches": in_nested_branches,
    "a loop": in_a_loop,
    "a function": tf.function(lambda step: step + 0),
}


@pytest.mark.parametrize("name", READ_WITHIN)
@pytest.mark.parametrize("control_flow_v2", [True, False])
@pytest.mark.parametrize("changed_in", ["the step", "a branch"])
def test_reads_in_a_branch_or_loop_come_before_its_change(
    name: str, control_flow_v2: bool, changed_in: str
) -> None:
    """The change must depend on the read in the graph; the order of one run proves nothing."""
    switch = v1.enable_control_flow_v2 if control_flow_v2 else v1.disable_control_flow_v2
    had_v2 = v1.control_flow_v2_enabled()
    with tf.Graph().as_default():
        switch()
        try:
            step = v1.train.create_global_step()
            result = READ_WITHIN[name](step)
            v1.enable_control_flow_v2()  # a change within a branch of TensorFlow 1 cannot wait
            if changed_in == "a branch":
                three = v1.placeholder_with_default(3, [])
                changed = tf.cond(three < 7, lambda: step.assign_add(1), step.read_value)
                change = changed.op.inputs[0].op
            else:
                change = changed = step.assign_add(1, read_value=False)
        finally:
            (v1.enable_control_flow_v2 if had_v2 else v1.disable_control_flow_v2)()
        train_op = tf.group(changed, result)
        read_before_changes([train_op])
        assert runs_before(result.op, change)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            assert [session.run([result, train_op])[0] for _ in range(20)] == [*range(20)]


def runs_before(op: tf.Operation, other: tf.Operation) -> bool:
    """Returns True if an operation waits for another one, or for its input."""
    result, todo = set(), [other]
    while todo:
        each = todo.pop()
        result.add(each)
        todo += [before for before in each.control_inputs if before not in result]
        todo += [tensor.op for tensor in each.inputs if tensor.op not in result]
    while op.type == "Identity" and op not in result:
        op = op.inputs[0].op
    return op in result
