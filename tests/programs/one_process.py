"""Programs that do not know of ranks, built from losses, updates and pipelines.

Ranks train them with the strategy of `python -m estimator_ext`. A program equals one process on
the whole batch, or is refused.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from programs import by_name
from programs.update_kinds import Own, clipped, subtract

from estimator_ext.strategy.strategy import StrategyOfRanks

v1 = tf.compat.v1
train = tf.compat.v1.train
losses = tf.compat.v1.losses
legacy = tf.keras.optimizers.legacy
GLOBAL_BATCH, BATCHES = 12, 4
RATE = 0.01
RANDOM = np.random.RandomState(0)
DATA = {
    "x": RANDOM.standard_normal((BATCHES, GLOBAL_BATCH, 5)),
    "y": RANDOM.standard_normal((BATCHES, GLOBAL_BATCH, 3)),
}
START = {"weights": RANDOM.standard_normal((5, 3)), "bias": RANDOM.standard_normal(3)}


class Model:
    """The regression, in float64 so that rounding hides no error.

    Args:
      batch: number of examples in a batch, which the program knows.
    """

    def __init__(self, features: dict[str, tf.Tensor], batch: int) -> None:
        self.x, self.y = features["x"], features["y"]
        self.batch = batch
        self.variables = [  # which a tape knows without v2 behavior, too
            v1.get_variable(name, initializer=value, use_resource=True)
            for name, value in START.items()
        ]
        self.step = train.get_global_step()

    @property
    def out(self) -> tf.Tensor:
        return self.x @ self.variables[0] + self.variables[1]

    @property
    def squares(self) -> tf.Tensor:
        return (self.out - self.y) ** 2

    @property
    def each(self) -> tf.Tensor:
        """The loss of each example."""
        return tf.reduce_sum(self.squares, 1)

    @property
    def mean(self) -> tf.Tensor:
        return tf.reduce_mean(self.each)

    @property
    def sum(self) -> tf.Tensor:
        return tf.reduce_sum(self.each)

    @property
    def penalty(self) -> tf.Tensor:
        return 0.1 * tf.nn.l2_loss(self.variables[0])

    @property
    def examples(self) -> tf.Tensor:
        return tf.cast(tf.shape(self.x)[0], tf.float64)

    def zeros(self, name: str) -> list[tf.Variable]:
        return [
            v1.get_variable(
                f"{v.op.name}/{name}", initializer=np.zeros(v.shape.as_list()), trainable=False
            )
            for v in self.variables
        ]

    def counted(self, *updates: Any) -> tf.Operation:
        with tf.control_dependencies(tf.nest.flatten(updates)):
            return self.step.assign_add(1).op


# -- losses --------------------------------------------------------------------------------


def stock(m: Model, **options: Any) -> tf.Tensor:
    return tf.cast(losses.mean_squared_error(m.y, m.out, **options), tf.float64)


def in_function(build: Callable[[Model], tf.Tensor]) -> Callable[[Model], tf.Tensor]:
    return lambda m: tf.function(lambda: build(m), autograph=False)()


def of_two(m: Model) -> tf.Tensor:
    return tf.reduce_sum(tf.stack([m.mean, tf.reduce_mean(tf.abs(m.out))]))


SUM, MEAN = losses.Reduction.SUM, losses.Reduction.MEAN
MEANS: dict[str, Callable[[Model], tf.Tensor]] = {
    "mean": lambda m: m.mean,
    "mean of all elements": lambda m: tf.reduce_mean(m.squares),
    "sum of means": lambda m: tf.reduce_sum(tf.reduce_mean(m.squares, 0)),
    "sum / examples": lambda m: m.sum / m.examples,
    "sum / size": lambda m: tf.reduce_sum(m.squares) / tf.cast(tf.size(m.y), tf.float64),
    "sum * (1 / examples)": lambda m: m.sum * (1 / m.examples),
    "sum / batch": lambda m: m.sum / m.batch,
    "sum * (1 / batch)": lambda m: m.sum * (1 / m.batch),
    "each / batch": lambda m: tf.reduce_sum(m.each / m.batch),
    "half of the sum / batch": lambda m: 0.5 * m.sum / m.batch,
    "tf.losses": stock,
    "tf.losses, mean": lambda m: stock(m, reduction=MEAN),
    "tf.losses, sum * (1 / batch)": lambda m: stock(m, reduction=SUM) * (1 / m.batch),
    "tf.losses, weights 1 / batch": lambda m: stock(m, reduction=SUM, weights=1 / m.batch),
    "compute_average_loss": lambda m: tf.nn.compute_average_loss(m.each),
    "average and regularization": lambda m: (
        tf.nn.compute_average_loss(m.each) + tf.nn.scale_regularization_loss(m.penalty)
    ),
    "average over the batch": lambda m: tf.nn.compute_average_loss(
        m.each, global_batch_size=m.batch
    ),
    "mean and penalty": lambda m: m.mean + m.penalty,
    "mean and penalty of a sum": lambda m: (
        m.mean + losses.compute_weighted_loss(m.penalty, 0.5, reduction=SUM)
    ),
    "(sum and penalty) / examples": lambda m: (m.sum + m.penalty) / m.examples,
    "two means": of_two,
    "branch": lambda m: tf.cond(m.step < 5, lambda: m.mean, lambda: 2.0 * m.mean),
    "function": in_function(lambda m: m.mean),
    "function of tf.losses": in_function(stock),
    "function of a mean of tf.losses": in_function(lambda m: stock(m, reduction=MEAN)),
}
SUMS: dict[str, Callable[[Model], tf.Tensor]] = {
    "sum": lambda m: m.sum,
    "half of the sum": lambda m: 0.5 * m.sum,
    "sum of elements": lambda m: tf.reduce_sum(m.squares),
    "l2_loss": lambda m: tf.nn.l2_loss(m.out - m.y),
    "gradient of each": lambda m: m.each,
    "tf.losses, sum": lambda m: stock(m, reduction=SUM),
    "keras, sum": lambda m: tf.keras.losses.MeanSquaredError(reduction="sum")(m.y, m.out),
    "sum and penalty": lambda m: m.sum + 2.0 * m.penalty,
    "sum and penalties": lambda m: tf.add_n([m.penalty, m.sum, tf.nn.l2_loss(m.variables[1])]),
    "branch of sums": lambda m: tf.cond(m.step < 5, lambda: m.sum, lambda: 0.5 * m.sum),
    "function of a sum": in_function(lambda m: m.sum),
}
NEITHER: dict[str, Callable[[Model], tf.Tensor]] = {
    "mean and sum": lambda m: m.mean + 0.5 * tf.reduce_sum(tf.abs(m.out)),
    "small sum": lambda m: 0.001 * m.sum,
    "small sum of tf.losses": lambda m: 0.01 * stock(m, reduction=SUM),
    "mean and small sum": lambda m: m.mean + 0.001 * m.sum,
    "root of a sum": lambda m: tf.sqrt(m.sum),
    "mean / examples": lambda m: m.mean / m.examples,
}
LOSSES = {**MEANS, **SUMS, **NEITHER}


def chosen_rows(m: Model) -> tf.Tensor:
    return m.x[:, 0] > -0.5


def weights_of(m: Model) -> tf.Tensor:
    return tf.cast(chosen_rows(m), tf.float64)


# quotients whose divisor is another one on each rank, and a root; equal to one process if
# `tf.gradients` of the outermost graph differentiates them
NONLINEAR: dict[str, Callable[[Model], tf.Tensor]] = {
    "sum / weights": lambda m: tf.math.divide_no_nan(
        tf.reduce_sum(m.each * weights_of(m)), tf.reduce_sum(weights_of(m))
    ),
    "mean / mean of weights": lambda m: (
        tf.reduce_mean(m.each * weights_of(m)) / tf.reduce_mean(weights_of(m)) + m.penalty
    ),
    "tf.losses, weights": lambda m: tf.cast(
        losses.compute_weighted_loss(m.each, weights_of(m)), tf.float64
    ),
    "mean of chosen": lambda m: m.mean + tf.reduce_mean(tf.boolean_mask(m.each, chosen_rows(m))),
    "root of a mean": lambda m: tf.sqrt(m.mean + 0.01) + m.penalty,
}
OF_CONSTANTS = ("sum / batch", "sum * (1 / batch)", "each / batch", "half of the sum / batch")
OF_CONSTANTS += ("tf.losses, sum * (1 / batch)", "tf.losses, weights 1 / batch")
OF_CONSTANTS += ("average over the batch",)
PENALISED = ("sum and penalty", "sum and penalties", "(sum and penalty) / examples")


# -- updates -------------------------------------------------------------------------------


def descent() -> train.Optimizer:
    return train.GradientDescentOptimizer(RATE)


def minimize(make: Callable[..., Any], *args: Any) -> Callable[[Model, tf.Tensor], Any]:
    return lambda m, loss: make(*args).minimize(loss, m.step)


def pairs_of(m: Model, loss: tf.Tensor) -> list[tuple[Any, tf.Variable]]:
    return list(zip(tf.gradients(loss, m.variables), m.variables))


def apply(m: Model, pairs: Any) -> Any:
    return descent().apply_gradients(pairs, m.step)


def accumulating(
    compute: Callable[[Model, tf.Tensor], Any], value: Callable[[tf.Variable], Any], first: bool
) -> Callable[[Model, tf.Tensor], Any]:
    """Adds gradients to variables, and applies them in a branch in every second step."""

    def build(m: Model, loss: tf.Tensor) -> Any:
        pairs, sums = compute(m, loss), m.zeros("sum")

        def add() -> tf.Operation:
            return tf.group(*[s.assign_add(g) for s, (g, _) in zip(sums, pairs)])

        def update() -> tf.Operation:
            with tf.control_dependencies([add()] if first else []):
                totals = [value(s) if first else s + g for s, (g, _) in zip(sums, pairs)]
                done = descent().apply_gradients(zip(totals, m.variables))
            with tf.control_dependencies([done]):
                return tf.group(*[s.assign(tf.zeros_like(s)) for s in sums])

        return m.counted(tf.cond(tf.equal((m.step + 1) % 2, 0), update, add))

    return build


def computed(m: Model, loss: tf.Tensor) -> Any:
    return descent().compute_gradients(loss, m.variables)


def taped(m: Model, build: Callable[[Model], tf.Tensor]) -> Any:
    with tf.GradientTape() as tape:
        loss = build(m)
    return zip(tape.gradient(loss, m.variables), m.variables)


def if_small(m: Model, loss: tf.Tensor) -> Any:
    """Leaves out an update with a large gradient."""
    pairs = pairs_of(m, loss)
    norm = tf.linalg.global_norm([gradient for gradient, _ in pairs])
    return m.counted(tf.cond(norm < 40.0, lambda: descent().apply_gradients(pairs), tf.no_op))


def frozen_at_first(m: Model, loss: tf.Tensor) -> Any:
    pairs = pairs_of(m, loss)
    some = lambda: descent().apply_gradients(pairs[1:])  # noqa: E731
    every = lambda: train.MomentumOptimizer(RATE, 0.5).apply_gradients(pairs)  # noqa: E731
    return m.counted(tf.cond(m.step < 3, some, every))


def in_while_loop(m: Model, loss: tf.Tensor) -> Any:
    pairs = [(0.5 * gradient, variable) for gradient, variable in pairs_of(m, loss)]

    def body(i: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([descent().apply_gradients(pairs)]):
            return i + 1

    return m.counted(tf.while_loop(lambda i: i < 2, body, [tf.constant(0)]))


def with_keras(m: Model, loss: tf.Tensor) -> Any:
    return m.counted(legacy.SGD(RATE, 0.5).get_updates(loss, m.variables))


def of_loop(noise: float) -> Callable[[Model, tf.Tensor], Any]:
    """Clips the gradients of micro-batches in a loop, as for differential privacy."""

    def build(m: Model, loss: tf.Tensor) -> Any:
        del loss
        zeros = [tf.zeros_like(v) for v in m.variables]

        def body(i: tf.Tensor, *sums: tf.Tensor) -> Any:
            parts = tf.reduce_mean(tf.reshape(m.each, [2, -1]), 1)
            gradients = [tf.clip_by_norm(g, 1.0) for g in tf.gradients(parts[i], m.variables)]
            return (i + 1, *[s + g for s, g in zip(sums, gradients)])

        _, *sums = tf.while_loop(lambda i, *_: i < 2, body, [tf.constant(0), *zeros])
        sums = [s + noise * tf.random.normal(s.shape, dtype=s.dtype) for s in sums]
        return apply(m, zip(sums, m.variables))

    return build


def of_parts(
    add: Callable[[Sequence[tf.Tensor]], tf.Tensor],
    split: Callable[[tf.Tensor], Sequence[tf.Tensor]] = lambda each: tf.split(each, 2),
) -> Callable[..., Any]:
    """Adds the gradients of micro-batches."""

    def update(m: Model, build: Callable[[Model], tf.Tensor]) -> Any:
        build(m)
        parts = split(m.each)
        gradients = [tf.gradients(tf.reduce_mean(part), m.variables) for part in parts]
        sums = [add(of_variable) for of_variable in zip(*gradients)]
        return train.AdamOptimizer(RATE).apply_gradients(zip(sums, m.variables), m.step)

    return update


def clip_and_add(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.clip_by_norm(g, 1.0) for g in gradients])


def clip_into_variable(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    zeros = tf.zeros_initializer()
    shape = gradients[0].shape
    total = tf.compat.v1.get_variable(
        f"total_{gradients[0].op.name.replace('/', '_')}",
        shape,
        gradients[0].dtype,
        zeros,
        trainable=False,
    )
    last: Any = total.assign(tf.zeros_like(total))
    for gradient in gradients:
        clipped = tf.clip_by_norm(gradient, 1.0)
        with tf.control_dependencies([last]):
            last = total.assign_add(clipped)
    with tf.control_dependencies([last]):
        return total.read_value()


UPDATES: dict[str, Callable[[Model, tf.Tensor], Any]] = {
    "descent": minimize(descent),
    "adam": minimize(train.AdamOptimizer, RATE),
    "momentum": minimize(train.MomentumOptimizer, RATE, 0.9),
    "tf.gradients": lambda m, loss: apply(m, pairs_of(m, loss)),
    "adam of tf.gradients": lambda m, loss: train.AdamOptimizer(RATE).apply_gradients(
        pairs_of(m, loss), m.step
    ),
    "clipped": lambda m, loss: apply(m, clipped(computed(m, loss))),
    "own": lambda m, loss: Own(0.9).apply_gradients(
        [(0.1 * gradient, v) for gradient, v in pairs_of(m, loss)], m.step
    ),
    "by hand": lambda m, loss: m.counted(
        subtract([(0.1 * gradient, v) for gradient, v in pairs_of(m, loss)])
    ),
    "keras": with_keras,
    "accumulated": accumulating(pairs_of, tf.identity, False),
    "accumulated, read": accumulating(pairs_of, lambda s: s.read_value(), True),
    "accumulated, variables": accumulating(pairs_of, lambda s: s, True),
    "accumulated, compute_gradients": accumulating(computed, tf.identity, False),
    "if small": if_small,
    "frozen at first": frozen_at_first,
    "in while_loop": in_while_loop,
}


def added_in_a_loop(m: Model, build: Callable[[Model], tf.Tensor]) -> Any:
    def body(i: tf.Tensor, *sums: tf.Tensor) -> Any:
        gradients = tf.gradients(build(m), m.variables)
        return (i + 1, *[s + 0.5 * g for s, g in zip(sums, gradients)])

    zeros = [tf.zeros_like(v) for v in m.variables]
    _, *sums = tf.while_loop(lambda i, *_: i < 2, body, [tf.constant(0), *zeros])
    return apply(m, zip(sums, m.variables))


def of_a_function(m: Model, build: Callable[[Model], tf.Tensor]) -> Any:
    gradients = tf.function(lambda: tf.gradients(build(m), m.variables), autograph=False)()
    return apply(m, zip(gradients, m.variables))


def in_a_function(m: Model, build: Callable[[Model], tf.Tensor]) -> Any:
    @tf.function(autograph=False)
    def update() -> tf.Tensor:
        loss = build(m)
        with tf.control_dependencies([descent().apply_gradients(computed(m, loss))]):
            return tf.constant(0)

    return m.counted(update())


OTHERS: dict[str, Callable[[Model, Callable[[Model], tf.Tensor]], Any]] = {
    "tape": lambda m, build: apply(m, taped(m, build)),
    "tape by hand": lambda m, build: m.counted(
        subtract([(0.1 * gradient, v) for gradient, v in taped(m, build)])
    ),
    "added in a loop": added_in_a_loop,
    "of a function": of_a_function,
    "in a function": in_a_function,
    "of a loop": lambda m, build: of_loop(0.0)(m, build(m)),
    "of a loop, noise": lambda m, build: of_loop(0.01)(m, build(m)),
    "of parts": of_parts(lambda each: 0.5 * tf.add_n(each)),
    "of parts, stacked": of_parts(lambda each: tf.reduce_mean(tf.stack(each), 0)),
    "of parts, clipped": of_parts(clip_and_add),
    "of parts, clipped into a variable": of_parts(clip_into_variable),
    "of parts, strided": of_parts(clip_and_add, lambda each: [each[::2], each[1::2]]),
}
INSIDE = ("tape", "tape by hand", "added in a loop", "of a function", "in a function")
CLIPPED_PARTS = (
    "of parts, clipped",
    "of parts, clipped into a variable",
    "of parts, strided",
)
REFUSED_UPDATES = ("of a loop", "of a loop, noise", *CLIPPED_PARTS)


# -- pipelines -----------------------------------------------------------------------------


def batched(input_context: Any = None) -> tf.data.Dataset:
    """Batches whose number of examples is not static."""
    rows = by_name.rows_of(input_context, GLOBAL_BATCH)
    parts = {name: array[:, rows].reshape(-1, array.shape[2]) for name, array in DATA.items()}
    batch = next(iter(parts.values())).shape[0] // BATCHES
    return tf.data.Dataset.from_tensor_slices(parts).repeat().batch(batch)


OF_RANKS = {"static": by_name.halves(DATA), "batched": batched}


def rows() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(
        {name: array.reshape(-1, array.shape[2]) for name, array in DATA.items()}
    )


def generated() -> tf.data.Dataset:
    def generate() -> Iterator[dict[str, np.ndarray]]:
        for x, y in zip(DATA["x"].reshape(-1, 5), DATA["y"].reshape(-1, 3)):
            yield {"x": x, "y": y}

    signature = {name: tf.TensorSpec([n], tf.float64) for name, n in (("x", 5), ("y", 3))}
    return tf.data.Dataset.from_generator(generate, output_signature=signature)


def part(i: tf.Tensor) -> tf.data.Dataset:
    return rows().skip(12 * i).take(12)


def interleaved(**options: Any) -> tf.data.Dataset:
    return tf.data.Dataset.range(4).interleave(part, cycle_length=2, block_length=3, **options)


PARALLEL = {"num_parallel_calls": 2}
# Of the whole data: the strategy gives each rank some of the batches.
OF_ALL: dict[str, Callable[[int], tf.data.Dataset]] = {
    "shuffled": lambda n: rows().shuffle(48, seed=3).repeat().batch(n),
    "shuffled and repeated": lambda n: rows().repeat().shuffle(30, seed=3).batch(n),
    "whole batches": lambda n: rows().repeat().batch(n, drop_remainder=True),
    "smaller last batch": lambda n: rows().take(46).batch(n).repeat(),
    "prefetched": lambda n: rows().repeat().batch(n).prefetch(2),
    "cached": lambda n: rows().cache().repeat().batch(n),
    "generator": lambda n: generated().repeat().batch(n),
    "flat_map": lambda n: tf.data.Dataset.range(4).flat_map(part).repeat().batch(n),
    "interleave": lambda n: interleaved().repeat().batch(n),
    "parallel interleave": lambda n: interleaved(**PARALLEL).repeat().batch(n),
    "filter": lambda n: rows().filter(lambda row: row["x"][0] > -1.0).repeat().batch(n),
    "parallel map": lambda n: rows().map(lambda row: row, **PARALLEL).repeat().batch(n),
    "unbatch": lambda n: rows().batch(5).unbatch().repeat().batch(n),
    "padded": lambda n: rows().repeat().padded_batch(n),
    "zip": lambda n: tf.data.Dataset.zip((rows(), rows())).map(lambda a, _: a).repeat().batch(n),
    "concatenated": lambda n: rows().take(20).concatenate(rows().skip(20)).repeat().batch(n),
    "chosen": lambda n: tf.data.Dataset.sample_from_datasets(
        [rows().take(24).repeat(), rows().skip(24).repeat()], [0.5, 0.5], seed=7
    ).batch(n),
}
PIPELINES = [*OF_RANKS, *OF_ALL]


@dataclass(frozen=True)
class Program:
    """One program, by the names of its loss, its update and its pipeline."""

    loss: str
    update: str
    pipeline: str = "batched"

    @property
    def name(self) -> str:
        name = f"{self.loss}, {self.update}, {self.pipeline}"
        return name.replace("/", "by")  # names of files

    @property
    def is_of_version_2(self) -> bool:
        """True for a tape around a branch, for which TensorFlow 1 waits for ever by itself."""
        return self.loss.startswith("branch") and self.update.startswith("tape")

    def is_refused(self, without_v2: bool) -> bool:
        """Returns True if two ranks refuse the program.

        Args:
          without_v2: True with the control flow of TensorFlow 1, whose loops are not followed.
        """
        if without_v2 and self.update == "added in a loop":
            return True
        if self.update in REFUSED_UPDATES:
            return True
        if self.loss in NEITHER:
            return not self.update.startswith("of parts")  # whose gradients are of other losses
        if self.pipeline == "smaller last batch" and self.loss in OF_CONSTANTS:
            return True
        return self.update in INSIDE and self.loss in PENALISED


PROGRAMS = [Program(*names) for names in itertools.product(LOSSES, [*UPDATES, *OTHERS], PIPELINES)]
PROGRAMS += [Program(*names) for names in itertools.product(NONLINEAR, UPDATES, PIPELINES)]


def chosen(seed: int, count: int) -> list[Program]:
    """Returns programs at random: each loss and each update is in some of them."""
    generator = random.Random(seed)

    def endless(names: Sequence[str]) -> Any:
        while True:
            yield from generator.sample(list(names), len(names))

    parts = zip(endless(LOSSES), endless([*UPDATES, *OTHERS]), endless(PIPELINES))
    return list(dict.fromkeys(Program(*names) for names in itertools.islice(parts, count)))


def train_program(program: Program, training: by_name.Training) -> None:
    batch = GLOBAL_BATCH if training.strategy is None else GLOBAL_BATCH // 2

    def model_fn(features: Any, mode: str) -> Any:
        model = Model(features, batch)
        build = {**LOSSES, **NONLINEAR}[program.loss]
        if program.update in OTHERS:
            train_op = OTHERS[program.update](model, build)
            loss = build(model)
        else:
            loss = build(model)
            train_op = UPDATES[program.update](model, loss)
        return tf.estimator.EstimatorSpec(mode, loss=tf.reduce_sum(loss), train_op=train_op)

    if program.pipeline in OF_RANKS:
        input_fn: Callable[..., tf.data.Dataset] = OF_RANKS[program.pipeline]
    else:
        input_fn = functools.partial(OF_ALL[program.pipeline], batch)
    training.train(model_fn, input_fn)


if __name__ == "__main__":
    by_name.train_table(train_program, PROGRAMS, lambda: StrategyOfRanks("data"))
