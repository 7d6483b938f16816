"""Programs that were written for tf.estimator, and run unchanged."""
