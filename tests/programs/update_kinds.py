"""A small regression, trained by every kind of update; the table KINDS is at the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from programs import by_name, session_hooks

import estimator_ext

v1 = tf.compat.v1
train = tf.compat.v1.train
legacy = tf.keras.optimizers.legacy
GLOBAL_BATCH, BATCHES, IDS = 12, 4, 10
RATE = 0.05
NORM = 10.0  # clips the gradients of some steps, so that a wrong factor becomes visible
RANDOM = np.random.RandomState(0)
DATA = {
    "x": RANDOM.standard_normal((BATCHES, GLOBAL_BATCH, 5)),
    "ids": RANDOM.randint(0, IDS, (BATCHES, GLOBAL_BATCH, 2)),  # with duplicates
    "y": RANDOM.standard_normal((BATCHES, GLOBAL_BATCH, 3)),
}
START = {
    "weights": RANDOM.standard_normal((5, 3)),
    "bias": RANDOM.standard_normal(3),
    "table": RANDOM.standard_normal((IDS, 3)),
}


@dataclass(frozen=True)
class Kind:
    """One row of the table.

    Args:
      expected: result of two ranks. "mean": the same bits, equal to one process on the full
        batch. "sum": equal to one process whose loss is multiplied by the number of ranks.
        "alike": the same bits, but not those of one process; see the note. "refused: WORD;
        WORD": a ConfigError before the first step, with these words. "mismatch": an error after
        the first step, because the ranks differ; "late mismatch": an error at the end. "|"
        separates alternatives.
      build: returns the train_op or the spec of a model.
      note: reason if the result is neither "mean" nor "refused".
      sparse: adds an embedding with a sparse gradient.
      per_rank: names of variables that may differ between ranks.
    """

    name: str
    expected: str
    build: Callable[[Model], Any]
    note: str = ""
    sparse: bool = False
    per_rank: Sequence[str] = ()
    dtype: str = "float64"
    options: Mapping[str, Any] = field(default_factory=dict)


class Model:
    """The regression. It uses float64 if the optimizer can, so that rounding hides no error.

    Args:
      alone: True in one process on the full batch.
    """

    def __init__(self, features: dict[str, tf.Tensor], kind: Kind, alone: bool) -> None:
        self.alone, self.ids = alone, features["ids"]
        self.x, self._y = (tf.cast(features[name], kind.dtype) for name in ("x", "y"))
        self.factor = 2.0 if alone and kind.expected == "sum" else 1.0
        names = ["weights", "bias"] + ["table"] * kind.sparse
        resource = not kind.name.endswith("reference variables")
        self.variables = [
            v1.get_variable(
                name, initializer=START[name].astype(kind.dtype), use_resource=resource
            )
            for name in names
        ]
        self.step = train.get_global_step()
        self.out = self.predict()
        self.loss = self.loss_of(self.out)
        v1.add_to_collection("loss", self.loss)

    def predict(self) -> tf.Tensor:
        out = self.x @ self.variables[0] + self.variables[1]
        for table in self.variables[2:]:
            out += tf.reduce_sum(tf.nn.embedding_lookup(table, self.ids), 1)
        return out

    def loss_of(self, out: tf.Tensor) -> tf.Tensor:
        return self.factor * tf.reduce_mean(tf.reduce_sum((out - self._y) ** 2, 1))

    def new_loss(self) -> tf.Tensor:
        """Computes the loss again, for a tape."""
        return self.loss_of(self.predict())

    def gradients(self) -> list[Any]:
        return tf.gradients(self.loss, self.variables)

    def pairs(self) -> list[tuple[Any, tf.Variable]]:
        return list(zip(self.gradients(), self.variables))

    def counted(self, *updates: Any) -> tf.Operation:
        """Returns a train_op for updates that do not increment the step."""
        with tf.control_dependencies(tf.nest.flatten(updates)):
            return self.step.assign_add(1).op

    def zeros_like(self, variable: tf.Variable, name: str) -> tf.Variable:
        initial = np.zeros(variable.shape.as_list())
        name = f"{variable.op.name}/{name}"
        return v1.get_variable(name, initializer=initial, trainable=False)


# -- optimizers as others write them ---------------------------------------------------------


class Own(train.Optimizer):
    """Overrides apply_gradients and creates its own slots."""

    def __init__(self, momentum: float = 0.0) -> None:
        super().__init__(False, "Own")
        self._momentum = momentum

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None):
        updates = []
        for gradient, variable in grads_and_vars:
            change = RATE * tf.convert_to_tensor(gradient)
            if self._momentum:
                name, zeros = f"{variable.op.name}/m", np.zeros(variable.shape.as_list())
                slot = v1.get_variable(name, initializer=zeros, trainable=False)
                change += self._momentum * slot
                updates.append(slot.assign(change))
            updates.append(variable.assign(variable - change))
        return tf.group(*updates, global_step.assign_add(1))


def clipped(pairs: Iterable[tuple[Any, tf.Variable]]) -> list[tuple[Any, tf.Variable]]:
    gradients, variables = zip(*pairs)
    gradients, _ = tf.clip_by_global_norm(gradients, NORM)
    return list(zip(gradients, variables))


class ClipsAndCallsSuper(train.GradientDescentOptimizer):
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None):
        return super().apply_gradients(clipped(grads_and_vars), global_step, name)


class ScalesAndCallsSuper(train.GradientDescentOptimizer):
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None):
        pairs = [(2.0 * gradient, variable) for gradient, variable in grads_and_vars]
        return super().apply_gradients(pairs, global_step, name)


class Sign(train.GradientDescentOptimizer):
    """Overrides only the methods that apply one gradient."""

    def _resource_apply_dense(self, grad: tf.Tensor, handle: Any) -> tf.Operation:
        return handle.assign_sub(RATE * tf.sign(grad))


class Wrapper(train.Optimizer):
    """Delegates everything to another optimizer."""

    def __init__(self, inner: train.Optimizer) -> None:
        super().__init__(False, type(self).__name__)
        self.inner = inner

    def compute_gradients(self, loss: tf.Tensor, *args: Any, **kwargs: Any):
        return self.inner.compute_gradients(loss, *args, **kwargs)

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None):
        return self.inner.apply_gradients(grads_and_vars, global_step, name)


class Clipping(Wrapper):
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None):
        return self.inner.apply_gradients(clipped(grads_and_vars), global_step, name)


class ClippingInCompute(Wrapper):
    def compute_gradients(self, loss: tf.Tensor, *args: Any, **kwargs: Any):
        return clipped(self.inner.compute_gradients(loss, *args, **kwargs))


class MovingAverage(Wrapper):
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None):
        pairs = list(grads_and_vars)
        with tf.control_dependencies([self.inner.apply_gradients(pairs, global_step, name)]):
            average = tf.train.ExponentialMovingAverage(0.9)
            return average.apply([variable for _, variable in pairs])


class Lookahead(Wrapper):
    """Every second step the weights move halfway from slow weights."""

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None):
        pairs = list(grads_and_vars)
        slow = [v1.Variable(v.initial_value, trainable=False, name="slow") for _, v in pairs]
        with tf.control_dependencies([self.inner.apply_gradients(pairs, global_step, name)]):
            every = tf.cast(tf.equal(global_step.read_value() % 2, 0), tf.float64)
            updates = []
            for behind, (_, variable) in zip(slow, pairs):
                fast = variable.read_value()
                mixed = behind + 0.5 * (fast - behind)
                updates.append(variable.assign(every * mixed + (1 - every) * fast))
                updates.append(behind.assign(every * mixed + (1 - every) * behind))
        return tf.group(updates)


class WeightDecay(train.MomentumOptimizer):
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None):
        pairs = list(grads_and_vars)
        # after the backward pass, which reads the variables themselves if they are references
        with tf.control_dependencies([gradient for gradient, _ in pairs]):
            decays = [variable.assign_sub(0.01 * variable) for _, variable in pairs]
        with tf.control_dependencies(decays):
            return super().apply_gradients(pairs, global_step, name)


def gradient_descent() -> train.Optimizer:
    return train.GradientDescentOptimizer(RATE)


# -- builders --------------------------------------------------------------------------------


def minimize(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[Model], Any]:
    return lambda model: make(*args, **kwargs).minimize(model.loss, model.step)


def apply(
    gradients: Callable[[Model], Any], make: Callable[[], Any] = gradient_descent
) -> Callable[[Model], Any]:
    return lambda model: make().apply_gradients(gradients(model), model.step)


def keras(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[Model], Any]:
    def build(model: Model) -> Any:
        return model.counted(make(*args, **kwargs).get_updates(model.loss, model.variables))

    return build


def keras_apply(model: Model) -> Any:
    return model.counted(legacy.SGD(RATE).apply_gradients(model.pairs()))


def keras_minimize(model: Model) -> Any:
    return model.counted(legacy.SGD(RATE).minimize(model.new_loss, model.variables))


def by_hand(update: Callable[[tf.Variable, Any], Any]) -> Callable[[Model], Any]:
    return lambda model: model.counted([update(v, g) for g, v in model.pairs()])


def without_gradient(update: Callable[[Model], Any]) -> Callable[[Model], Any]:
    """A normal step, and another update of the weights."""

    def build(model: Model) -> Any:
        with tf.control_dependencies([gradient_descent().minimize(model.loss, model.step)]):
            return tf.group(update(model))

    return build


def computed(model: Model) -> list[tuple[Any, tf.Variable]]:
    return gradient_descent().compute_gradients(model.loss, model.variables)


def with_rows_clipped(pairs: list[tuple[Any, tf.Variable]]) -> list[tuple[Any, tf.Variable]]:
    """Clips each row of a sparse gradient by its norm, which is too large for some rows."""
    *dense, (rows, table) = pairs
    norms = tf.norm(rows.values, axis=1, keepdims=True)
    values = rows.values * tf.minimum(tf.ones_like(norms), 0.1 / tf.maximum(norms, 1e-9))
    return [*dense, (tf.IndexedSlices(values, rows.indices, rows.dense_shape), table)]


def with_mean_of_rows(pairs: list[tuple[Any, tf.Variable]]) -> list[tuple[Any, tf.Variable]]:
    """Averages the rows of each index."""
    *dense, (rows, table) = pairs
    mean = tf.math.unsorted_segment_mean(rows.values, rows.indices, table.shape[0])
    return [*dense, (mean, table)]


def taped(model: Model) -> list[tuple[Any, tf.Variable]]:
    with tf.GradientTape() as tape:
        loss = model.new_loss()
    return list(zip(tape.gradient(loss, model.variables), model.variables))


def subtract(pairs: list[tuple[Any, tf.Variable]]) -> list[tf.Operation]:
    return [v.assign_sub(RATE * tf.convert_to_tensor(g), read_value=False) for g, v in pairs]


def raw_adam(variable: tf.Variable, gradient: tf.Tensor) -> tf.Operation:
    m, v = (
        v1.get_variable(
            f"{variable.op.name}/{name}",
            initializer=np.zeros(variable.shape.as_list()),
            trainable=False,
            use_resource=True,
        )
        for name in ("m", "v")
    )
    numbers = {"beta1_power": 0.9, "beta2_power": 0.99, "lr": RATE, "beta1": 0.9, "beta2": 0.99}
    numbers = {name: tf.constant(value, tf.float64) for name, value in numbers.items()}
    return tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=m.handle,
        v=v.handle,
        epsilon=tf.constant(1e-8, tf.float64),
        grad=gradient,
        **numbers,
    )


def raw_descent(variable: tf.Variable, gradient: tf.Tensor) -> tf.Operation:
    rate = tf.constant(RATE, tf.float64)
    return tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)


def scatter_sub(variable: tf.Variable, gradient: Any) -> tf.Operation:
    if not isinstance(gradient, tf.IndexedSlices):
        return variable.assign_sub(RATE * gradient, read_value=False)
    rows = tf.IndexedSlices(RATE * gradient.values, gradient.indices, gradient.dense_shape)
    return variable.scatter_sub(rows)


def raw_sparse_adagrad(variable: tf.Variable, gradient: Any) -> tf.Operation:
    if not isinstance(gradient, tf.IndexedSlices):
        return variable.assign_sub(RATE * gradient, read_value=False)
    name = f"{variable.op.name}/accumulator"
    accumulator = v1.get_variable(
        name, initializer=np.ones((IDS, 3)), trainable=False, use_resource=True
    )
    # adds up duplicate rows first, as optimizers do; otherwise they would be squared separately
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.raw_ops.ResourceSparseApplyAdagrad(
        var=variable.handle,
        accum=accumulator.handle,
        lr=tf.constant(RATE, tf.float64),
        grad=values,
        indices=rows,
    )


def assign_slices(variable: tf.Variable, gradient: tf.Tensor) -> tf.Operation:
    return variable[:].assign(variable - RATE * gradient).op


def sync_replicas(model: Model) -> Any:
    """Without the thread of its queue runner, which blocks the end of a session for 120 s."""
    optimizer = train.SyncReplicasOptimizer(gradient_descent(), 1, 1)
    train_op = optimizer.minimize(model.loss, model.step)
    return tf.group(train_op, *optimizer.get_chief_queue_runner().enqueue_ops)


def spec(model: Model, train_op: Any, **fields: Any) -> Any:
    return tf.estimator.EstimatorSpec("train", loss=model.loss, train_op=train_op, **fields)


def two_optimizers(model: Model) -> Any:
    """Like a GAN: each optimizer has its own loss and variables."""
    weights, bias = model.variables
    first = gradient_descent().minimize(model.loss, model.step, [weights])
    other = tf.reduce_mean(tf.abs(model.out))
    return tf.group(first, train.AdamOptimizer(RATE).minimize(other, var_list=[bias]))


def accumulated(compute: Any, apply: Any) -> Callable[[Model], Any]:
    """Accumulates gradients, and applies and clears them every second step, in a branch."""

    def build(model: Model) -> Any:
        pairs = compute(model)
        sums = [model.zeros_like(v, "sum") for v in model.variables]
        added = [s.assign_add(g) for s, (g, _) in zip(sums, pairs)]
        step = tf.identity(model.step)

        def update() -> tf.Operation:
            values = [s.read_value() for s in sums]
            with tf.control_dependencies([tf.group(apply(list(zip(values, model.variables))))]):
                return tf.group([s.assign(tf.zeros_like(s)) for s in sums])

        with tf.control_dependencies(added):
            return model.counted(tf.cond(tf.equal(step % 2, 1), update, tf.no_op))

    return build


def of_any_shape(build: Callable[[Model], Any]) -> Callable[[Model], Any]:
    """Gradients of a tape have no static shape if the data have none."""

    def with_unknown_shape(model: Model) -> Any:
        model.x = v1.placeholder_with_default(model.x, [None, None])
        return build(model)

    return with_unknown_shape


def gradient_penalty(model: Model) -> Any:
    slopes = tf.gradients(tf.reduce_sum(tf.tanh(model.out)), model.x)[0]
    penalty = tf.reduce_mean(tf.reduce_sum(slopes**2, 1))
    return gradient_descent().minimize(model.loss + penalty, model.step)


def penalty_on_weights(model: Model) -> Any:
    penalty = tf.add_n([tf.reduce_sum(gradient**2) for gradient in model.gradients()])
    return gradient_descent().minimize(model.loss + 0.01 * penalty, model.step)


def in_cond(model: Model) -> Any:
    gradients, step = model.gradients(), tf.identity(model.step)
    update = lambda: tf.group(subtract(list(zip(gradients, model.variables))))  # noqa: E731
    return model.counted(tf.cond(step > 0, update, tf.no_op))


def gradients_in_cond(model: Model) -> Any:
    def update() -> tf.Operation:
        gradients = tf.gradients(model.new_loss(), model.variables)
        return tf.group(subtract(list(zip(gradients, model.variables))))

    return model.counted(tf.cond(tf.identity(model.step) > 0, update, tf.no_op))


def in_while_loop(model: Model) -> Any:
    gradients = [0.5 * gradient for gradient in model.gradients()]

    def body(i: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies(subtract(list(zip(gradients, model.variables)))):
            return i + 1

    return model.counted(tf.while_loop(lambda i: i < 2, body, [tf.constant(0)]))


def in_function(model: Model) -> Any:
    @tf.function(autograph=False)
    def update(*gradients: tf.Tensor) -> tf.Tensor:
        subtract(list(zip(gradients, model.variables)))
        return tf.constant(0)

    return model.counted(update(*model.gradients()))


def step_in_function(model: Model) -> Any:
    """Forward, backward and update like in a training loop of TensorFlow 2."""

    @tf.function(autograph=False)
    def train_step() -> tf.Tensor:
        subtract(taped(model))
        return tf.constant(0)

    return model.counted(train_step())


def in_a_hook(model: Model) -> Any:
    """The train_op increments the step, and a hook runs the update."""
    updates = subtract(model.pairs())

    class Update(tf.estimator.SessionRunHook):
        def before_run(self, run_context: Any) -> Any:
            return tf.estimator.SessionRunArgs(updates)

    return spec(model, model.counted(), training_hooks=[Update()])


def surrogate(model: Model) -> Any:
    """A loss whose gradient was computed earlier."""
    terms = [tf.reduce_sum(tf.stop_gradient(g) * v) for g, v in model.pairs()]
    return gradient_descent().minimize(tf.add_n(terms), model.step)


def straight_through(model: Model) -> Any:
    rounded = model.out + tf.stop_gradient(tf.round(model.out) - model.out)
    return gradient_descent().minimize(model.loss_of(rounded), model.step)


def loss_scale(model: Model) -> Any:
    optimizer = estimator_ext.LossScaleOptimizer(gradient_descent(), 2.0**10, 2)
    return optimizer.minimize(model.loss, model.step)


def on_host(host_model_fn: Callable[..., Any]) -> Callable[[Model], Any]:
    """A spec with a host_call; in one process the operations of its function."""

    def build(model: Model) -> Any:
        gradients = [gradient for gradient, _ in computed(model)]
        if model.alone:
            return model.counted(host_model_fn(model.variables, *gradients))
        call = (lambda *given: host_model_fn(model.variables, *given), gradients)
        return estimator_ext.EstimatorSpec(
            "train", loss=model.loss, train_op=tf.identity(model.loss), host_call=call
        )

    return build


def host_own(variables: Sequence[tf.Variable], *gradients: tf.Tensor) -> Any:
    counter = v1.get_variable("own_steps", initializer=np.int64(0), trainable=False)
    return Own(0.9).apply_gradients(zip(gradients, variables), counter)


def rate_in_a_variable(model: Model) -> Any:
    """The learning rate depends on the loss of the previous step."""
    rate = v1.get_variable("rate", initializer=np.float64(RATE), trainable=False)
    done = train.GradientDescentOptimizer(rate).minimize(model.loss, model.step)
    with tf.control_dependencies([done]):
        return tf.group(rate.assign(RATE / (1 + model.loss)))


def statistics(model: Model) -> Any:
    mean = v1.get_variable("statistics", initializer=np.zeros(5), trainable=False)
    with tf.control_dependencies([mean.assign(tf.reduce_mean(model.x, 0))]):
        return gradient_descent().minimize(model.loss, model.step)


def in_python(model: Model, function: Callable[[np.ndarray], np.ndarray]) -> Any:
    bias = model.variables[1]
    return bias.assign(tf.ensure_shape(tf.numpy_function(function, [bias], tf.float64), [3]))


def batch_mean(model: Model) -> tf.Tensor:
    return tf.tile(tf.reduce_mean(model.x, 0)[:, None], [1, 3])


MEAN = tf.distribute.ReduceOp.MEAN


def reduced_in_merge_call(model: Model) -> tf.Tensor:
    def reduce(strategy: Any, value: tf.Tensor) -> tf.Tensor:
        return strategy.reduce(MEAN, value, axis=None)

    return tf.distribute.get_replica_context().merge_call(reduce, args=(batch_mean(model),))


def reduced_in_replica(model: Model) -> tf.Tensor:
    return tf.distribute.get_replica_context().all_reduce(MEAN, batch_mean(model))


# -- branches, queues, loops, and variables in other collections ------------------------------


def in_branch(model: Model) -> Any:
    """Weight decay in some steps, depending on the first value of this rank's batch."""
    done = gradient_descent().minimize(model.loss, model.step)
    weights = model.variables[0]

    def decay() -> tf.Operation:
        return tf.group(weights.assign(0.9 * weights.read_value(), read_value=False))

    with tf.control_dependencies([done]):
        return tf.cond(model.x[0, 0] > 0, decay, tf.no_op)


def chosen_in_branch(model: Model) -> tf.Tensor:
    """One of two constants."""
    return tf.cond(
        model.x[0, 0] > 0,
        lambda: tf.constant(0.01, tf.float64),
        lambda: tf.constant(0.02, tf.float64),
    )


def in_accumulators(model: Model) -> Any:
    """Gradients go to accumulators; every second step applies their means."""
    accumulators = [
        v1.ConditionalAccumulator(tf.float64, v.shape, name=f"{v.op.name}_gradients")
        for v in model.variables
    ]
    put = [
        accumulator.apply_grad(gradient, local_step=tf.int64.max)
        for accumulator, gradient in zip(accumulators, model.gradients())
    ]
    step = tf.identity(model.step)

    def update() -> tf.Operation:
        gradients = [accumulator.take_grad(1) for accumulator in accumulators]
        return tf.group(subtract(list(zip(gradients, model.variables))))

    with tf.control_dependencies(put):
        return model.counted(tf.cond(tf.equal(step % 2, 1), update, tf.no_op))


def through_queue(model: Model) -> tf.Tensor:
    queue = v1.FIFOQueue(10, [tf.float64], [[5, 3]])
    with tf.control_dependencies([queue.enqueue(batch_mean(model))]):
        return queue.dequeue()


def in_a_late_hook(model: Model) -> Any:
    """A hook adds this rank's data to the weights after the last comparison of the steps."""
    added = model.variables[0].assign_add(batch_mean(model), read_value=False)

    hook = session_hooks.AfterStep(3, lambda context: context.session.run(added))
    return spec(model, gradient_descent().minimize(model.loss, model.step), training_hooks=[hook])


def second_variable(model: Model, **arguments: Any) -> tuple[tf.Variable, tf.Tensor]:
    """Additional weights, and the loss with them."""
    more = v1.get_variable("more", initializer=0.5 * START["weights"], **arguments)
    return more, model.loss_of(model.out + model.x @ more)


def not_trainable(model: Model) -> Any:
    more, loss = second_variable(model, trainable=False)
    optimizer = Own(0.9)
    pairs = optimizer.compute_gradients(loss, [*model.variables, more])
    return optimizer.apply_gradients(pairs, model.step)


def of_frozen_variable(model: Model) -> Any:
    """Updates the weights with the gradient of a variable that is never updated."""
    more, loss = second_variable(model, trainable=False)
    return model.counted(model.variables[0].assign_sub(RATE * tf.gradients(loss, more)[0]))


def out_of_collection(model: Model) -> Any:
    more, loss = second_variable(model)
    v1.get_collection_ref(v1.GraphKeys.TRAINABLE_VARIABLES).remove(more)
    return Own().minimize(loss, model.step, [*model.variables, more])


def local_trainable(model: Model) -> Any:
    """A trainable local variable, with different initial values on rank 1."""
    keys = v1.GraphKeys
    rank = by_name.CONFIG["task"]["index"] if not model.alone else 0
    more = v1.get_variable(
        "more",
        initializer=START["weights"] + rank,
        collections=[keys.LOCAL_VARIABLES, keys.TRAINABLE_VARIABLES],
    )
    loss = model.loss_of(model.out + model.x @ more)
    return gradient_descent().minimize(loss, model.step)


def behind_an_optimizer(model: Model) -> Any:
    """Like a GAN: an update by hand of an unscaled loss, after one of a scaled loss."""
    weights, bias = model.variables
    first = gradient_descent().minimize(model.loss, var_list=[weights])
    with tf.control_dependencies([first]):
        (gradient,) = tf.gradients(tf.reduce_mean(tf.abs(model.new_loss())), [bias])
    return model.counted(bias.assign_sub(RATE * gradient))


def of_reduced_loss(model: Model) -> Any:
    """The loss is already the mean over the ranks, and backward reduces its gradient."""
    loss = model.loss
    if not model.alone:
        loss = tf.distribute.get_replica_context().all_reduce(MEAN, loss)
    return Own().minimize(loss, model.step)


def of_gradient(model: Model) -> Any:
    """A second loss depends on the gradient of a first one, which an optimizer has scaled."""
    slopes = [g for g, _ in computed(model)]
    changes = tf.gradients(
        [tf.reduce_sum(tf.sin(v) * tf.stop_gradient(g)) for g, v in zip(slopes, model.variables)],
        model.variables,
    )
    return model.counted(subtract(list(zip(changes, model.variables))))


def penalty_alone(model: Model) -> Any:
    """A variable whose gradient does not depend on the data."""
    more = v1.get_variable("more", initializer=START["weights"])
    return Own().minimize(model.loss + 0.5 * tf.reduce_sum(more**2), model.step)


def sparse_penalty(model: Model) -> Any:
    """The number of rows of a sparse gradient in the graph."""
    updates = []
    for gradient, variable in model.pairs():
        if isinstance(gradient, tf.IndexedSlices):
            ones = tf.ones([tf.shape(gradient.values)[0], 1], tf.float64)
            rows = tf.IndexedSlices(RATE * gradient.values * ones, gradient.indices)
            updates.append(variable.scatter_sub(rows))
        else:
            updates.append(variable.assign_sub(RATE * gradient))
    return model.counted(updates)


def without_dense_shape(model: Model) -> Any:
    """A lookup whose gradient has no static shape of the table."""
    table, ids = model.variables[2], tf.reshape(model.ids, [-1])

    @tf.custom_gradient
    def looked_up(whole: tf.Tensor) -> Any:
        return tf.gather(whole, ids), lambda rows: tf.IndexedSlices(rows, ids)

    rows = tf.reshape(looked_up(table.read_value()), [-1, 2, 3])
    loss = model.loss_of(model.out + tf.reduce_sum(rows, 1))
    return Own().minimize(loss, model.step)


def in_scope_of_gradients(model: Model) -> Any:
    with tf.name_scope("gradients"):
        pairs = [(tf.clip_by_norm(g, 1.0), v) for g, v in model.pairs()]
    return Own().apply_gradients(pairs, model.step)


def of_loop(model: Model) -> Any:
    """A weight that is used several times."""
    square = v1.get_variable("square", initializer=START["weights"][:3])
    _, state = tf.while_loop(
        lambda i, state: i < 3,
        lambda i, state: (i + 1, tf.tanh(state @ square)),
        [0, model.x[:, :3]],
    )
    return Own().minimize(model.loss + tf.reduce_mean(state**2), model.step)


def local_variable(name: str, initial: Any) -> tf.Variable:
    local = [v1.GraphKeys.LOCAL_VARIABLES]
    return v1.get_variable(name, initializer=initial, trainable=False, collections=local)


def accumulated_in_local_variables(model: Model) -> Any:
    sums = [
        local_variable(f"{v.op.name}_sum", np.zeros(v.shape.as_list())) for v in model.variables
    ]
    with tf.control_dependencies([s.assign_add(g) for s, g in zip(sums, model.gradients())]):
        values = [s.read_value() for s in sums]
    with tf.control_dependencies(subtract(list(zip(values, model.variables)))):
        return model.counted([s.assign(tf.zeros_like(s)) for s in sums])


def rate_of_local_counter(model: Model) -> Any:
    counter = local_variable("counter", np.float64(0))
    with tf.control_dependencies([counter.assign_add(1.0)]):
        rate = RATE / counter.read_value()
    return train.GradientDescentOptimizer(rate).minimize(model.loss, model.step)


def rate_of_local_variable(model: Model) -> Any:
    rate = local_variable("rate", tf.random.uniform([], 0.01, 0.02, tf.float64, seed=os.getpid()))
    return train.GradientDescentOptimizer(rate).minimize(model.loss, model.step)


def loss_of_unknown_shape(model: Model) -> Any:
    model.loss = v1.placeholder_with_default(model.loss, None)
    return gradient_descent().minimize(model.loss, model.step)


def mean_teacher(model: Model) -> Any:
    """Replaces the weights by their moving average after each step."""
    average = tf.train.ExponentialMovingAverage(0.5)
    with tf.control_dependencies([gradient_descent().minimize(model.loss, model.step)]):
        applied = average.apply(model.variables)
    with tf.control_dependencies([applied]):
        return tf.group([v.assign(average.average(v).read_value()) for v in model.variables])


SUMS = "Keras optimizers and gradients of one's own do not scale the loss: the stock sum"
LOCAL = "what stands between compute_gradients and apply_gradients sees this rank's gradients"
OF_PYTHON = "nobody knows what Python does"
OF_BRANCH = "the ranks take different branches"
OF_DATA = "a local batch went into the weights without a gradient"

KINDS = [
    # optimizers of tf.compat.v1.train
    Kind("gradient descent", "mean", minimize(gradient_descent)),
    Kind("momentum", "mean", minimize(train.MomentumOptimizer, RATE, 0.9)),
    Kind("nesterov", "mean", minimize(train.MomentumOptimizer, RATE, 0.9, use_nesterov=True)),
    Kind("adam", "mean", minimize(train.AdamOptimizer, RATE)),
    Kind("adagrad", "mean", minimize(train.AdagradOptimizer, RATE)),
    Kind("adagrad da", "mean",
        minimize(lambda: train.AdagradDAOptimizer(RATE, train.get_global_step()))),
    Kind("adadelta", "mean", minimize(train.AdadeltaOptimizer, 1.0)),
    Kind("rmsprop", "mean", minimize(train.RMSPropOptimizer, RATE)),
    Kind("rmsprop, centered", "mean",
        minimize(train.RMSPropOptimizer, RATE, momentum=0.5, centered=True)),
    Kind("ftrl", "mean", minimize(train.FtrlOptimizer, RATE, -0.5, 0.1, 0.1)),
    Kind("proximal gradient descent", "mean",
        minimize(train.ProximalGradientDescentOptimizer, RATE, 0.1), dtype="float32"),
    Kind("proximal adagrad", "mean",
        minimize(train.ProximalAdagradOptimizer, RATE, l2_regularization_strength=0.1),
        dtype="float32"),
    Kind("reference variables", "mean", minimize(train.AdamOptimizer, RATE)),
    Kind("adam, sparse", "mean", minimize(train.AdamOptimizer, RATE), sparse=True),
    Kind("adagrad, sparse", "mean", minimize(train.AdagradOptimizer, RATE), sparse=True),
    Kind("ftrl, sparse", "mean", minimize(train.FtrlOptimizer, RATE), sparse=True),
    Kind("compute and apply", "mean", apply(computed)),
    Kind("sync replicas", "refused: SyncReplicasOptimizer", sync_replicas, "for servers"),
    Kind("two optimizers", "mean", two_optimizers),
    Kind("reduce_gradients, clip, apply", "mean", apply(
        lambda model: clipped(estimator_ext.reduce_gradients(computed(model)))
    )),
    Kind("reduce_gradients, clip, apply, sparse", "mean", apply(
        lambda model: clipped(estimator_ext.reduce_gradients(computed(model)))
    ), sparse=True),
    Kind("reduce_gradients, clip rows, apply, sparse", "mean", apply(
        lambda model: with_rows_clipped(estimator_ext.reduce_gradients(computed(model)))
    ), sparse=True),
    Kind("reduce_gradients, mean of rows, apply, sparse", "mean", apply(
        lambda model: with_mean_of_rows(estimator_ext.reduce_gradients(computed(model)))
    ), sparse=True),
    Kind("own apply_gradients, clipped, sparse", "mean", apply(
        lambda model: clipped(model.pairs()), Own
    ), sparse=True),
    Kind("compute, clip, apply", "alike", apply(lambda model: clipped(computed(model))), LOCAL),
    Kind(
        "compute, add weights, apply",
        "alike",
        apply(lambda model: [(g + 0.1 * v, v) for g, v in computed(model)]),
        LOCAL,
    ),
    Kind("tf.gradients, apply", "sum", apply(Model.pairs), SUMS),
    Kind("tf.gradients, clip, apply", "alike", apply(lambda m: clipped(m.pairs())), LOCAL),
    Kind("tape, apply", "sum", apply(taped), SUMS),
    Kind("tape, apply, data of any shape", "sum", of_any_shape(apply(taped)), SUMS),
    # optimizers of tf.keras.optimizers.legacy
    Kind("keras sgd", "sum", keras(legacy.SGD, RATE), SUMS),
    Kind("keras momentum", "sum", keras(legacy.SGD, RATE, 0.9), SUMS),
    Kind("keras adam", "sum", keras(legacy.Adam, RATE), SUMS),
    Kind("keras amsgrad", "sum", keras(legacy.Adam, RATE, amsgrad=True), SUMS),
    Kind("keras adamax", "sum", keras(legacy.Adamax, RATE), SUMS),
    Kind("keras adagrad", "sum", keras(legacy.Adagrad, RATE), SUMS),
    Kind("keras adadelta", "sum", keras(legacy.Adadelta, 1.0), SUMS),
    Kind("keras rmsprop", "sum", keras(legacy.RMSprop, RATE), SUMS),
    Kind("keras nadam", "sum", keras(legacy.Nadam, RATE), SUMS),
    Kind("keras ftrl", "sum", keras(legacy.Ftrl, RATE), SUMS),
    Kind("keras apply_gradients", "sum", keras_apply, SUMS),
    Kind("keras minimize", "sum", keras_minimize, SUMS),
    # optimizers of other packages
    Kind("own apply_gradients", "mean", minimize(Own)),
    Kind("own apply_gradients, slots", "mean", minimize(Own, 0.9)),
    Kind("own apply_gradients, sparse", "mean", minimize(Own), sparse=True),
    Kind("own apply_gradients of tf.gradients", "mean", apply(Model.pairs, Own)),
    Kind("own apply_gradients, clipped", "mean", apply(lambda m: clipped(m.pairs()), Own)),
    Kind("own apply_gradients of a tape", "mean", apply(taped, Own)),
    Kind("own apply_gradients, wrapped", "mean", minimize(lambda: Wrapper(Own()))),
    Kind("scales and calls super", "mean", minimize(ScalesAndCallsSuper, RATE)),
    Kind("clips and calls super", "alike", minimize(ClipsAndCallsSuper, RATE), LOCAL),
    Kind("own _resource_apply_dense", "mean", minimize(Sign, RATE)),
    Kind("wrapper", "mean", minimize(lambda: Wrapper(gradient_descent()))),
    Kind("clipping wrapper", "alike", minimize(lambda: Clipping(gradient_descent())), LOCAL),
    Kind("clips in compute", "alike",
        minimize(lambda: ClippingInCompute(gradient_descent())), LOCAL),
    Kind("moving average wrapper", "mean", minimize(lambda: MovingAverage(gradient_descent()))),
    Kind("lookahead wrapper", "mean", minimize(lambda: Lookahead(gradient_descent()))),
    Kind("weight decay mixin", "mean", minimize(WeightDecay, RATE, 0.9)),
    Kind("LossScaleOptimizer", "mean", loss_scale),
    # by hand
    Kind("assign_sub", "mean", by_hand(lambda v, g: v.assign_sub(RATE * g))),
    Kind("assign", "mean", by_hand(lambda v, g: v.assign(v - RATE * g))),
    Kind("assign_sub, reference variables", "mean", by_hand(lambda v, g: v.assign_sub(RATE * g))),
    Kind("assign_add", "mean", by_hand(lambda v, g: v.assign_add(-RATE * g))),
    Kind("assign to slices", "mean", by_hand(assign_slices)),
    Kind("tf.compat.v1.assign_sub", "mean", by_hand(lambda v, g: v1.assign_sub(v, RATE * g))),
    Kind("ResourceApplyGradientDescent", "mean", by_hand(raw_descent)),
    Kind("ResourceApplyAdam", "mean", by_hand(raw_adam)),
    Kind("ResourceSparseApplyAdagrad", "mean", by_hand(raw_sparse_adagrad), sparse=True),
    Kind("scatter_sub", "mean", by_hand(scatter_sub), sparse=True),
    Kind("tape, assign_sub", "mean", lambda m: m.counted(subtract(taped(m)))),
    Kind("tape, assign_sub, data of any shape", "mean", of_any_shape(
        lambda m: m.counted(subtract(taped(m)))
    )),
    Kind("compute, assign_sub", "mean", lambda m: m.counted(subtract(computed(m)))),
    Kind("clip, assign_sub", "mean", lambda m: m.counted(subtract(clipped(m.pairs())))),
    Kind("accumulated", "mean", accumulated(Model.pairs, subtract)),
    Kind("accumulated for an optimizer", "mean", accumulated(
        computed, lambda pairs: gradient_descent().apply_gradients(pairs)
    )),
    Kind("gradient penalty", "mean", gradient_penalty),
    Kind("penalty on the gradient of weights", "alike", penalty_on_weights, LOCAL),
    Kind("in cond", "mean", in_cond),
    Kind("gradients in cond", "mean|refused: cond; outside of the branch", gradients_in_cond),
    Kind("in while_loop", "mean", in_while_loop),
    Kind("in tf.function", "mean|refused: Call", in_function),
    Kind("all in tf.function", "mean|refused: Call", step_in_function),
    Kind("in a hook", "mean|mismatch|refused: AssignSubVariableOp", in_a_hook),
    Kind("surrogate loss", "mean", surrogate),
    Kind("straight-through", "mean", straight_through),
    # host_call
    Kind("host_call", "mean", on_host(
        lambda variables, *given: gradient_descent().apply_gradients(zip(given, variables))
    )),
    Kind("host_call, own apply_gradients", "mean", on_host(host_own)),
    Kind("host_call, assign_sub", "mean", on_host(
        lambda variables, *given: tf.group(subtract(list(zip(given, variables))))
    )),
    Kind("host_call, clip by hand", "mean", on_host(
        lambda variables, *given: tf.group(subtract(clipped(list(zip(given, variables)))))
    )),
    # gradients with other names or placements
    Kind("own apply_gradients in a scope named gradients", "mean", in_scope_of_gradients),
    Kind("own apply_gradients of named gradients", "mean", apply(
        lambda m: list(zip(tf.gradients(m.loss, m.variables, name="slopes"), m.variables)), Own
    )),
    Kind("own apply_gradients of a tape, sparse", "mean", apply(taped, Own), sparse=True),
    Kind("own apply_gradients of a loop", "mean", of_loop),
    Kind("own apply_gradients, trainable=False", "mean", not_trainable),
    Kind("gradient of a frozen variable", "mean", of_frozen_variable),
    Kind("own apply_gradients, out of the collection", "mean", out_of_collection),
    Kind("own apply_gradients, penalty alone", "mean", penalty_alone),
    Kind("own apply_gradients, no dense_shape", "mean", without_dense_shape, sparse=True),
    Kind("own apply_gradients, nonfinite=skip", "refused: AssignVariableOp; skip", minimize(Own),
        "nothing leaves its updates out", options={"nonfinite": "skip"}),
    Kind("number of rows by hand", "mean", sparse_penalty, sparse=True),
    Kind("own apply_gradients of a reduced loss", "mean", of_reduced_loss),
    Kind("gradient of a gradient", "mean", of_gradient),
    Kind("assign_sub behind an optimizer", "mean", behind_an_optimizer),
    Kind("in accumulators", "mean", in_accumulators),
    Kind("loss of unknown shape", "mean", loss_of_unknown_shape),
    # local variables
    Kind("accumulated in local variables", "mean", accumulated_in_local_variables),
    Kind("rate of a local counter", "mean", rate_of_local_counter),
    Kind("rate of a local variable",
        "refused: ResourceApplyGradientDescent; 'rate'; initialize that variable",
        rate_of_local_variable, "it begins with random numbers"),
    Kind("trainable local variable", "mean", local_trainable),
    # without data, or with data that are reduced
    Kind("weight decay after the step", "mean", without_gradient(
        lambda model: [v.assign(0.99 * v.read_value()) for v in model.variables]
    )),
    Kind("mean teacher", "mean", mean_teacher),
    Kind("statistics in a variable that is not trained", "mean", statistics,
         per_rank=["statistics"]),
    Kind("strategy.reduce in merge_call", "mean", without_gradient(
        lambda model: model.variables[0].assign_sub(0.01 * reduced_in_merge_call(model))
    )),
    Kind("all_reduce of the replica context", "mean", without_gradient(
        lambda model: model.variables[0].assign_sub(0.01 * reduced_in_replica(model))
    )),
    # programs that cannot be supported
    Kind("mean of the batch", "refused: AssignSubVariableOp; reduce it first", without_gradient(
        lambda model: model.variables[0].assign_sub(0.01 * batch_mean(model))
    ), OF_DATA),
    Kind("branch of the batch", "refused: cond; let the branch depend on", in_branch, OF_BRANCH),
    Kind("constant of a branch", "refused: AssignSub; let the branch depend on", without_gradient(
        lambda model: model.variables[1].assign_sub(chosen_in_branch(model) * tf.ones(3, "double"))
    ), OF_BRANCH),
    Kind("queue", "refused: AssignSubVariableOp; reduce it first", without_gradient(
        lambda model: model.variables[0].assign_sub(0.01 * through_queue(model))
    ), OF_DATA),
    Kind("in a late hook", "late mismatch: weights", in_a_late_hook, OF_DATA),
    Kind("gradient without tf.gradients", "refused: AssignSubVariableOp", without_gradient(
        lambda model: model.variables[0].assign_sub(
            0.01 * tf.transpose(model.x) @ (model.out - model.loss)
        )
    ), OF_DATA),
    Kind("gradient times loss", "refused: AssignSubVariableOp; reduce it first", by_hand(
        lambda v, g: v.assign_sub(0.01 * g * v1.get_collection("loss")[0])
    ), "the loss is that of this rank"),
    Kind("rate of the loss", "refused: ResourceApplyGradientDescent", lambda model: (
        train.GradientDescentOptimizer(RATE / (1 + model.loss)).minimize(model.loss, model.step)
    ), "the loss is that of this rank"),
    Kind("rate in a variable", "refused: ResourceApplyGradientDescent", rate_in_a_variable,
        "the loss is that of this rank"),
    Kind("gradient of the output", "refused: AssignSubVariableOp", without_gradient(
        lambda model: model.variables[0].assign_sub(
            RATE * tf.transpose(model.x) @ tf.gradients(model.loss, model.out)[0]
        )
    ), OF_DATA),
    Kind("Python", "mean|refused: AssignVariableOp", without_gradient(
        lambda model: in_python(model, lambda bias: 0.9 * bias)
    ), OF_PYTHON),
    Kind("Python, another by rank", "mismatch|refused: AssignVariableOp", without_gradient(
        lambda model: in_python(model, lambda bias: bias + os.getpid())
    ), OF_PYTHON),
    Kind("noise, another by rank", "mismatch|refused: AssignAddVariableOp", without_gradient(
        lambda model: model.variables[1].assign_add(
            tf.random.normal([3], seed=os.getpid(), dtype=tf.float64)
        )
    ), "with equal seeds the noise is the same on all ranks"),
]  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS}


def train_kind(kind: Kind, training: by_name.Training) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        model = Model(features, kind, training.strategy is None)
        built = kind.build(model)
        return built if hasattr(built, "train_op") else spec(model, built)

    # saves nothing, as these models have the same initial values anyway
    nothing = {"save_checkpoints_steps": None, "save_checkpoints_secs": None}
    with contextlib.ExitStack() as stack:
        if training.strategy is not None and kind.options:
            training.strategy = by_name.make_strategy(**kind.options)
            stack.callback(training.strategy.close)
        training.train(model_fn, by_name.halves(DATA), save_summary_steps=None, **nothing)


if __name__ == "__main__":
    by_name.train_table(train_kind, KINDS)
