"""Evaluation: evaluators beside the training, and metrics that are summed."""
