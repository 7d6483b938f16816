"""tf.contrib: where its names are today, and those that this package implements itself."""
