"""Conditional random fields against all sequences of tags, one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from estimator_ext.compat.contrib import crf

TAGS = 3
LENGTHS = [4, 2, 1, 0]


def example(time: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns inputs, tags, lengths and transitions."""
    random = np.random.default_rng(time)
    lengths = np.minimum(LENGTHS, time)
    shape = [len(lengths), time]
    inputs = random.normal(size=[*shape, TAGS])
    tags = random.integers(0, TAGS, shape)
    return inputs, tags, lengths, random.normal(size=[TAGS, TAGS])


def score(inputs: np.ndarray, tags: tuple[int, ...], transitions: np.ndarray) -> float:
    steps = sum(inputs[time, tag] for time, tag in enumerate(tags))
    return float(steps + sum(transitions[pair] for pair in zip(tags, tags[1:])))


def scores(
    inputs: np.ndarray, length: int, transitions: np.ndarray
) -> dict[tuple[int, ...], float]:
    every = itertools.product(range(TAGS), repeat=length)
    return {tags: score(inputs, tags, transitions) for tags in every}


def likelihoods(
    inputs: np.ndarray, tags: np.ndarray, lengths: np.ndarray, transitions: np.ndarray
) -> np.ndarray:
    return np.array(
        [
            score(row, tuple(chosen[:length]), transitions)
            - np.log(sum(np.exp(list(scores(row, length, transitions).values()))))
            for row, chosen, length in zip(inputs, tags, lengths)
        ]
    )


@pytest.mark.parametrize("time", [4, 2, 1])
@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_likelihood_and_its_parts(time: int, kind: str) -> None:
    inputs, tags, lengths, transitions = example(time)
    lengths = lengths.astype(kind)
    actual, same = crf.crf_log_likelihood(inputs, tags.astype(kind), lengths, transitions)
    assert same is transitions
    np.testing.assert_allclose(actual, likelihoods(inputs, tags, lengths, transitions))
    unary = crf.crf_unary_score(tags, lengths, inputs)
    binary = crf.crf_binary_score(tags, lengths, transitions)
    expected = [
        score(row, tuple(chosen[:length]), transitions)
        for row, chosen, length in zip(inputs, tags, lengths)
    ]
    total = crf.crf_sequence_score(inputs, tags, lengths, transitions)
    np.testing.assert_allclose(total, expected)
    np.testing.assert_allclose(unary + binary, expected)
    without = crf.crf_sequence_score(inputs, tags, lengths, np.zeros_like(transitions))
    np.testing.assert_allclose(unary, without)


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("time", [4, 1])
def test_gradients_of_the_likelihood(time: int, is_graph: bool) -> None:
    inputs, tags, lengths, transitions = example(time)

    def gradients() -> list[tf.Tensor]:
        given = tf.constant(inputs), tf.constant(transitions)
        with tf.GradientTape() as tape:
            tape.watch(given)
            result, _ = crf.crf_log_likelihood(given[0], tags, lengths, given[1])
        zeros = tf.UnconnectedGradients.ZERO
        return tape.gradient(result, given, unconnected_gradients=zeros)

    actual = (tf.function(gradients) if is_graph else gradients)()
    step = 1e-6
    for which, values in enumerate((inputs, transitions)):
        expected = np.zeros_like(values)
        for index in np.ndindex(*values.shape):
            ends = []
            for sign in (1, -1):
                moved = [inputs.copy(), transitions.copy()]
                moved[which][index] += sign * step
                ends.append(likelihoods(moved[0], tags, lengths, moved[1]).sum())
            expected[index] = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(actual[which], expected, atol=1e-8)


@pytest.mark.parametrize("time", [4, 2, 1])
def test_the_best_tags(time: int) -> None:
    inputs, _, lengths, transitions = example(time)
    tags, best = crf.crf_decode(inputs, transitions, lengths)
    assert tags.dtype == tf.int32
    for row, length, chosen, value in zip(inputs, lengths, tags.numpy(), best.numpy()):
        every = scores(row, length, transitions)
        expected = max(every, key=lambda each: every[each])
        assert tuple(chosen) == expected + (0,) * (time - length)
        np.testing.assert_allclose(value, every[expected])
        if length:
            alone, of_one = crf.viterbi_decode(row[:length], transitions)
            assert tuple(alone) == expected
            np.testing.assert_allclose(of_one, value)


def test_a_batch_of_empty_sequences() -> None:
    inputs = np.zeros([2, 0, TAGS], np.float32)
    tags, lengths = np.zeros([2, 0], np.int32), np.zeros([2], np.int32)
    actual, _ = crf.crf_log_likelihood(inputs, tags, lengths, np.zeros([TAGS, TAGS], np.float32))
    assert actual.numpy().tolist() == [0, 0]


def test_a_graph_of_unknown_shapes_creates_the_transitions() -> None:
    inputs, tags, lengths, _ = example(4)
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        given = v1.placeholder(tf.float32, [None, None, TAGS])
        chosen, counts = (v1.placeholder(tf.int32, shape) for shape in ([None, None], [None]))
        likelihood, transitions = crf.crf_log_likelihood(given, chosen, counts)
        assert [each.op.name for each in v1.trainable_variables()] == ["transitions"]
        decoded = crf.crf_decode(given, transitions, counts)
        slopes = tf.gradients(likelihood, [transitions])
        session.run(v1.global_variables_initializer())
        feeds = {given: inputs, chosen: tags, counts: lengths}
        values = session.run([likelihood, transitions, decoded[0], slopes], feeds)
    expected = likelihoods(inputs, tags, lengths, values[1])
    np.testing.assert_allclose(values[0], expected, rtol=1e-4, atol=1e-5)
    assert values[2].shape == (4, 4)
    assert np.abs(values[3][0]).max() > 0
