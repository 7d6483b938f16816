"""The Estimator: its configuration, its training, its progress."""
