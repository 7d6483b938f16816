"""Dense and sparse gradients handled alike."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hostopt.tensorflow.sparse import map_values, parts_of, slices_of, sum_rows, values_of


def test_a_sparse_gradient_keeps_its_indices() -> None:
    with tf.Graph().as_default():
        gradient = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([4, 1]), tf.constant([5, 3]))
        halves = map_values(lambda values: values / 2, gradient)
        assert halves.indices is gradient.indices
        assert halves.dense_shape is gradient.dense_shape
        assert values_of(gradient) is gradient.values
        assert parts_of(gradient) == [gradient.values, gradient.indices]
        with tf.compat.v1.Session() as session:
            np.testing.assert_array_equal(session.run(halves.values), np.full([2, 3], 0.5))


def test_a_dense_gradient_is_its_own_values() -> None:
    with tf.Graph().as_default():
        gradient = tf.ones([3])
        assert values_of(gradient) is gradient
        (part,) = parts_of(gradient)
        assert part is gradient
        with tf.compat.v1.Session() as session:
            halves = map_values(lambda values: values / 2, gradient)
            np.testing.assert_array_equal(session.run(halves), np.full([3], 0.5))


def test_all_rows_of_a_dense_gradient() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        dense = tf.constant([[1.0], [2.0], [3.0]])
        slices = session.run(slices_of(dense, tf.int64))
    np.testing.assert_array_equal(slices.indices, np.arange(3))
    assert slices.indices.dtype == np.int64
    np.testing.assert_array_equal(slices.values, [[1.0], [2.0], [3.0]])
    np.testing.assert_array_equal(slices.dense_shape, [3, 1])


def test_rows_of_one_index_are_summed() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        slices = tf.IndexedSlices(
            tf.constant([[1.0], [2.0], [3.0]]), tf.constant([4, 1, 4]), tf.constant([5, 1])
        )
        sums = session.run(sum_rows(slices))
    np.testing.assert_array_equal(sums.indices, [4, 1])
    np.testing.assert_array_equal(sums.values, [[4.0], [2.0]])
    np.testing.assert_array_equal(sums.dense_shape, [5, 1])
