"""Descriptions of updates: equal if ranks do the same, different if not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf

import estimator_ext
from estimator_ext.graphs.fingerprint import Updates, read_updates
from hostopt.tensorflow import ops

estimator_ext.install()


v1 = tf.compat.v1
Apply = Callable[[Any, Any], Any]


def reduced(gradient: tf.Tensor) -> tf.Tensor:
    """Builds a reduced gradient."""
    result = tf.numpy_function(lambda x: x, [gradient], gradient.dtype, name="HostAllReduce")
    assert ops.is_same_on_all_ranks(result.op)
    result.set_shape(gradient.shape)
    return result


def built(apply: Apply, seed: int = 1, first: str = "") -> Updates:
    """Returns the updates of a small model; `apply` applies its gradients to its variables."""
    with tf.Graph().as_default():
        v1.set_random_seed(seed)
        for _ in range(seed):  # so that generated names differ
            tf.constant(1.0, name=first or None)
        dataset = tf.data.Dataset.from_tensors(np.full([2, 3], seed, np.float32))
        x = v1.data.make_one_shot_iterator(dataset).get_next()
        noise = tf.random.normal([2, 3], seed=seed)
        data = {x.op, noise.op}
        step = v1.train.get_or_create_global_step()
        kernel = v1.get_variable("kernel", [3, 1], initializer=v1.ones_initializer())
        bias = v1.get_variable("bias", [1], initializer=v1.zeros_initializer())
        average = v1.get_variable("average", [3], trainable=False)
        copy = v1.get_variable("copy", [3], trainable=False)
        v1.get_variable("unused", [1])
        loss = tf.reduce_mean(tf.matmul(tf.nn.dropout(x + noise, 0.5), kernel) + bias)
        gradients = [reduced(gradient) for gradient in tf.gradients(loss, [kernel, bias])]
        average_op = average.assign(tf.reduce_mean(x, 0), read_value=False)
        with tf.control_dependencies([average_op]):
            copy_op = copy.assign(average, read_value=False)
        with tf.control_dependencies([average_op, copy_op]):
            pairs = list(zip(gradients, [kernel, bias]))
            return read_updates([apply(pairs, step)], data)


def adam(rate: Any = 0.001, beta: float = 0.9) -> Apply:
    return lambda pairs, step: v1.train.AdamOptimizer(rate, beta).apply_gradients(pairs, step)


def sgd(rate: Callable[[Any], Any]) -> Apply:
    def apply(pairs: Any, step: Any) -> Any:
        return v1.train.GradientDescentOptimizer(rate(step)).apply_gradients(pairs, step)

    return apply


def momentum(value: float, nesterov: bool) -> Apply:
    optimizer = v1.train.MomentumOptimizer
    return lambda pairs, step: optimizer(0.1, value, use_nesterov=nesterov).apply_gradients(
        pairs, step
    )


def clipped(norm: float) -> Apply:
    def apply(pairs: Any, step: Any) -> Any:
        gradients, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], norm)
        return adam()(list(zip(gradients, [variable for _, variable in pairs])), step)

    return apply


def scaled(rate: float, growth_steps: int = 10) -> Apply:
    """Applies updates in a branch, as a step that is skipped if a gradient is not finite."""

    def apply(pairs: Any, step: Any) -> Any:
        optimizer = v1.train.AdamOptimizer(rate)
        wrapped = estimator_ext.LossScaleOptimizer(optimizer, growth_steps=growth_steps)
        return wrapped.apply_gradients(pairs, step)

    return apply


def looped(times: int) -> Apply:
    """Computes a learning rate in a loop."""

    def rate(step: Any) -> Any:
        del step
        return tf.while_loop(lambda i, r: i < times, lambda i, r: (i + 1, r * 0.9), (0, 0.1))[1]

    return sgd(rate)


def sparse(rate: float) -> Apply:
    def apply(pairs: Any, step: Any) -> Any:
        (gradient, variable), _ = pairs
        slices = tf.IndexedSlices(gradient, tf.constant([0, 1, 2]), [3, 1])
        return v1.train.GradientDescentOptimizer(rate).apply_gradients([(slices, variable)], step)

    return apply


def exponential(decay_steps: int) -> Apply:
    return sgd(lambda step: v1.train.exponential_decay(0.1, step, decay_steps, 0.9))


def piecewise(boundary: int) -> Apply:
    return sgd(lambda step: v1.train.piecewise_constant(step, [boundary], [0.1, 0.01]))


KINDS: dict[str, tuple[Apply, Apply, list[str]]] = {
    "optimizer": (adam(), momentum(0.9, False), ["ApplyAdam(", "ApplyMomentum("]),
    "learning rate": (adam(0.001), adam(0.01), ["lr=0.001,", "lr=0.01,"]),
    "beta": (adam(beta=0.9), adam(beta=0.8), ["beta1=0.9,", "beta1=0.8,"]),
    "momentum": (momentum(0.9, False), momentum(0.8, False), ["momentum=0.9", "momentum=0.8"]),
    "nesterov": (momentum(0.9, False), momentum(0.9, True), ["", ", use_nesterov)"]),
    "clip norm": (clipped(1.0), clipped(5.0), ["Mul(1.0, Min", "Mul(5.0, Min"]),
    "decay": (
        exponential(100),
        exponential(200),
        ["'global_step', 100", "'global_step', 200"],
    ),
    "piecewise": (piecewise(100), piecewise(200), ["'global_step', 100", "'global_step', 200"]),
    "rate in a branch": (scaled(0.1), scaled(0.2), ["lr=0.1,", "lr=0.2,"]),
    "rate of a loop": (looped(3), looped(4), [", 3)", ", 4)"]),
    "rate of slices": (sparse(0.5), sparse(0.25), ["0.5", "0.25"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_different_update_has_a_different_description(kind: str) -> None:
    *pair, shown = KINDS[kind]
    first, second = (built(apply).texts["kernel"] for apply in pair)
    assert first != second
    assert shown[0] in first
    assert shown[1] in second
    assert not shown[0] or shown[0] not in second
    assert shown[1] not in first


@pytest.mark.parametrize("kind", KINDS)
def test_names_seeds_and_data_are_not_described(kind: str) -> None:
    apply = KINDS[kind][0]
    assert built(apply).texts == built(apply, seed=7, first="more").texts


def test_a_description_contains_operations_and_numbers() -> None:
    update = (
        "ResourceApplyAdam(beta1_power='beta1_power', beta2_power='beta2_power', lr=0.001, "
        "beta1=0.9, beta2=0.999, epsilon=1e-08, grad=reduced)"
    )
    assert built(adam()).texts == {
        "average": "AssignVariableOp(value=data)",
        "copy": "AssignVariableOp(value=data)",
        "beta1_power": "AssignVariableOp(value=Mul('beta1_power', 0.9))",
        "beta2_power": "AssignVariableOp(value=Mul('beta2_power', 0.999))",
        "global_step": "AssignAddVariableOp(value=1)",
        "kernel": update,
        "bias": update,
    }


def test_a_long_description_is_shortened_and_still_differs() -> None:
    def rate(last: float) -> Apply:
        factors = [0.5] * 200 + [last]
        return sgd(lambda step: tf.add_n([tf.cast(step, tf.float32) * f for f in factors]))

    first, second = (built(rate(last)).texts["kernel"] for last in (0.5, 0.25))
    assert first != second
    assert max(len(first), len(second)) < 600


def test_variables_that_depend_on_data_may_differ_by_rank_and_others_not() -> None:
    def unreduced(pairs: Any, step: Any) -> Any:
        local = [(gradient.op.inputs[0], variable) for gradient, variable in pairs]
        return adam()(local, step)

    alike = ["beta1_power", "beta2_power", "bias", "bias/Adam", "bias/Adam_1", "global_step"]
    slots = ["kernel/Adam", "kernel/Adam_1"]
    assert names(built(adam()).mirrored) == sorted(["kernel", *alike, *slots])
    # what is trained must not differ, whatever is done to it; its slots do then
    assert names(built(unreduced).mirrored) == sorted(["kernel", *alike])


def names(variables: Any) -> list[str]:
    return [variable.op.name for variable in variables]


# -- what counts as the same on all ranks ----------------------------------------------------


@pytest.fixture(params=["v2", "v1"])
def control_flow(request: pytest.FixtureRequest) -> Iterator[str]:
    """Enables control flow v2, with functions, or v1, with operations of the graph itself."""
    before = v1.control_flow_v2_enabled()
    (v1.enable_control_flow_v2 if request.param == "v2" else v1.disable_control_flow_v2)()
    yield request.param
    (v1.enable_control_flow_v2 if before else v1.disable_control_flow_v2)()


Value = Callable[[tf.Tensor, tf.Tensor], Any]


def varies(update: Value) -> bool:
    """Returns True if an update of `weights` counts as one that differs by rank.

    Args:
      update: builds it, from this rank's data and from what is the same on all ranks.
    """
    with tf.Graph().as_default():
        data = tf.random.normal([3])
        same = v1.get_variable("same", initializer=np.ones(3, np.float32)).read_value()
        v1.get_variable("weights", initializer=np.ones(3, np.float32))
        step = tf.group(tf.nest.flatten(update(data, same)))
        return "weights" in read_updates([step], {data.op}).varying


def assign(value: Any) -> Any:
    with v1.variable_scope("", reuse=True):
        return v1.get_variable("weights", [3]).assign(value, read_value=False)


def assigned(value: Value) -> Value:
    return lambda data, same: assign(value(data, same))


def in_branch(data: tf.Tensor, same: tf.Tensor) -> Any:
    return tf.cond(data[0] > 0, lambda: tf.group(assign(same)), tf.no_op)


def in_same_branch(data: tf.Tensor, same: tf.Tensor) -> Any:
    return tf.cond(same[0] > 0, lambda: tf.group(assign(same)), tf.no_op)


def in_nested_branch(data: tf.Tensor, same: tf.Tensor) -> Any:
    return tf.cond(data[0] > 0, lambda: in_same_branch(data, same), tf.no_op)


def in_function_in_branch(data: tf.Tensor, same: tf.Tensor) -> Any:
    @tf.function(autograph=False)
    def update(value: tf.Tensor) -> tf.Tensor:
        assign(value)
        return tf.constant(0)

    def call() -> tf.Operation:
        return tf.group(update(same))

    return tf.cond(data[0] > 0, call, tf.no_op)


def in_case(data: tf.Tensor, same: tf.Tensor) -> Any:
    def update() -> tf.Tensor:
        with tf.control_dependencies([assign(same)]):
            return tf.constant(0)

    return tf.switch_case(tf.cast(data[0], tf.int32), [update, lambda: tf.constant(1)])


def in_loop(data: tf.Tensor, same: tf.Tensor) -> Any:
    """Updates as often as the data say."""

    def body(i: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([assign(same)]):
            return i + 1

    return tf.while_loop(lambda i: tf.cast(i, tf.float32) < data[0], body, [0])


def later_in_loop(data: tf.Tensor, same: tf.Tensor) -> Any:
    """Assigns zeros in the first iteration, and data in all later ones."""

    def body(i: tf.Tensor, value: tf.Tensor) -> Any:
        with tf.control_dependencies([assign(value)]):
            return i + 1, tf.identity(data)

    return tf.while_loop(lambda i, _: i < 2, body, [0, tf.zeros(3)])[0]


def of_loop(step: Value, output: int = 1) -> Value:
    def value(data: tf.Tensor, same: tf.Tensor) -> Any:
        first = [0, tf.zeros(3), tf.zeros(3)]
        results = tf.while_loop(
            lambda i, *_: i < 4, lambda i, a, b: (i + 1, b + 1, step(data, same)), first
        )
        return results[output] + tf.zeros(3)

    return assigned(value)


BRANCHES: dict[str, tuple[bool, Value]] = {
    "assigned data": (True, assigned(lambda data, same: data)),
    "assigned variable": (False, assigned(lambda data, same: same)),
    "in a branch of the data": (True, in_branch),
    "in a branch that all take": (False, in_same_branch),
    "in a branch of a branch": (True, in_nested_branch),
    "in a function of a branch": (True, in_function_in_branch),
    "in a case": (True, in_case),
    "in a loop": (True, in_loop),
    "later in a loop": (True, later_in_loop),
    "constants of a branch": (
        True,
        assigned(lambda data, same: tf.cond(data[0] > 0, lambda: tf.ones(3), lambda: same)),
    ),
    "constants of a branch that all take": (
        False,
        assigned(lambda data, same: tf.cond(same[0] > 0, lambda: tf.ones(3), lambda: same)),
    ),
    # data reach the second result in the third time
    "data of a loop": (True, of_loop(lambda data, same: data)),
    "variables of a loop": (False, of_loop(lambda data, same: same)),
    "the counter of a loop with data": (
        False,
        assigned(lambda data, same: tf.cast(of_counter(data), tf.float32) + tf.zeros(3)),
    ),
    "the counter of a loop that data end": (
        True,
        assigned(lambda data, same: tf.cast(of_limited_counter(data), tf.float32) + tf.zeros(3)),
    ),
}


def of_counter(data: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda i, _: i < 4, lambda i, _: (i + 1, data), [0, tf.zeros(3)])[0]


def of_limited_counter(data: tf.Tensor) -> tf.Tensor:
    """Counts to a limit that depends on the data from the second iteration on."""
    limit = tf.cast(data[0], tf.int32)
    return tf.while_loop(lambda i, n: i < n, lambda i, n: (i + 1, limit), [0, 4])[0]


@pytest.mark.parametrize("name", BRANCHES)
def test_branches_and_loops(control_flow: str, name: str) -> None:
    expected, update = BRANCHES[name]
    assert varies(update) == expected


def through_queue(fill: Value) -> Value:
    def value(data: tf.Tensor, same: tf.Tensor) -> tf.Tensor:
        queue = v1.FIFOQueue(10, [tf.float32, tf.float32], [[3], [3]])
        with tf.control_dependencies([queue.enqueue([same, fill(data, same)])]):
            return queue.dequeue()[1]

    return assigned(value)


def through_accumulator(fill: Value) -> Value:
    def value(data: tf.Tensor, same: tf.Tensor) -> tf.Tensor:
        accumulator = v1.ConditionalAccumulator(tf.float32, [3])
        with tf.control_dependencies([accumulator.apply_grad(fill(data, same))]):
            return accumulator.take_grad(1)

    return assigned(value)


def filled_by_a_thread(data: tf.Tensor, same: tf.Tensor) -> Any:
    queue = v1.FIFOQueue(10, [tf.float32], [[3]])
    queue.enqueue(data)
    return assign(queue.dequeue())


def staged(data: tf.Tensor, same: tf.Tensor) -> Any:
    with tf.control_dependencies([tf.raw_ops.Stage(values=[data])]):
        return assign(tf.raw_ops.Unstage(dtypes=[tf.float32])[0])


def looked_up(key: Value) -> Value:
    def value(data: tf.Tensor, same: tf.Tensor) -> tf.Tensor:
        pairs = tf.lookup.KeyValueTensorInitializer([0, 1], [0.5, 0.25], tf.int64, tf.float32)
        table = tf.lookup.StaticHashTable(pairs, 0.0)
        return table.lookup(tf.cast(key(data, same), tf.int64))

    return assigned(value)


def time_of_day(data: tf.Tensor, same: tf.Tensor) -> Any:
    return tf.cast(tf.timestamp(), tf.float32) + same


def through_local(fill: Value, initial: Callable[[], Any] = lambda: tf.zeros(3)) -> Value:
    def value(data: tf.Tensor, same: tf.Tensor) -> tf.Tensor:
        local = v1.get_variable(
            "local",
            initializer=initial(),
            trainable=False,
            collections=[v1.GraphKeys.LOCAL_VARIABLES],
        )
        with tf.control_dependencies([local.assign_add(fill(data, same))]):
            return local.read_value()

    return assigned(value)


def of_data(data: tf.Tensor, same: tf.Tensor) -> tf.Tensor:
    return data


def of_variable(data: tf.Tensor, same: tf.Tensor) -> tf.Tensor:
    return same


STATES: dict[str, tuple[bool, Value]] = {
    "data of a queue": (True, through_queue(of_data)),
    "variables of a queue": (False, through_queue(of_variable)),
    "a queue that a thread fills": (True, filled_by_a_thread),
    "data of an accumulator": (True, through_accumulator(of_data)),
    "variables of an accumulator": (False, through_accumulator(of_variable)),
    "data of a stage": (True, staged),
    "the time": (True, assigned(time_of_day)),
    "data in a table": (True, looked_up(of_data)),
    "variables in a table": (False, looked_up(of_variable)),
    "data in a local variable": (True, through_local(of_data)),
    "variables in a local variable": (False, through_local(of_variable)),
    "a local variable that begins with noise": (
        True,
        through_local(of_variable, lambda: tf.random.normal([3])),
    ),
    "checked numbers": (
        False,
        assigned(lambda data, same: tf.debugging.check_numerics(same, "weights")),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_queues_tables_and_local_variables(name: str) -> None:
    expected, update = STATES[name]
    assert varies(update) == expected


@pytest.mark.parametrize("first", [1.0, 2.0])
def test_the_initial_value_of_a_local_variable_is_compared(first: float) -> None:
    with tf.Graph().as_default():
        local = v1.get_variable(
            "local", initializer=first, collections=["local_variables"], trainable=False
        )
        weights = v1.get_variable("weights", initializer=1.0)
        updates = read_updates([weights.assign_sub(local).op], set())
    assert updates.texts["local at first"] == f"AssignVariableOp(value={first})"
    assert names(updates.mirrored) == ["local", "weights"]


def test_slots_of_a_variable_that_varies_vary_too() -> None:
    with tf.Graph().as_default():
        data = tf.random.normal([3])
        weights = v1.get_variable("weights", initializer=np.ones(3, "f"), trainable=False)
        slot = v1.get_variable("slot", initializer=np.ones(3, "f"), trainable=False)
        update = tf.raw_ops.ResourceApplyMomentum(
            var=weights.handle, accum=slot.handle, lr=0.1, grad=data, momentum=0.9
        )
        updates = read_updates([update], {data.op})
    assert updates.local >= {"weights", "slot"}
    assert not updates.mirrored
