"""Pipelines of tf.data: their order, their shards, the lengths of their batches."""
