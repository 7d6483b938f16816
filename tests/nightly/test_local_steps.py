"""Ranks that train by themselves and synchronise every few steps, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import run_python
from local_training import (
    INNER,
    OUTER,
    TRAINED,
    Model,
    Rule,
    Training,
    assert_close,
    batch,
    failure,
    gradients,
    simulate,
)
from ranks import Ranks

import hostopt


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


@pytest.fixture
def training(ranks: Ranks, tmp_path: Path) -> Training:
    return Training(ranks, tmp_path)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Training, Any]]:
    """Trainings with each pair of optimizers."""
    directory = tmp_path_factory.mktemp("pairs")
    trainings = {
        f"{inner}, {outer}": {"inner": inner, "outer": outer, "strategy": {"sync_every": 6}}
        for inner in INNER
        for outer in OUTER
    }
    with Ranks(directory) as ranks:
        training = Training(ranks, directory)
        yield training, training.run(2, **trainings)


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
    "averaged slots of DiLoCo": (
        {
            "inner": "momentum",
            "outer": "nesterov",
            "strategy": {"sync_every": 6, "sync_slots": "average"},
        },
        simulate(2, 20, 6, "momentum", "nesterov", slots="average"),
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
    settings = {name: settings for name, (settings, _) in VARIANTS.items()}
    with Ranks(directory) as ranks:
        training = Training(ranks, directory)
        yield training, training.run(2, **settings)


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


def test_checkpoints_are_saved_at_synchronisations(variants: tuple[Training, Any]) -> None:
    model_dir = variants[0].directory / "saved" / "model"
    found = sorted(int(path.stem.rpartition("-")[2]) for path in model_dir.glob("*.index"))
    assert found == [0, 5, 10, 15, 20]


COMPRESSIONS = {None: 0.0, "fp16": 1e-3, "bf16": 0.02, "int8": 0.02, "int4": 0.2}


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


def test_a_request_stops_all_ranks_long_before_the_next_synchronisation(
    training: Training,
) -> None:
    settings = {"ask": [1, 3], "steps": 10**6, "strategy": {"sync_every": 10**6}}
    models = training.run(2, asked=settings)["asked"]
    step = int(models[0]["global_step"])
    assert step < 10_000  # the number of batches
    assert_close(models, simulate(2, step, 10**6))


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
    run_python("-c", code, code=hostopt.ConfigError.exit_code, HOSTOPT_ERROR_FILE=str(report))
    assert "sync_delay is 2, wanted at most 1" in report.read_text()
