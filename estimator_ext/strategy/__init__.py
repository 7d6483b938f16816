"""The strategy of tf.distribute that puts variables on the host and reduces gradients."""
