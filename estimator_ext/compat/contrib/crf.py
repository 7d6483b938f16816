"""tf.contrib.crf: conditional random fields over sequences of tags.

Shapes: potentials and inputs [batch, time, tags], tag indices [batch, time], lengths [batch],
transition parameters [tags, tags], from the tag of a row to that of a column. A sequence of length
0 has the score, the log norm and the best score 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow.compat.v2 as tf


def crf_log_likelihood(
    inputs: Any, tag_indices: Any, sequence_lengths: Any, transition_params: Any = None
) -> tuple[tf.Tensor, Any]:
    """Returns the log-likelihood of each sequence of tags, and the transition parameters.

    The parameters are a new variable "transitions" if they are not given.
    """
    if transition_params is None:
        tags = tf.convert_to_tensor(inputs).shape[2]
        transition_params = tf.compat.v1.get_variable("transitions", [tags, tags])
    score = crf_sequence_score(inputs, tag_indices, sequence_lengths, transition_params)
    return score - crf_log_norm(inputs, sequence_lengths, transition_params), transition_params


def crf_sequence_score(
    inputs: Any, tag_indices: Any, sequence_lengths: Any, transition_params: Any
) -> tf.Tensor:
    """Returns the score of each sequence of tags, which is not normalized."""
    unary = crf_unary_score(tag_indices, sequence_lengths, inputs)
    return unary + crf_binary_score(tag_indices, sequence_lengths, transition_params)


def crf_unary_score(tag_indices: Any, sequence_lengths: Any, inputs: Any) -> tf.Tensor:
    """Returns the sum of the inputs of each sequence at its tags."""
    inputs = tf.convert_to_tensor(inputs)
    scores = tf.gather(inputs, tag_indices, axis=2, batch_dims=2)
    return tf.reduce_sum(scores * _mask(sequence_lengths, scores), 1)


def crf_binary_score(tag_indices: Any, sequence_lengths: Any, transition_params: Any) -> tf.Tensor:
    """Returns the sum of the parameters of the transitions in each sequence."""
    tags = tf.convert_to_tensor(tag_indices)
    scores = tf.gather_nd(transition_params, tf.stack([tags[:, :-1], tags[:, 1:]], axis=2))
    return tf.reduce_sum(scores * _mask(tf.convert_to_tensor(sequence_lengths) - 1, scores), 1)


def crf_log_norm(inputs: Any, sequence_lengths: Any, transition_params: Any) -> tf.Tensor:
    """Returns the logarithm of the sum of exp(score) over all sequences of tags."""
    inputs = tf.convert_to_tensor(inputs)

    def step(alphas: tf.Tensor, at: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        scores, time = at
        paths = tf.expand_dims(alphas, 2) + tf.expand_dims(transition_params, 0)
        is_within = (time < sequence_lengths)[:, None]
        return tf.where(is_within, tf.reduce_logsumexp(paths, 1) + scores, alphas)

    sequence_lengths = tf.cast(sequence_lengths, tf.int32)
    first = tf.reduce_sum(inputs[:, :1], 1)
    rest = tf.transpose(inputs[:, 1:], [1, 0, 2]), tf.range(1, tf.maximum(1, tf.shape(inputs)[1]))
    norm = tf.reduce_logsumexp(tf.foldl(step, rest, first), 1)
    return tf.where(sequence_lengths > 0, norm, tf.zeros_like(norm))


def crf_decode(
    potentials: Any, transition_params: Any, sequence_length: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the best tags of each sequence, followed by zeros, and their score."""
    potentials = tf.convert_to_tensor(potentials)
    lengths = tf.cast(sequence_length, tf.int32)
    tags = tf.zeros_like(potentials[:, 0], tf.int32) + tf.range(tf.shape(potentials)[2])

    def forward(
        before: tuple[tf.Tensor, tf.Tensor], at: tuple[tf.Tensor, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        scores, time = at
        paths = tf.expand_dims(before[0], 2) + tf.expand_dims(transition_params, 0)
        is_within = ((time > 0) & (time < lengths))[:, None]
        past = tf.where(time > 0, before[0], scores)
        best = tf.where(is_within, tf.reduce_max(paths, 1) + scores, past)
        return best, tf.where(is_within, tf.argmax(paths, 1, tf.int32), tags)

    steps = tf.transpose(potentials, [1, 0, 2]), tf.range(tf.shape(potentials)[1])
    scores, pointers = tf.scan(forward, steps, (tf.zeros_like(potentials[:, 0]), tags))
    last = tf.argmax(scores[-1], 1, tf.int32)

    def backward(tag: tf.Tensor, pointer: tf.Tensor) -> tf.Tensor:
        return tf.gather(pointer, tag, axis=1, batch_dims=1)

    before = tf.scan(backward, pointers, last, reverse=True)  # the first one points to itself
    decoded = tf.transpose(tf.concat([before[1:], last[None]], 0))
    mask = tf.sequence_mask(lengths, tf.shape(potentials)[1])
    score = tf.where(lengths > 0, tf.reduce_max(scores[-1], 1), tf.zeros_like(scores[-1, :, 0]))
    return tf.where(mask, decoded, tf.zeros_like(decoded)), score


def viterbi_decode(score: Any, transition_params: Any) -> tuple[list[int], Any]:
    """Returns the best tags for the scores [time, tags] of one sequence, and their score."""
    best, pointers = np.asarray(score)[0], []
    for scores in np.asarray(score)[1:]:
        paths = best[:, None] + transition_params
        best = scores + paths.max(0)
        pointers.append(paths.argmax(0))
    tags = [int(best.argmax())]
    for pointer in reversed(pointers):
        tags.append(int(pointer[tags[-1]]))
    return tags[::-1], best.max()


def _mask(lengths: Any, scores: tf.Tensor) -> tf.Tensor:
    return tf.sequence_mask(lengths, tf.shape(scores)[1], scores.dtype)
