"""Training on 2 and 3 workers equals training on one, and every rank holds the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from ranks import Ranks

OPTIMIZERS = ["sgd", "momentum", "adam"]
KINDS = {
    "float64": {"dtype": "float64", "model": "mlp", "bucket_mb": 128 / 2**20},
    "float32": {"dtype": "float32", "model": "conv"},
}
PAIRS = [("float64", 3), ("float32", 2)]  # kind and number of workers; the second one at night
# float32 sums of gradients differ in their order only; 20 steps of Momentum drift 1.3e-5
TOLERANCE = {"float64": 1e-10, "float32": 1e-4}


class Runs:
    """Trains from one checkpoint with a number of workers, each combination once.

    Args:
      directory: directory of checkpoints and variables.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._done: dict[tuple[str, int, str], list[dict[str, dict[str, np.ndarray]]]] = {}

    def start(self, kind: str) -> Path:
        """Returns a directory with a checkpoint of one step of each optimizer, including slots."""
        model_dir = self._directory / f"start-{kind}"
        if not model_dir.exists():
            self._train(model_dir, model_dir, 1, {**KINDS[kind], "steps": 1})
        return model_dir

    def variables(
        self, kind: str, size: int, attempt: str = ""
    ) -> list[dict[str, dict[str, np.ndarray]]]:
        """Returns the final variables of each rank, by optimizer and name."""
        key = (kind, size, attempt)
        if key not in self._done:
            directory = self._directory / f"{kind}-{size}{attempt}"
            # without the input state, because another number of ranks reads from the start
            ignored = shutil.ignore_patterns("*.input")
            shutil.copytree(self.start(kind), directory / "model", ignore=ignored)
            fresh = size == 3 and not attempt  # new interpreters order sets differently
            self._train(directory / "model", directory, size, {**KINDS[kind], "steps": 21}, fresh)
            self._done[key] = [
                {name: dict(np.load(directory / f"{name}-{rank}.npz")) for name in OPTIMIZERS}
                for rank in range(size)
            ]
        return self._done[key]

    def _train(
        self, model_dir: Path, dump_dir: Path, size: int, settings: dict, fresh: bool = False
    ) -> None:
        directories = {"model_dir": str(model_dir), "dump_dir": str(dump_dir)}
        settings = {**settings, **directories, "optimizers": OPTIMIZERS}
        dump_dir.mkdir(exist_ok=True)
        with Ranks(dump_dir) as ranks:
            ranks.run("train.py", size, arguments=[json.dumps(settings)], fresh=fresh)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        pairs = PAIRS if metafunc.config.option.nightly else PAIRS[:1]
        metafunc.parametrize(("kind", "size"), pairs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def test_workers_equal_one_worker_on_the_full_batch(runs: Runs, kind: str, size: int) -> None:
    one = runs.variables(kind, 1)[0]
    many = runs.variables(kind, size)[0]
    for optimizer in OPTIMIZERS:
        assert set(one[optimizer]) == set(many[optimizer])
        assert one[optimizer]["global_step"] == many[optimizer]["global_step"] == 21
        for name, expected in one[optimizer].items():
            np.testing.assert_allclose(
                many[optimizer][name],
                expected,
                rtol=0,
                atol=TOLERANCE[kind],
                err_msg=f"{optimizer} {name}",
            )


def test_training_moves_the_variables(runs: Runs, kind: str, size: int) -> None:
    after = runs.variables(kind, size)[0]
    for optimizer in OPTIMIZERS:
        before = dict(np.load(runs.start(kind) / f"{optimizer}-0.npz"))
        kernel = next(name for name in before if name.endswith("kernel"))
        assert np.abs(after[optimizer][kernel] - before[kernel]).max() > 10 * TOLERANCE[kind]


def test_all_ranks_hold_the_same_bits(runs: Runs, kind: str, size: int) -> None:
    first, *others = runs.variables(kind, size)
    for other in others:
        for optimizer in OPTIMIZERS:
            for name, expected in first[optimizer].items():
                np.testing.assert_array_equal(other[optimizer][name], expected, err_msg=name)


def test_two_runs_give_the_same_bits(runs: Runs, kind: str, size: int) -> None:
    first, again = (runs.variables(kind, size, attempt)[0] for attempt in ("", "-again"))
    for optimizer in OPTIMIZERS:
        for name, expected in first[optimizer].items():
            np.testing.assert_array_equal(again[optimizer][name], expected, err_msg=name)
