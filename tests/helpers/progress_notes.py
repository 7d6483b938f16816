"""What a training and an evaluation report of their progress."""

from __future__ import annotations

from typing import Any

TRAINING: dict[str, Any] = {
    "first_step": 0,
    "resumed_step": 0,
    "step": 500,
    "last_step": 2000,
    "loss": 0.25,
    "steps_per_s": 100.0,
    "examples_per_s": 6400.0,
    "mean_steps_per_s": 90.0,
    "mean_examples_per_s": 5760.0,
    "communication_ms": 2.0,
    "hidden_percent": 75.0,
    "slowest_rank": 1,
    "checkpoint_step": 450,
    "model_dir": "/models/digits",
    "times_ms": {"input": 1.0, "forward_and_backward": 8.0, "update": 1.0},
}


EVALUATION = {"step": 450, "metric": "accuracy", "value": 0.9, "best": 0.95, "best_step": 300}

# with what only metrics show
PROGRESS: dict[str, Any] = {
    **TRAINING,
    "checkpoint_time_s": 1.5e9,
    "sent_bytes": 4096,
    "waited_s": [0.5, 0.25],
    "times_ms": {**TRAINING["times_ms"], "exposed_communication": 0.5},
}
