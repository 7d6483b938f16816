"""A training that `hostopt k8s` describes."""

from __future__ import annotations

from hostopt.commands.k8s import Training

TRAINING = Training(
    "digits",
    "registry/digits:1",
    ["python", "main.py", "--text", "a: 'b' \"c\" # d\n"],
    3,
    evaluators=1,
    restarts=2,
    resources={"nvidia.com/gpu": "1"},
    claims={"models": "/models"},
)
