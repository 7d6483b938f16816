"""Local steps: programs, and the same training simulated in NumPy."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from local_steps import batch
from ranks import Rank, Ranks

Model = dict[str, np.ndarray]


TRAINED = ("weights", "bias")


def gradients(model: Model, x: np.ndarray, y: np.ndarray) -> Model:
    error = x @ model["weights"] + model["bias"] - y
    return {"weights": 2 * x.T @ error / len(x), "bias": 2 * error.mean(0)}


class Rule:
    """An optimizer with its slots, by name of a variable.

    Args:
      kind: "sgd", "momentum", "nesterov" or "adam".
      rate: learning rate.
    """

    def __init__(self, kind: str, rate: float) -> None:
        # TensorFlow holds them in float32
        self.rate, self.momentum, self.beta_1, self.beta_2, self.epsilon = (
            float(np.float32(each)) for each in (rate, 0.9, 0.9, 0.999, 1e-8)
        )
        self.kind, self.steps = kind, 0
        self.slots: dict[str, list[np.ndarray]] = {}

    def apply(self, model: Model, gradient: Model) -> None:
        self.steps += 1
        for name in TRAINED:
            model[name] = model[name] - self._change(name, gradient[name])

    def _change(self, name: str, g: np.ndarray) -> np.ndarray:
        slots = self.slots.setdefault(name, [np.zeros_like(g), np.zeros_like(g)])
        if self.kind == "sgd":
            return self.rate * g
        if self.kind == "adam":
            slots[0] = self.beta_1 * slots[0] + (1 - self.beta_1) * g
            slots[1] = self.beta_2 * slots[1] + (1 - self.beta_2) * g**2
            power_1, power_2 = (
                float(np.prod([np.float32(beta)] * self.steps, dtype=np.float32))
                for beta in (self.beta_1, self.beta_2)
            )
            unbias = np.sqrt(1 - power_2) / (1 - power_1)
            return self.rate * unbias * slots[0] / (np.sqrt(slots[1]) + self.epsilon)
        slots[0] = self.momentum * slots[0] + g
        return self.rate * (g + self.momentum * slots[0] if self.kind == "nesterov" else slots[0])


INNER = {"sgd": ("sgd", 0.1), "momentum": ("momentum", 0.05), "adam": ("adam", 0.05)}


OUTER = {
    None: None,
    "outer sgd": ("sgd", 1.0),
    "nesterov": ("nesterov", 0.7),
    "outer adam": ("adam", 0.02),
}


def simulate(
    size: int,
    steps: int,
    every: int,
    inner: str = "sgd",
    outer: str | None = None,
    slots: str | None = None,
    *,
    warmup: int = 0,
    batches: Sequence[int] = (),
) -> Model:
    """Trains the models of all ranks one after the other, as the algorithm defines it.

    Slots are averaged, but those inside of an outer optimizer are kept (DiLoCo, algorithm 1).
    """
    slots = slots or ("keep" if outer else "average")
    start = {"weights": np.zeros((5, 1)), "bias": np.zeros(1), "moving": np.zeros(5)}
    models = [dict(start) for _ in range(size)]
    rules = [Rule(*INNER[inner]) for _ in range(size)]
    outer_rule = Rule(*OUTER[outer]) if outer else None
    anchor, since = dict(start), np.zeros(size)
    left = 1 if warmup else every
    for step in range(steps):
        for rank in range(size):
            if batches and step >= batches[rank]:
                continue
            x, y = batch(rank, step, 4)
            rules[rank].apply(models[rank], gradients(models[rank], x, y))
            models[rank]["moving"] = 0.9 * models[rank]["moving"] + 0.1 * x.mean(0)
            since[rank] += 1
        left -= 1
        if left and step + 1 != steps:
            continue
        left = 1 if step + 1 < warmup else every
        weights, since = since / since.sum(), np.zeros(size)

        def mean_of(values: Sequence[np.ndarray], weights: np.ndarray = weights) -> np.ndarray:
            return np.tensordot(weights, np.stack(values), 1)

        mean = {name: mean_of([model[name] for model in models]) for name in start}
        if outer_rule is not None:
            outer_rule.apply(anchor, {name: anchor[name] - mean[name] for name in TRAINED})
            mean.update({name: anchor[name] for name in TRAINED})
        anchor = dict(mean)
        models = [dict(mean) for _ in range(size)]
        for name, i in itertools.product(rules[0].slots, range(2)):
            if slots != "keep":
                value = mean_of([rule.slots[name][i] for rule in rules])
                for rule in rules:
                    rule.slots[name][i] = value if slots == "average" else 0 * value
        for rule in rules:
            rule.steps = 0 if slots == "reset" else max(rule.steps for rule in rules)
    return anchor


class Training:
    """Runs the program, which leaves models and variables in a directory."""

    def __init__(self, ranks: Ranks, directory: Path) -> None:
        self.ranks = ranks
        self.directory = directory

    def run(self, size: int, **trainings: dict[str, Any]) -> dict[str, list[Model]]:
        """Trains one model after the other, with settings of the program by name.

        Returns the variables of each rank, by name.
        """
        started = self.ranks.run("local_steps.py", size, arguments=[self.arguments(trainings)])
        self.outputs = [rank.output for rank in started]
        return {name: self.variables(name, size) for name in trainings}

    def arguments(self, trainings: dict[str, dict[str, Any]]) -> str:
        runs = []
        for name, settings in trainings.items():
            directory = self.directory / name
            directory.mkdir(parents=True, exist_ok=True)
            places = {"model_dir": str(directory / "model"), "dump_dir": str(directory)}
            runs.append({**places, **settings})
        return json.dumps(runs)

    def variables(self, name: str, size: int) -> list[Model]:
        return [dict(np.load(self.directory / name / f"variables-{r}.npz")) for r in range(size)]


def assert_close(models: list[Model], expected: Model, tolerance: float = 1e-10) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(models[0][name], value, rtol=0, atol=tolerance, err_msg=name)
    for other in models[1:]:
        for name, value in models[0].items():
            np.testing.assert_array_equal(other[name], value, err_msg=name)


def failure(training: Training, codes: list[int], **settings: Any) -> list[Rank]:
    arguments = [training.arguments({"failing": settings})]
    return training.ranks.run("local_steps.py", 2, codes=codes, arguments=arguments)
