"""Losses: means or sums over the batch, by the graphs that compute them."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import tensorflow as tf
from programs.one_process import LOSSES, MEANS, NEITHER, NONLINEAR, OF_RANKS, SUMS, Model
from rings import Spawn

import hostopt
from estimator_ext.losses.kind import LossKind
from estimator_ext.losses.reader import LossReader
from estimator_ext.pipelines.data_order import OrderCheck
from estimator_ext.reduction.gradient_marks import MarkedGraph

v1 = tf.compat.v1
losses = v1.losses
BATCH = 12


def kind_of(build: Any, pipeline: str = "batched", said: str = "") -> LossKind:
    """Returns the kind of a loss on one of two ranks."""
    with MarkedGraph().as_default() as graph:
        features = v1.data.make_one_shot_iterator(OF_RANKS[pipeline]()).get_next()
        data = set(graph.get_operations())
        v1.train.get_or_create_global_step()
        graph.read_losses(data, 2, said)
        graph.marks_gradients = True
        return graph.loss_kind([build(Model(features, BATCH))])


def check_warning(kind: LossKind, text: str) -> None:
    assert kind.warns, kind
    assert not kind.nonlinear
    assert text in kind.reason


@pytest.mark.parametrize("pipeline", OF_RANKS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_a_mean_or_a_sum_or_neither(name: str, pipeline: str) -> None:
    kind = kind_of(LOSSES[name], pipeline)
    found = "neither" if kind.problem else "sum" if kind.is_sum else "mean"
    expected = "mean" if name in MEANS else "sum" if name in SUMS else "neither"
    assert found == expected, kind


def test_the_table_has_each_kind() -> None:
    assert min(map(len, (MEANS, SUMS, NEITHER))) > 5


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mean and sum", "adds terms that are means over the batch and terms that are sums"),
        ("small sum", r"is a sum over the batch \(.*\) times a constant \(0.001\), which may be"),
        ("root of a sum", r"is a function \(Sqrt\) of a sum over the batch"),
        ("mean / examples", "grows with the batch size to the power of -1"),
    ],
)
def test_a_problem_says_what_the_loss_is(name: str, text: str) -> None:
    problem, remedy = kind_of(LOSSES[name]).problem
    assert re.search(text, problem)
    assert "--loss mean" in remedy or "Divide the sums" in remedy


def test_the_user_may_say_what_a_loss_is() -> None:
    assert kind_of(LOSSES["small sum"], said="sum") == LossKind(True, "--loss sum")
    assert kind_of(LOSSES["small sum"], said="mean") == LossKind(False, "--loss mean")


def unknown(m: Model) -> tf.Tensor:
    return tf.numpy_function(lambda each: each.mean(), [m.each], tf.float64)


def test_what_python_computes_is_assumed_to_be_a_mean() -> None:
    kind = kind_of(unknown)
    assert not kind.is_sum
    assert kind.warns
    assert kind.reason.startswith("this is assumed, as PyFunc")


@pytest.mark.parametrize("pipeline", OF_RANKS)
@pytest.mark.parametrize("name", NONLINEAR)
def test_what_is_not_linear_in_numbers_of_each_rank_is_weighted(name: str, pipeline: str) -> None:
    kind = kind_of(NONLINEAR[name], pipeline)
    assert not kind.is_sum
    assert kind.nonlinear
    assert not kind.warns


def rows_with(m: Model, mask: tf.Tensor) -> tf.Tensor:
    """The loss of rows that are chosen before the model sees them."""
    labels, out = (tf.boolean_mask(each, mask) for each in (m.y, m.out))
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(labels, 1), out)


def by_size(m: Model) -> tf.Tensor:
    chosen = rows_with(m, m.x[:, 0] > 0)
    return tf.reduce_sum(chosen) / tf.cast(tf.size(chosen), tf.float64)


def of_random_rows(m: Model) -> tf.Tensor:
    weights = tf.cast(tf.random.uniform(tf.shape(m.each)) < 0.5, tf.float64)
    return tf.reduce_sum(m.each * weights) / tf.maximum(tf.reduce_sum(weights), 1.0)


@pytest.mark.parametrize(
    "build",
    [
        lambda m: tf.reduce_mean(rows_with(m, m.x[:, 0] > 0)),
        lambda m: tf.reduce_mean(tf.gather_nd(m.each, tf.where(m.x[:, 0] > 0))),
        by_size,
        of_random_rows,
    ],
    ids=["rows", "gather_nd", "size", "random"],
)
def test_other_quotients_by_counts_are_weighted(build: Any) -> None:
    kind = kind_of(build)
    assert kind.nonlinear
    assert not kind.warns


@pytest.mark.parametrize(
    "function", [tf.sqrt, tf.square, tf.math.log, tf.exp, lambda mean: mean**0.5]
)
def test_a_function_of_a_mean_is_weighted(function: Any) -> None:
    kind = kind_of(lambda m: 0.5 * function(m.mean) + m.penalty)
    assert kind.nonlinear
    assert not kind.warns


def test_the_means_of_parts_are_weighted() -> None:
    def means(m: Model) -> tf.Tensor:
        labels = tf.cast(m.x[:, 0] > 0, tf.int32)
        return tf.add_n([tf.reduce_mean(p) for p in tf.dynamic_partition(m.each, labels, 2)])

    assert len(kind_of(means).nonlinear) == 2


def weights_of(m: Model) -> tf.Tensor:
    return m.x[:, :1] ** 2


def weighted(m: Model) -> tf.Tensor:
    return NONLINEAR["sum / weights"](m)


def overlap(m: Model) -> tf.Tensor:
    total = tf.reduce_sum(m.out) + tf.reduce_sum(m.y)
    return tf.reduce_sum(m.out * m.y) / total


@pytest.mark.parametrize(
    "build",
    [
        overlap,
        lambda m: tf.exp(weighted(m)),
        lambda m: weighted(m) * m.mean,
        lambda m: weighted(m) * m.variables[1][0],
        lambda m: tf.maximum(weighted(m), 0.1),
        lambda m: weighted(m) * m.examples,
        lambda m: tf.reduce_sum(m.each * (m.x[:, 0] ** 2 / tf.reduce_sum(m.x[:, 0] ** 2))),
        lambda m: m.mean / tf.sqrt(tf.reduce_mean(m.y**2)),
        lambda m: losses.mean_squared_error(
            m.y, m.out, weights_of(m) / tf.reduce_mean(weights_of(m))
        ),
        lambda m: tf.cond(m.step < 5, lambda: weighted(m), lambda: m.mean),
        lambda m: tf.function(lambda: weighted(m), autograph=False)(),
    ],
    ids=[
        *("of variables", "function", "product", "scaled", "at least", "times examples"),
        *("of weights", "by a root", "of normalized weights", "branch", "in a function"),
    ],
)
def test_a_quotient_that_weights_do_not_mend_is_warned_of(build: Any) -> None:
    check_warning(kind_of(build), "divides by a number of this rank's data")


def by_loads(m: Model) -> tf.Tensor:
    """The balance of experts: products of means over the batch."""
    gates = tf.nn.softmax(m.out)
    loads = tf.cast(tf.one_hot(tf.argmax(gates, 1), 3), tf.float64)
    return m.mean + tf.reduce_sum(tf.reduce_mean(gates, 0) * tf.reduce_mean(loads, 0))


@pytest.mark.parametrize(
    "build",
    [
        by_loads,
        lambda m: m.mean * tf.reduce_mean(tf.abs(m.out)),
        lambda m: tf.maximum(m.mean, 0.1),
        lambda m: tf.abs(m.mean - 0.1),
        lambda m: tf.tanh(m.mean),
        lambda m: tf.square(tf.sqrt(m.mean)),
        lambda m: tf.sqrt(weighted(m)),
        lambda m: tf.sqrt(m.mean) * m.variables[1][0],
        lambda m: tf.reduce_mean(m.each * tf.reduce_mean(m.y)),
        lambda m: tf.reduce_mean((1.0 - tf.reduce_mean(m.y)) * m.y[:, 0] * m.each),
        lambda m: tf.function(lambda: tf.sqrt(m.mean), autograph=False)(),
    ],
    ids=[
        *("loads", "product", "at least", "distance", "tanh", "of a root", "of a quotient"),
        *("scaled", "of each", "balanced", "in a function"),
    ],
)
def test_a_function_that_weights_do_not_mend_is_warned_of(build: Any) -> None:
    check_warning(kind_of(build), "is not linear in a number of this rank's data")


def features(m: Model, count: int) -> tf.Tensor:
    return tf.repeat(m.out, count // 3, 1)


def similar(m: Model) -> tf.Tensor:
    """The loss of pairs, whose negatives are the other examples of the batch."""
    scores = tf.matmul(m.out, m.y, transpose_b=True)
    labels = tf.range(tf.shape(m.y)[0])
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores)
    )


def ranked(m: Model) -> tf.Tensor:
    """The hinge of all pairs of examples."""
    differences = m.out[:, :1] - tf.transpose(m.out[:, :1])
    return tf.reduce_mean(tf.maximum(1.0 - differences, 0.0))


@pytest.mark.parametrize("pipeline", OF_RANKS)
@pytest.mark.parametrize(
    "build",
    [
        similar,
        ranked,
        lambda m: tf.reduce_mean(tf.einsum("ij,kj->ik", m.out, m.y) ** 2),
        lambda m: tf.reduce_mean((m.out[:, :1] - m.y[:, 0]) ** 2),
        lambda m: m.mean + tf.reduce_mean(tf.matmul(m.out[None], m.y[None], adjoint_b=True)),
        lambda m: tf.reduce_mean(tf.tensordot(m.out, m.y, [[1], [1]])),
        lambda m: tf.function(lambda: similar(m), autograph=False)(),
        lambda m: tf.reduce_mean(tf.matmul(features(m, 6), features(m, 6), transpose_b=True)),
    ],
    ids=[
        *("similar", "ranked", "einsum", "broadcast by mistake", "batch of matrices"),
        *("tensordot", "in a function", "as many features as examples"),
    ],
)
def test_pairs_of_examples_are_warned_of(build: Any, pipeline: str) -> None:
    check_warning(kind_of(build, pipeline), "compares the examples of this rank only")
    assert not kind_of(build, pipeline, said="mean").warns


def attention(m: Model) -> tf.Tensor:
    keys = tf.stack([m.out, m.y], 1)  # [examples, 2, 3]
    weights = tf.nn.softmax(tf.matmul(keys, keys, transpose_b=True))
    return tf.reduce_mean(tf.einsum("bij,bjk->bik", weights, keys) ** 2)


def normalized(m: Model) -> tf.Tensor:
    mean, variance = tf.nn.moments(m.out, [0])
    return tf.reduce_mean(tf.nn.batch_normalization(m.out, mean, variance, None, None, 1e-3) ** 2)


def of_sequences(m: Model) -> tf.Tensor:
    lengths = tf.argmax(m.y, 1) + 1
    mask = tf.sequence_mask(lengths, dtype=tf.float64)  # as long as the longest one
    return tf.reduce_mean(m.each * tf.reduce_sum(mask, 1))


def attention_of_sequences(m: Model) -> tf.Tensor:
    keys = v1.placeholder_with_default(tf.stack([m.out, m.y], 1), [None, None, 3])
    return tf.reduce_mean(tf.matmul(keys, keys, transpose_b=True) ** 2)


def by_positions(m: Model) -> tf.Tensor:
    lengths = tf.argmax(m.y, 1) + 1
    positions = tf.cumsum(tf.ones([tf.reduce_max(lengths)], tf.int64))
    mask = tf.cast(positions <= lengths[:, None], tf.float64)
    return tf.reduce_mean(m.each * tf.reduce_sum(mask, 1))


def normalized_features(m: Model) -> tf.Tensor:
    mean = tf.reduce_mean(features(m, 6), 0)  # as many as examples
    return m.mean + tf.reduce_mean((features(m, 6) - mean) ** 2)


def of_rows(m: Model) -> tf.Tensor:
    """A mean over rows, each of which is a sum over as many elements as there are examples."""
    rows = v1.placeholder_with_default(features(m, 6), [None, 6])
    return tf.reduce_mean(tf.reduce_sum(rows**2, 1))


NOT_PAIRED = [attention, attention_of_sequences, normalized, normalized_features, of_sequences]
NOT_PAIRED += [by_positions, of_rows]


@pytest.mark.parametrize("pipeline", OF_RANKS)
@pytest.mark.parametrize("build", NOT_PAIRED)
def test_each_example_by_itself_is_not_warned_of(build: Any, pipeline: str) -> None:
    kind = kind_of(build, pipeline)
    assert not kind.warns
    assert not kind.is_sum


def mean_of_examples(m: Model) -> tf.Tensor:
    return m.sum / m.examples


def mean_of_a_loss_function(m: Model) -> tf.Tensor:
    return v1.losses.mean_squared_error(m.y, m.out)


def mean_of_directions(m: Model) -> tf.Tensor:
    norms = tf.reduce_sum(m.x**2, 1, keepdims=True)
    return tf.reduce_mean(m.each[:, None] / norms)


def loss_function_of_directions(m: Model) -> tf.Tensor:
    norms = tf.reduce_sum(m.x**2, 1, keepdims=True)
    return losses.mean_squared_error(m.y / norms, m.out)


@pytest.mark.parametrize(
    "build",
    [
        *(mean_of_examples, mean_of_a_loss_function, LOSSES["mean"]),
        *(mean_of_directions, loss_function_of_directions),
        lambda m: m.mean * tf.exp(-m.variables[1][0]) + m.variables[1][0],
        lambda m: m.mean / tf.sqrt(tf.cast(tf.shape(m.x)[1], tf.float64)),
    ],
)
def test_other_divisors_are_left_alone(build: Any) -> None:
    kind = kind_of(build)
    assert not kind.warns
    assert not kind.nonlinear


def sequences(m: Model) -> tf.Tensor:
    """Two dimensions of unknown size, of which the first is that of the examples."""
    return v1.placeholder_with_default(m.squares, [None, None])


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda x: tf.reduce_mean(tf.reduce_sum(x, 1)), "mean"),
        (lambda x: tf.reduce_sum(tf.reduce_sum(x, 1)), "sum"),
        (lambda x: tf.reduce_sum(tf.reduce_sum(x, 0)), "sum"),
        (lambda x: tf.reduce_sum(tf.reduce_mean(x, 0)), "mean"),
        # time may come first
        (lambda x: tf.reduce_mean(tf.reduce_sum(x, 0)), "neither"),
        (lambda x: tf.reduce_sum(tf.reduce_mean(x, 1)), "neither"),
    ],
)
def test_two_dimensions_of_unknown_size(build: Any, expected: str) -> None:
    kind = kind_of(lambda m: build(sequences(m)))
    assert ("neither" if kind.problem else "sum" if kind.is_sum else "mean") == expected


@pytest.mark.parametrize(
    ("build", "is_sum"),
    [
        (lambda x: tf.reduce_mean(tf.reduce_sum(x, 1)), False),
        (lambda x: tf.reduce_sum(tf.reduce_mean(x, 0)), False),
        (lambda x: tf.reduce_sum(tf.reduce_mean(x, 1)), True),
        (lambda x: tf.reduce_mean(tf.reduce_sum(x, 0)), True),
    ],
)
def test_a_static_dimension_beside_one_of_unknown_size(build: Any, is_sum: bool) -> None:
    def of_sequences(m: Model) -> tf.Tensor:
        return build(v1.placeholder_with_default(m.squares, [m.squares.shape[0], None]))

    kind = kind_of(of_sequences, "static")
    assert not kind.problem
    assert kind.is_sum == is_sum


def branch(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(x > 0, lambda: tf.tanh(x) * 2.0, lambda: x + 1.0)


@pytest.mark.parametrize("layer", [branch, lambda x: 0.5 * x + 0.25 * x], ids=["branch", "sum"])
def test_a_deep_graph_is_read_once(layer: Any) -> None:
    """The number of ways through these layers would take hours."""
    kind = kind_of(lambda m: functools.reduce(lambda x, _: layer(x), range(40), m.mean))
    assert not kind.problem
    assert not kind.is_sum


def test_a_penalty_beside_a_sum_counts_once_on_all_ranks() -> None:
    with MarkedGraph().as_default() as graph:
        features = v1.data.make_one_shot_iterator(OF_RANKS["static"]()).get_next()
        data = set(graph.get_operations())
        v1.train.get_or_create_global_step()
        graph.read_losses(data, 2)
        graph.marks_gradients = True
        model = Model(features, BATCH)
        penalty, total = model.penalty, model.sum
        loss = total + penalty
        (gradient,) = tf.gradients(loss, model.variables[:1])
        wanted = tf.gradients(total, model.variables[0])[0] + 0.05 * model.variables[0]
        graph.penalties.divide(graph.loss_kind([loss]), 0.5)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            values = session.run([loss - total, penalty, gradient, wanted])
    assert values[0] == pytest.approx(values[1] / 2)
    assert values[2] == pytest.approx(values[3])


def test_weights_that_a_function_captures_are_no_data() -> None:
    with MarkedGraph().as_default() as graph:
        rows = tf.data.Dataset.from_tensors({"x": tf.zeros([5, 5]), "y": tf.zeros([5, 3])})
        features = v1.data.make_one_shot_iterator(rows).get_next()
        graph.read_losses(set(graph.get_operations()), 2)
        graph.marks_gradients = True
        weights = tf.identity(v1.get_variable("weights", [5, 3], use_resource=True))

        def gradients() -> Any:
            loss = tf.nn.l2_loss(features["x"] @ weights - features["y"]) + tf.nn.l2_loss(weights)
            return tf.gradients(loss, weights)

        tf.function(gradients, autograph=False)()
        ((text, _),) = {mark.loss.problem for mark in graph.marks.values()}
    assert text.startswith("adds a penalty on weights")


def test_the_length_of_a_batch_is_that_of_the_last_batching(spawn: Spawn) -> None:
    def lengths(communicator: hostopt.Communicator) -> set[int]:
        with tf.Graph().as_default() as graph:
            rows = tf.data.Dataset.from_tensor_slices(tf.zeros([24, 7])).batch(5).unbatch()
            dataset, _ = OrderCheck(communicator, "").in_one_order(rows.batch(6))
            v1.data.make_one_shot_iterator(dataset).get_next()
            return LossReader(set(graph.get_operations()), {}, {}, 2).batch.lengths

    assert spawn(2, lengths) == [{6}, {6}]
