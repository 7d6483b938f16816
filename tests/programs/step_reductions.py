"""A small regression with all kinds of reductions in its step; the table CASES is at the end.

The same model_fn trains on ranks and in one process, where a reduction returns its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from programs import by_name
from programs.update_kinds import BATCHES, GLOBAL_BATCH, RATE, gradient_descent

import estimator_ext

v1 = tf.compat.v1
train = tf.compat.v1.train
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
RANDOM = np.random.RandomState(0)
DATA = {
    "x": RANDOM.standard_normal((BATCHES, GLOBAL_BATCH, 5)),
    "y": RANDOM.standard_normal((BATCHES, GLOBAL_BATCH, 3)),
    # 1 on the first of two ranks and 2 on the second, in each batch
    "rank": np.repeat([[1.0, 2.0]] * BATCHES, GLOBAL_BATCH // 2, axis=1),
}
WEIGHTS = RANDOM.standard_normal((5, 3))


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Args:
      build: returns the train_op or the spec of a model.
      input_fn: input_fn on ranks and in one process; by default half of each batch, or all of it.
      refused: words of the expected ConfigError; empty for none.
      fields: arguments of the RunConfig on ranks.
      has_losses: True if the reported loss equals the loss of one process.
    """

    name: str
    build: Callable[[Model], Any]
    input_fn: Callable[..., Any] = field(default=by_name.halves(DATA))
    refused: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    has_losses: bool = True


class Model:
    """The regression, in float64 so that rounding hides no error.

    Args:
      rank: this rank, or "alone".
    """

    def __init__(self, features: dict[str, tf.Tensor], rank: int | str) -> None:
        self.features, self.rank = features, rank
        self.x, self.y = features["x"], features["y"]
        self.weights = v1.get_variable("weights", initializer=WEIGHTS)
        self.step = train.get_global_step()
        self.out = self.x @ self.weights
        self.loss = self.loss_of(self.out)

    def loss_of(self, out: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.reduce_sum((out - self.y) ** 2, 1))

    def minimize(self, loss: tf.Tensor | None = None, **kwargs: Any) -> tf.Operation:
        loss = self.loss if loss is None else loss
        return gradient_descent().minimize(loss, self.step, **kwargs)

    def note(self, name: str, value: tf.Tensor) -> tf.Operation:
        """Assigns a tensor to a variable, which the test compares."""
        initial = np.zeros(value.shape.as_list(), value.dtype.as_numpy_dtype)
        kept = v1.get_variable(name, initializer=initial, trainable=False)
        return kept.assign(value, read_value=False)


def all_reduce(op: Any, value: Any) -> Any:
    return tf.distribute.get_replica_context().all_reduce(op, value)


def reduce(op: Any, value: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().merge_call(
        lambda strategy, value: strategy.reduce(op, value, axis=None), args=(value,)
    )


REDUCE = {"all_reduce": all_reduce, "strategy.reduce": reduce}


def spec(loss: tf.Tensor, train_op: Any, **hooks: Any) -> Any:
    return tf.estimator.EstimatorSpec("train", loss=loss, train_op=train_op, **hooks)


# -- no gradients --------------------------------------------------------------------------


def uneven(input_context: Any = None) -> tf.data.Dataset:
    """Batches of 8 rows: 6 for rank 0 and 2 for rank 1. The data end after 4 steps."""
    rows = slice(0, 8)
    if input_context is not None:
        rows = [slice(0, 6), slice(6, 8)][input_context.input_pipeline_id]
    parts = {name: array[:, rows] for name, array in DATA.items()}
    return tf.data.Dataset.from_tensor_slices(parts)


def number_of_examples(model: Model) -> Any:
    """Before and after the optimizer, which scales the loss."""
    count = tf.shape(model.x)[0]
    before = all_reduce(SUM, [count, tf.cast(count, tf.float64)])
    train_op = model.minimize()
    after = all_reduce(SUM, [count, tf.cast(count, tf.float64)])
    names = ["int_before", "float_before", "int_after", "float_after"]
    return tf.group(train_op, *map(model.note, names, [*before, *after]))


def infinite(model: Model) -> Any:
    lowest = tf.where(model.x[0, 0] > 1e9, 1.0, -np.inf)
    result = all_reduce(MEAN, lowest)
    return tf.group(model.minimize(), model.note("lowest", result))


def micro_batches(input_context: Any = None) -> tf.data.Dataset:
    """One process merges two batches."""
    if input_context is not None:
        return by_name.halves(DATA)(input_context)
    pairs = {
        name: array.reshape(BATCHES // 2, 2 * GLOBAL_BATCH, *array.shape[2:])
        for name, array in DATA.items()
    }
    return tf.data.Dataset.from_tensor_slices(pairs).repeat()


def accumulated(model: Model) -> Any:
    """The factor is 1.5 in each micro-batch; a single rank would compute a different one."""
    return model.minimize(model.loss * all_reduce(MEAN, tf.reduce_mean(model.features["rank"])))


def micro_batches_that_end(input_context: Any = None) -> tf.data.Dataset:
    return micro_batches(input_context).take(BATCHES * (1 if input_context is None else 2))


def accumulated_beside_gradients(model: Model) -> Any:
    """The factor, which each micro-batch needs, could travel with gradients of the other loss."""
    other = v1.get_variable("other", initializer=WEIGHTS)
    first = gradient_descent().minimize(model.loss_of(model.x @ other), var_list=[other])
    factor = all_reduce(MEAN, tf.reduce_mean(model.features["rank"]))
    return tf.group(first, model.minimize(model.loss * factor, var_list=[model.weights]))


def sparse(model: Model) -> Any:
    """Reduces slices by hand, which differ between ranks."""
    ids = tf.cast(2 * model.features["rank"], tf.int32)  # 2 on rank 0, 4 on rank 1
    values = tf.reduce_sum(model.x, 1, keepdims=True) * tf.ones([1, 3], tf.float64)
    slices = tf.IndexedSlices(values, ids, tf.constant([5, 3]))
    total = tf.convert_to_tensor(all_reduce(SUM, slices))
    return tf.group(model.minimize(), model.note("total", tf.ensure_shape(total, [5, 3])))


# -- gradients through reductions -----------------------------------------------------------


def through_a_sum(how: str) -> Callable[[Model], Any]:
    def build(model: Model) -> Any:
        total = REDUCE[how](SUM, tf.reduce_sum(model.out))
        return model.minimize(model.loss + 1e-4 * (total - 1) ** 2)

    return build


def through_a_sum_by_hand(model: Model) -> Any:
    """Gradients of an unscaled loss, which are reduced when they are computed."""
    total = all_reduce(SUM, tf.reduce_sum(model.out))
    loss = model.loss + 1e-4 * (total - 1) ** 2
    (gradient,) = tf.gradients(loss, [model.weights])
    return tf.group(model.weights.assign_sub(RATE * gradient), model.step.assign_add(1))


def through_a_mean(how: str) -> Callable[[Model], Any]:
    """The gradient of the value also differs between ranks."""

    def build(model: Model) -> Any:
        mean = REDUCE[how](MEAN, tf.reduce_mean(model.out))
        return model.minimize(model.loss_of(model.out - 3 * mean))

    return build


def through_two(model: Model) -> Any:
    """Normalisation by moments of the global batch; the second moment depends on the first."""
    mean = reduce(MEAN, tf.reduce_mean(model.out, 0))
    variance = reduce(MEAN, tf.reduce_mean((model.out - mean) ** 2, 0))
    return model.minimize(model.loss_of((model.out - mean) / tf.sqrt(variance + 1e-3)))


def through_a_tape(model: Model) -> Any:
    with tf.GradientTape() as tape:
        mean = reduce(MEAN, tf.reduce_mean(model.x @ model.weights))
        loss = model.loss_of(model.x @ model.weights - 3 * mean)
    (gradient,) = tape.gradient(loss, [model.weights])
    change = RATE * all_reduce(MEAN, gradient)
    return tf.group(model.weights.assign_sub(change), model.step.assign_add(1))


def through_a_gradient(model: Model) -> Any:
    pairs = gradient_descent().compute_gradients(model.loss)
    if model.rank == "alone":
        ((gradient, _),) = pairs
    else:
        ((gradient, _),) = estimator_ext.reduce_gradients(pairs)
    return model.minimize(model.loss + tf.reduce_sum(gradient**2))


# -- values that the graph shows as the same ------------------------------------------------


def constant_of_a_rank(how: str) -> Callable[[Model], Any]:
    """A Python number like len(local_data): 1 on rank 0 and 2 on rank 1."""

    def build(model: Model) -> Any:
        own = 1.5 if model.rank == "alone" else 1.0 + model.rank
        return model.minimize(model.loss * REDUCE[how](MEAN, tf.constant(own, tf.float64)))

    return build


def attribute_of_a_rank(model: Model) -> Any:
    """The difference is visible in an attribute, but not in a constant."""
    slope = 0.375 if model.rank == "alone" else 0.25 * (1.0 + model.rank)
    value = tf.nn.leaky_relu(-tf.abs(model.weights), slope)
    return model.minimize(model.loss * -tf.reduce_sum(reduce(MEAN, value)))


# -- branches ------------------------------------------------------------------------------


def skipping(choose: Callable[[Model, tf.Tensor], tf.Tensor]) -> Callable[[Model], Any]:
    """The optimizer is called in a branch."""

    def build(model: Model) -> Any:
        optimizer = gradient_descent()
        pairs = optimizer.compute_gradients(model.loss)
        own = DATA["x"][[1, 2], [0, 6], 0]  # on rank 0 in step 1, on rank 1 in step 2
        skips = choose(model, tf.reduce_any(tf.equal(model.x[:1, 0], own)))
        if model.rank == "alone":
            skips = tf.reduce_any(tf.equal(model.x[:, :1], own))
        return tf.cond(
            skips,
            lambda: tf.group(model.step.assign_add(1)),
            lambda: tf.group(optimizer.apply_gradients(pairs, model.step)),
        )

    return build


def chosen_by_all(model: Model, skips: tf.Tensor) -> tf.Tensor:
    return all_reduce(SUM, tf.cast(skips, tf.int32)) > 0


def reduced_in_a_loop(count: Callable[[Model], tf.Tensor]) -> Callable[[Model], Any]:
    def build(model: Model) -> Any:
        def body(i: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return i + 1, all_reduce(MEAN, value + tf.reduce_mean(model.x))

        zero = tf.constant(0.0, tf.float64)
        _, value = tf.while_loop(lambda i, _: i < count(model), body, [tf.constant(0), zero])
        return tf.group(model.minimize(), model.note("value", tf.ensure_shape(value, [])))

    return build


def count_of_data(model: Model) -> tf.Tensor:
    return tf.cast(model.x[0, 0] > 0, tf.int32) + 1


def with_control_flow_v1(build: Callable[[Model], Any]) -> Callable[[Model], Any]:
    """Branches and loops are operations of the graph itself, not functions."""

    def built(model: Model) -> Any:
        v1.disable_control_flow_v2()
        try:
            return build(model)
        finally:
            v1.enable_control_flow_v2()

    return built


def used_within_a_loop(model: Model) -> Any:
    """The second reduction depends on the first only through the body of a loop."""
    first = all_reduce(MEAN, tf.reduce_mean(model.x))
    zero = tf.constant(0.0, tf.float64)
    _, total = tf.while_loop(
        lambda i, _: i < 3, lambda i, total: (i + 1, total + first), [tf.constant(0), zero]
    )
    second = all_reduce(MEAN, total * tf.reduce_mean(model.y))
    return tf.group(model.minimize(), model.note("first", first), model.note("second", second))


# -- the loss ------------------------------------------------------------------------------


def reduced_loss(model: Model) -> Any:
    return spec(all_reduce(MEAN, model.loss), model.minimize())


def loss_after_the_step(model: Model) -> Any:
    train_op = model.minimize()
    with tf.control_dependencies([train_op]):
        return spec(tf.identity(model.loss), train_op)


def posted_loss(model: Model) -> Any:
    """Starts the reduction of a float32, and reads it after the last exchange."""
    train_op = model.minimize()
    with tf.control_dependencies([train_op]):
        return spec(tf.cast(model.loss, tf.float32), train_op)


def loss_of_unknown_shape(shape: list[int]) -> Callable[[Model], Any]:
    def build(model: Model) -> Any:
        train_op = model.minimize()
        loss = tf.reshape(
            model.loss, v1.placeholder_with_default(np.array(shape, np.int32), [None])
        )
        assert loss.shape.rank is None
        return spec(loss, train_op)

    return build


def without_optimizations() -> v1.ConfigProto:
    """A session without Grappler, which would remove the shape checks of the program."""
    config = v1.ConfigProto(allow_soft_placement=True)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


# -- hooks ---------------------------------------------------------------------------------


class Fetches(tf.estimator.SessionRunHook):
    """Fetches tensors in every step or in some steps."""

    def __init__(self, tensors: Any, every: int = 1) -> None:
        self._tensors, self._every, self._calls = tensors, every, 0

    def before_run(self, run_context: Any) -> Any:
        self._calls += 1
        if self._calls % self._every:
            return None
        return tf.estimator.SessionRunArgs(self._tensors)


class RunsByItself(tf.estimator.SessionRunHook):
    """Runs operations after each step, in a separate session run."""

    def __init__(self, fetches: Any) -> None:
        self._fetches = fetches

    def after_run(self, run_context: Any, run_values: Any) -> None:
        run_context.session.run(self._fetches)


def fetched_by_the_chief(shape: list[int | None]) -> Callable[[Model], Any]:
    def build(model: Model) -> Any:
        rows = tf.reduce_mean(model.x, 1)[:3]
        rows = v1.placeholder_with_default(rows, shape)
        result = [all_reduce(MEAN, rows), reduce(SUM, tf.reduce_sum(model.y) + rows)]
        return spec(model.loss, model.minimize(), training_chief_hooks=[Fetches(result)])

    return build


def fetched_at_other_steps(model: Model) -> Any:
    """Like every_n_secs: each rank uses its own clock."""
    result = all_reduce(MEAN, tf.reduce_mean(model.x))
    every = 1 if model.rank == "alone" else 1 + model.rank
    return spec(model.loss, model.minimize(), training_hooks=[Fetches(result, every)])


def summary_of_one_rank(model: Model) -> Any:
    result = all_reduce(MEAN, tf.reduce_mean(model.x))
    if model.rank in (0, "alone"):
        v1.summary.scalar("found", result)
    return model.minimize()


def run_by_a_hook(model: Model) -> Any:
    """A separate run whose value needs no data does not consume a batch of the training."""
    kept = v1.get_variable("kept", initializer=np.float64(2.0), trainable=False)
    result = reduce(SUM, tf.reduce_sum(model.weights) + kept * 3)
    reduced_data = reduce(SUM, tf.reduce_sum(model.x))
    del reduced_data  # not fetched
    return spec(model.loss, model.minimize(), training_hooks=[RunsByItself(result)])


def changed_by_a_hook(model: Model) -> Any:
    """A variable that only a hook updates does not change in every step."""
    counter = v1.get_variable("counter", initializer=np.float64(0), trainable=False)
    with tf.control_dependencies([counter.assign_add(1.0)]):
        result = reduce(SUM, tf.reduce_sum(model.weights))
    total = v1.get_variable("runs", initializer=np.float64(0), trainable=False)
    run = tf.group(result, total.assign_add(1.0))
    return spec(model.loss, model.minimize(), training_hooks=[RunsByItself(run)])


TWO = {"accumulate_steps": 2}
ENDLESS, DIFFERS, MAY_DIFFER = "Make the data endless", "differs by rank", "may differ by rank"
SKIPPED_BY_SOME, SKIPPED_BY_ALL = skipping(lambda _, skips: skips), skipping(chosen_by_all)
LOOP_OF_DATA = reduced_in_a_loop(count_of_data)

CASES = [
    Case("number of examples", number_of_examples, uneven),
    Case("infinite", infinite),
    Case("accumulated", accumulated, micro_batches, fields=TWO),
    Case("accumulated beside gradients", accumulated_beside_gradients, micro_batches, fields=TWO),
    Case("accumulated, data that end", accumulated, micro_batches_that_end, ENDLESS, TWO),
    Case("sparse", sparse),
    *(Case(f"through a sum, {how}", through_a_sum(how)) for how in REDUCE),
    *(Case(f"through a mean, {how}", through_a_mean(how)) for how in REDUCE),
    Case("through two", through_two),
    *(Case(f"through a sum, uneven, {how}", through_a_sum(how), uneven) for how in REDUCE),
    Case("through a sum, uneven, own optimizer", through_a_sum_by_hand, uneven),
    # the sum if no optimizer scales the loss, as with stock classes
    Case("through a tape", through_a_tape, has_losses=False),
    Case("through a gradient", through_a_gradient, refused="Differentiate before reducing"),
    *(Case(f"constant of a rank, {how}", constant_of_a_rank(how)) for how in REDUCE),
    Case("attribute of a rank", attribute_of_a_rank),
    Case("loop", reduced_in_a_loop(lambda _: tf.constant(3))),
    Case("loop, control flow v1", with_control_flow_v1(reduced_in_a_loop(lambda _: 3))),
    *(
        Case(f"{name}{ending}", wrap(build), refused=refused)
        for name, build, refused in (
            ("skipped by some", SKIPPED_BY_SOME, DIFFERS),
            ("skipped by all", SKIPPED_BY_ALL, ""),
            ("loop of data", LOOP_OF_DATA, MAY_DIFFER),
            ("used within a loop", used_within_a_loop, ""),
        )
        for ending, wrap in (
            ("", lambda build: build),
            (", control flow v1", with_control_flow_v1),
        )
    ),
    Case("reduced loss", reduced_loss),
    Case("posted loss", posted_loss),
    Case("loss after the step", loss_after_the_step),
    # its summary also fails in one process
    Case(
        "loss of one element",
        loss_of_unknown_shape([1]),
        fields={"session_config": without_optimizations()},
        has_losses=False,
    ),
    Case("scalar loss of unknown shape", loss_of_unknown_shape([])),
    Case("fetched by the chief", fetched_by_the_chief([3])),
    Case("fetched by the chief, of unknown shape", fetched_by_the_chief([None])),
    Case("fetched at other steps", fetched_at_other_steps),
    Case("summary of one rank", summary_of_one_rank),
    Case("run by a hook", run_by_a_hook),
    Case("changed by a hook", changed_by_a_hook),
]
BY_NAME = {case.name: case for case in CASES}


def train_case(case: Case, training: by_name.Training) -> None:
    def model_fn(features: Any, mode: str) -> Any:
        model = Model(features, training.rank)
        built = case.build(model)
        return built if hasattr(built, "train_op") else spec(model.loss, built)

    fields = {} if training.strategy is None else case.fields
    every = 1 if case.has_losses else None
    training.train(model_fn, case.input_fn, save_summary_steps=every, **fields)


if __name__ == "__main__":
    by_name.train_table(train_case, CASES)
