"""Ranks that train by themselves and synchronise every few steps, against NumPy."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import PROGRAMS, QUIET, deadline_s, python, reserved_addresses
from ranks import Rank, Ranks

import estimator_ext
import hostopt

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
    size: int,
    steps: int,
    every: int,
    inner: str = "sgd",
    outer: str | None = None,
    slots: str = "average",
    *,
    warmup: int = 0,
    batches: Sequence[int] = (),
) -> Model:
    """Trains the models of all ranks one after the other, as the algorithm defines it."""
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


def simulate_streaming(
    steps: int, every: int, fragments: Sequence[Sequence[str]], delay: int, outer: str
) -> Model:
    """Trains two models with SGD, whose fragments are synchronised in turn and late.

    The last synchronisation is that of the whole model, without delay.
    """
    start = {"weights": np.zeros((5, 1)), "bias": np.zeros(1), "moving": np.zeros(5)}
    models = [dict(start) for _ in range(2)]
    rules = [Rule(*INNER["sgd"]) for _ in models]
    outers = [Rule(*OUTER[outer]) for _ in fragments]
    anchor = dict(start)
    sent: list[Model] = []
    number, interval = 0, every // len(fragments)

    def apply(number: int, sent: list[Model]) -> None:
        for name in fragments[number]:
            change = np.mean([model[name] - anchor[name] for model in sent], axis=0)
            new = anchor[name] + change
            if name in TRAINED:
                outers[number].steps += 1
                new = anchor[name] - outers[number]._change(name, -change)
            for model, before in zip(models, sent):
                # averages could become negative if the later steps were kept, too
                kept = model[name] - before[name] if name in TRAINED else 0
                model[name] = new + kept
            anchor[name] = new

    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            x, y = batch(rank, step - 1, 4)
            rules[rank].apply(model, gradients(model, x, y))
            model["moving"] = 0.9 * model["moving"] + 0.1 * x.mean(0)
        if sent and step % interval == delay:
            apply(number, sent)
            number, sent = (number + 1) % len(fragments), []
        if step == steps:
            for each in range(len(fragments)):
                apply(each, [dict(model) for model in models])
        elif step % interval == 0:
            sent = [dict(model) for model in models]
            if not delay:
                apply(number, sent)
                number, sent = (number + 1) % len(fragments), []
    return anchor


FRAGMENTS = (("weights",), ("bias", "moving"))


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
    assert_close(models, simulate(2, 20, 6, inner, outer), tolerance)
    assert models[0]["global_step"] == 20
    reader = tf.train.load_checkpoint(str(training.directory / f"{inner}, {outer}" / "model"))
    saved = reader.get_variable_to_shape_map()
    has_slots = outer in ("nesterov", "outer adam")
    assert any(name.startswith("outer/") for name in saved) == has_slots
    for name, value in models[0].items():
        np.testing.assert_array_equal(reader.get_tensor(name), value, err_msg=name)


VARIANTS: dict[str, tuple[dict[str, Any], Model]] = {
    "kept slots": (
        {"inner": "momentum", "strategy": {"sync_every": 6, "sync_slots": "keep"}},
        simulate(2, 20, 6, "momentum", slots="keep"),
    ),
    "reset slots": (
        {"inner": "adam", "strategy": {"sync_every": 6, "sync_slots": "reset"}},
        simulate(2, 20, 6, "adam", slots="reset"),
    ),
    "warm-up": (
        {"strategy": {"sync_every": 6, "sync_warmup_steps": 3}},
        simulate(2, 20, 6, warmup=3),
    ),
    "uneven data": (
        {"batches": [10, 6], "strategy": {"sync_every": 4}},
        simulate(2, 10, 4, batches=[10, 6]),
    ),
    "data of one rank end at a synchronisation": (
        {"batches": [4, 9], "outer": "nesterov", "strategy": {"sync_every": 4}},
        simulate(2, 9, 4, outer="nesterov", batches=[4, 9]),
    ),
    "stop at the first end": (
        {"batches": [10, 6], "uneven_data": "stop", "strategy": {"sync_every": 4}},
        simulate(2, 8, 4, batches=[8, 6]),
    ),
    "an outer step after each step": (
        {"outer": "outer sgd", "strategy": {}},
        simulate(2, 20, 1),
    ),
    "gradients": ({"strategy": {}}, simulate(2, 20, 1)),  # today's training
    "by time": ({"strategy": {"sync_secs": 0.01}}, {}),
    "fragments": (
        {"outer": "nesterov functions", "strategy": {"sync_every": 6, "sync_fragments": 2}},
        simulate_streaming(20, 6, FRAGMENTS, 0, "nesterov"),
    ),
    "delayed": (
        {"outer": "nesterov", "strategy": {"sync_every": 6, "sync_delay": 2}},
        simulate_streaming(20, 6, [[*TRAINED, "moving"]], 2, "nesterov"),
    ),
    "delayed fragments": (
        {
            "outer": "nesterov functions",
            "strategy": {"sync_every": 6, "sync_fragments": 2, "sync_delay": 1},
        },
        simulate_streaming(20, 6, FRAGMENTS, 1, "nesterov"),
    ),
    "delayed fragments of uneven data, saved": (
        {
            "outer": "nesterov functions",
            "inner": "momentum",
            "batches": [23, 17],
            "checkpoint_steps": 7,
            "strategy": {"sync_every": 6, "sync_fragments": 2, "sync_delay": 1},
        },
        {},
    ),
    "slots averaged in the fragments of their variables": (
        {
            "inner": "momentum",
            "outer": "nesterov functions",
            "strategy": {"sync_every": 6, "sync_fragments": 2, "sync_slots": "average"},
        },
        {},
    ),
    "data of an unknown shape": (
        {"shapeless": True, "batches": [12, 6], "strategy": {"sync_every": 6}},
        simulate(2, 12, 6, batches=[12, 6]),
    ),
    **{
        f"a counter, {kind}": (
            {"counter": kind, "batches": [12, 6], "strategy": {"sync_every": 6}},
            {**simulate(2, 12, 6, batches=[12, 6]), "counter": 12, "still": 0},
        )
        for kind in ("trainable", "not trainable")
    },
    "saved": ({"checkpoint_steps": 3, "strategy": {"sync_every": 5}}, simulate(2, 20, 5)),
}


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Training, Any]]:
    directory = tmp_path_factory.mktemp("variants")
    ranks = Ranks(directory)
    training = Training(ranks, directory)
    yield training, training.run(2, **{name: settings for name, (settings, _) in VARIANTS.items()})
    ranks.end()


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(variants: tuple[Training, Any], name: str) -> None:
    models = variants[1][name]
    if name == "gradients":  # "moving" is of each rank
        models = [{key: model[key] for key in TRAINED} for model in models]
        assert_close(models, {key: VARIANTS[name][1][key] for key in TRAINED})
        return
    tolerance = 1e-6 if "adam" in str(VARIANTS[name][0]) else 1e-10
    assert_close(models, VARIANTS[name][1], tolerance)
    steps = {"uneven data": 10, "stop at the first end": 8}
    steps.update({"a counter, trainable": 12, "a counter, not trainable": 12})
    steps["data of an unknown shape"] = 12
    steps["delayed fragments of uneven data, saved"] = 23
    steps["data of one rank end at a synchronisation"] = 9
    assert models[0]["global_step"] == steps.get(name, 20)


@pytest.mark.slow
def test_checkpoints_are_saved_at_synchronisations(variants: tuple[Training, Any]) -> None:
    model_dir = variants[0].directory / "saved" / "model"
    found = sorted(int(path.stem.rpartition("-")[2]) for path in model_dir.glob("*.index"))
    assert found == [0, 5, 10, 15, 20]


BROKEN = {
    "whole": {
        "inner": "momentum",
        "outer": "nesterov",
        "dtype": "float32",
        "checkpoint_steps": 5,
        "strategy": {"sync_every": 5, "sync_slots": "keep", "sync_compression": "int8"},
    },
    "fragments": {
        "inner": "adam",
        "outer": "outer adam functions",
        "dtype": "float32",
        "checkpoint_steps": 5,
        "strategy": {
            "sync_every": 4,
            "sync_fragments": 2,
            "sync_delay": 1,
            "sync_compression": "int4",
            "sync_warmup_steps": 3,
        },
    },
    # the data of rank 0, which saves, end first
    "uneven": {
        "batches": [7, 20],
        "outer": "nesterov",
        "checkpoint_steps": 5,
        "strategy": {"sync_every": 5},
    },
}


# between synchronisations, after one, and while one runs in the background
@pytest.mark.faults
@pytest.mark.parametrize(
    ("name", "at"), [("whole", 12), ("whole", 15), ("fragments", 13), ("uneven", 13)]
)
def test_a_killed_training_resumes_exactly(training: Training, name: str, at: int) -> None:
    settings = BROKEN[name]
    expected = training.run(2, expected=settings)["expected"]
    arguments = [training.arguments({"broken": {**settings, "kill": [1, at]}})]
    with reserved_addresses(2) as addresses:
        chief, worker = training.ranks.start(
            "local_steps.py", {"worker": addresses}, arguments=arguments
        )
        assert worker.wait() == -9
        assert chief.wait() == hostopt.errors.PeerLostError.exit_code
    saved = tf.train.latest_checkpoint(str(training.directory / "broken" / "model"))
    assert {"whole": 10, "fragments": 7, "uneven": 10}[name] <= int(saved.rpartition("-")[2]) <= at
    models = training.run(2, broken=settings)["broken"]
    for key, value in expected[0].items():
        np.testing.assert_array_equal(models[0][key], value, err_msg=key)


COMPRESSIONS = {None: 0.0, "fp16": 1e-3, "bf16": 0.02, "int8": 0.02, "int4": 0.2}


@pytest.mark.slow
def test_compressed_differences(training: Training) -> None:
    trainings = {
        str(name): {
            "steps": 60,
            "dtype": "float32",
            "strategy": {
                "sync_every": 5,
                "sync_compression": name,
                "communication": "grpc+tcp",  # compressed on the wire only
            },
        }
        for name in COMPRESSIONS
    }
    results = training.run(2, **trainings)
    for name, tolerance in COMPRESSIONS.items():
        assert_close(results[str(name)], simulate(2, 60, 5), max(tolerance, 1e-5))
    exact = results["None"][0]["weights"]
    for name in COMPRESSIONS:
        assert np.array_equal(results[str(name)][0]["weights"], exact) == (name is None)


@pytest.mark.slow
def test_a_request_stops_all_ranks_long_before_the_next_synchronisation(
    training: Training,
) -> None:
    settings = {"ask": [1, 3], "steps": 10**6, "strategy": {"sync_every": 10**6}}
    models = training.run(2, asked=settings)["asked"]
    step = int(models[0]["global_step"])
    assert step < 10_000  # the number of batches
    assert_close(models, simulate(2, step, 10**6))


@pytest.mark.faults
def test_a_signal_stops_all_ranks_long_before_the_next_synchronisation(
    training: Training,
) -> None:
    ranks = failure(
        training,
        [143, 143],
        kill=[1, 7],
        signal="SIGTERM",
        steps=10**6,
        strategy={"sync_every": 10**6},
    )
    saved = tf.train.latest_checkpoint(str(training.directory / "failing" / "model"))
    assert saved is not None, ranks[0].output
    step = int(saved.rpartition("-")[2])
    assert_close(training.variables("failing", 2), simulate(2, step, 10**6))


def failure(training: Training, codes: list[int], **settings: Any) -> list[Rank]:
    arguments = [training.arguments({"failing": settings})]
    with reserved_addresses(2) as addresses:
        ranks = training.ranks.start("local_steps.py", {"worker": addresses}, arguments=arguments)
        assert [rank.wait() for rank in ranks] == codes, [rank.output for rank in ranks]
    return ranks


@pytest.mark.faults
def test_a_stall_in_the_background_is_found(training: Training) -> None:
    # rank 0, busy in step 32, waits in the background for rank 1, which never reaches step 30
    options = {"sync_every": 10, "sync_delay": 8, "stall_warning_s": 1, "collective_timeout_s": 3}
    settings = {"stuck": [1, 29], "busy": [0, 32], "steps": 60, "strategy": options}
    with reserved_addresses(2) as addresses:
        chief, stuck = training.ranks.start(
            "local_steps.py",
            {"worker": addresses},
            arguments=[training.arguments({"failing": settings})],
        )
        assert chief.wait() == hostopt.errors.CollectiveTimeoutError.exit_code, chief.output
        stuck.process.kill()
        stuck.process.wait()
    assert "the ring has failed in the background" in chief.output
    assert "rank 0 has waited 1." in chief.output  # the warning before the timeout
    assert f"rank 1 (worker:1, {addresses[1]}) is in no collective" in chief.output


@pytest.mark.faults
def test_nan_in_the_gradients_of_a_rank(training: Training) -> None:
    code = hostopt.errors.NonFiniteGradientError.exit_code
    ranks = failure(training, [code, code], nan_at=[1, 7], strategy={"sync_every": 5})
    assert "rank 1 (worker:1" in ranks[0].output
    assert "weights" in ranks[0].output


@pytest.mark.faults
def test_a_variable_without_a_finite_value(training: Training) -> None:
    code = hostopt.errors.NonFiniteGradientError.exit_code
    ranks = failure(training, [code, code], infinite=True, strategy={"sync_every": 5})
    for rank in ranks:
        assert "variable 'least' is NaN or Inf before the first step" in rank.output


@pytest.mark.faults
def test_a_variable_that_one_rank_changes(training: Training) -> None:
    code = hostopt.errors.CollectiveMismatchError.exit_code
    ranks = failure(training, [code, code], change=[1, 7], strategy={"sync_every": 5})
    assert "'frozen': rank 0 has" in ranks[0].output


@pytest.mark.faults
def test_ranks_with_different_options(training: Training) -> None:
    directory = training.directory
    arguments = {
        f"worker:{rank}": [training.arguments({"x": {"strategy": {"sync_every": 5 + rank}}})]
        for rank in range(2)
    }
    with reserved_addresses(2) as addresses:
        ranks = training.ranks.start(
            "local_steps.py", {"worker": addresses}, task_arguments=arguments
        )
        codes = [rank.wait() for rank in ranks]
    assert codes == [hostopt.errors.CollectiveMismatchError.exit_code] * 2, directory
    assert "'sync_every': rank 0 has 5, rank 1 has 6" in ranks[1].output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_every": 0}, "sync_every is 0, wanted a whole number from 1"),
        ({"sync_every": True}, "sync_every is True"),
        ({"sync_every": 2, "sync_secs": 1.0}, "wanted None with sync_every"),
        ({"sync_secs": -1.0}, "sync_secs is -1.0"),
        ({"sync_warmup_steps": 5}, "have no effect"),
        ({"sync_every": 2, "sync_slots": "average?"}, "sync_slots is 'average?'"),
        ({"sync_every": 2, "sync_compression": "int2"}, "sync_compression is 'int2'"),
        ({"sync_every": 4, "sync_fragments": 3}, "sync_fragments is 3, wanted a divisor of 4"),
        ({"sync_every": 4, "sync_delay": 4}, "sync_delay is 4, wanted at most 3"),
        ({"sync_every": 2, "sync_fragments": 2, "sync_delay": 1}, "wanted at most 0"),
        ({"sync_every": 4, "sync_delay": 1, "sync_slots": "average"}, "'keep' with sync_delay"),
        ({"sync_every": 4, "sync_fragments": 2, "sync_slots": "reset"}, "with sync_fragments"),
        ({"outer_optimizer": "sgd"}, "outer_optimizer is 'sgd'"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(hostopt.ConfigError, match=re.escape(text)):
        estimator_ext.HostOffloadStrategy(**options)


@pytest.mark.parametrize(
    ("inner", "operation", "settings"),
    [
        ("ftrl", "ResourceApplyFtrl", {"strategy": {"sync_every": 4, "sync_slots": "keep"}}),
        ("ftrl", "ResourceApplyFtrl", {"strategy": {"sync_every": 4, "sync_slots": "reset"}}),
        ("ftrl", "ResourceApplyFtrl", {"strategy": {"sync_every": 4, "sync_delay": 1}}),
        ("ftrl", "ResourceApplyFtrl", {"outer": "nesterov", "strategy": {"sync_every": 4}}),
        ("adagrad_da", "ResourceApplyAdagradDA", {"strategy": {"sync_every": 4, "sync_delay": 1}}),
    ],
)
def test_optimizers_that_would_undo_a_synchronisation_are_refused(
    training: Training, inner: str, operation: str, settings: dict[str, Any]
) -> None:
    # they compute a variable from its slots, whatever its value has become
    code = hostopt.ConfigError.exit_code
    ranks = failure(training, [code, code], inner=inner, **settings)
    for rank in ranks:
        assert f"{operation} computes variable 'bias' from its slots" in rank.output


@pytest.mark.slow
def test_ftrl_with_averaged_slots(training: Training) -> None:
    # the default, in which the slots carry the synchronisation
    settings = {"inner": "ftrl", "steps": 12, "strategy": {"sync_every": 4}}
    models = training.run(2, averaged=settings)["averaged"]
    for key, value in models[0].items():
        np.testing.assert_array_equal(models[1][key], value, err_msg=key)
    assert np.abs(models[0]["weights"]).min() > 0.1


def test_an_option_that_is_refused_ends_a_program_with_its_exit_code(tmp_path: Path) -> None:
    code = "import estimator_ext; estimator_ext.HostOffloadStrategy(sync_every=2, sync_delay=2)"
    report = tmp_path / "report"
    environ = {**os.environ, **QUIET, "HOSTOPT_ERROR_FILE": str(report)}
    process = subprocess.run(
        python(code), env=environ, timeout=deadline_s(50), capture_output=True, check=False
    )
    assert process.returncode == hostopt.ConfigError.exit_code
    assert "sync_delay is 2, wanted at most 1" in report.read_text()


def test_loops_of_tensorflow_2_are_refused() -> None:
    strategy = estimator_ext.HostOffloadStrategy(sync_every=2)
    with pytest.raises(hostopt.ConfigError, match=r"Train with estimator_ext\.Estimator"):
        strategy.run(lambda: None)


@pytest.mark.faults
def test_a_checkpoint_without_the_slots_of_the_outer_optimizer(training: Training) -> None:
    training.run(2, failing={"steps": 5, "strategy": {"sync_every": 5}})
    code = hostopt.CheckpointError.exit_code
    ranks = failure(training, [code, code], steps=9, outer="nesterov", strategy={"sync_every": 5})
    assert re.search("has no 'outer/(bias|weights)/Momentum', a slot of outer", ranks[0].output)
