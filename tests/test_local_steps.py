"""Ranks that train by themselves and synchronise every few steps, against NumPy."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import PROGRAMS
from ranks import Ranks

pytestmark = [pytest.mark.tensorflow]

Model = dict[str, np.ndarray]
TRAINED = ("weights", "bias")


def batch(rank: int, step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the batch of the program."""
    path = PROGRAMS / "local_steps.py"
    spec = importlib.util.spec_from_file_location("local_steps_program", path)
    if not hasattr(batch, "module"):
        batch.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(batch.module)
    return batch.module.batch(rank, step, rows)


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
    size: int, steps: int, every: int, inner: str, outer: str | None, slots: str, rows: int = 4
) -> Model:
    """Trains the models of all ranks one after the other, as the algorithm defines it."""
    start = {"weights": np.zeros((5, 1)), "bias": np.zeros(1), "moving": np.zeros(5)}
    models = [dict(start) for _ in range(size)]
    rules = [Rule(*INNER[inner]) for _ in range(size)]
    outer_rule = Rule(*OUTER[outer]) if outer else None
    anchor = dict(start)
    for step in range(steps):
        for rank in range(size):
            x, y = batch(rank, step, rows)
            rules[rank].apply(models[rank], gradients(models[rank], x, y))
            models[rank]["moving"] = 0.9 * models[rank]["moving"] + 0.1 * x.mean(0)
        if (step + 1) % every and step + 1 != steps:
            continue
        mean = {name: np.mean([model[name] for model in models], axis=0) for name in start}
        if outer_rule is not None:
            outer_rule.apply(anchor, {name: anchor[name] - mean[name] for name in TRAINED})
            mean.update({name: anchor[name] for name in TRAINED})
        anchor = dict(mean)
        models = [dict(mean) for _ in range(size)]
        if slots == "average" and rules[0].slots:
            for name in TRAINED:
                for i in range(2):
                    value = np.mean([rule.slots[name][i] for rule in rules], axis=0)
                    for rule in rules:
                        rule.slots[name][i] = value
    return anchor


class Training:
    """Runs the program.

    Args:
      ranks: starts the processes.
      directory: directory of models and variables.
    """

    def __init__(self, ranks: Ranks, directory: Path) -> None:
        self.ranks = ranks
        self.directory = directory

    def run(self, size: int, **trainings: dict[str, Any]) -> dict[str, list[Model]]:
        """Trains one model after the other.

        Args:
          size: number of ranks.
          **trainings: settings of the program, by name.

        Returns:
          The variables of each rank, by name.
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


@pytest.fixture
def training(ranks: Ranks, tmp_path: Path) -> Training:
    return Training(ranks, tmp_path)


def assert_close(models: list[Model], expected: Model, tolerance: float = 1e-10) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(models[0][name], value, rtol=0, atol=tolerance, err_msg=name)
    for other in models[1:]:
        for name, value in models[0].items():
            np.testing.assert_array_equal(other[name], value, err_msg=name)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Training, Any]]:
    """Trainings with each pair of optimizers."""
    directory = tmp_path_factory.mktemp("pairs")
    ranks = Ranks(directory)
    trainings = {
        f"{inner}, {outer}": {"inner": inner, "outer": outer, "strategy": {"sync_every": 6}}
        for inner in INNER
        for outer in OUTER
    }
    training = Training(ranks, directory)
    yield training, training.run(2, **trainings)
    ranks.end()


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", INNER)
def test_each_pair_of_optimizers(
    pairs: tuple[Training, Any], inner: str, outer: str | None
) -> None:
    training, results = pairs
    models = results[f"{inner}, {outer}"]
    # the powers of Adam's betas are variables of float32, whose mean is rounded
    tolerance = 1e-6 if "adam" in f"{inner} {outer}" else 1e-10
    assert_close(models, simulate(2, 20, 6, inner, outer, "average"), tolerance)
    assert models[0]["global_step"] == 20
    reader = tf.train.load_checkpoint(str(training.directory / f"{inner}, {outer}" / "model"))
    saved = reader.get_variable_to_shape_map()
    has_slots = outer in ("nesterov", "outer adam")
    assert any(name.startswith("outer/") for name in saved) == has_slots
    for name, value in models[0].items():
        np.testing.assert_array_equal(reader.get_tensor(name), value, err_msg=name)
