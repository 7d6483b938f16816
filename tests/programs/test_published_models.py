"""Programs with published libraries for a single process: two ranks equal one process.

These tests need an environment with the packages of published.txt (`make nightly`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from harness import PROGRAMS
from published import check_equals_single, check_ranks_equal, copy_first_checkpoints, run, trained

pytestmark = pytest.mark.timeout(1200)

STEPS = 20
BATCH_SIZE = 32  # over all ranks
MODELS = {  # number of models that a program trains
    "deepctr": 13,
    "ranking": 1,
    "slim": 1,
    "wide_deep": 1,
}
# It adds penalties on rows of embeddings, with small factors, to a sum over the batch.
OPTIONS = {"deepctr": ["--loss", "sum"]}


@dataclass(frozen=True)
class Trained:
    """The results of a program, alone and on two ranks.

    Args:
      name: name of the program.
      directory: has a subdirectory for each number of ranks.
      outputs: output of all processes, by number of ranks.
    """

    name: str
    directory: Path
    outputs: dict[int, str]

    def of(self, size: int) -> Path:
        return self.directory / str(size)


def arguments(name: str, directory: Path, size: int) -> list[str]:
    program = str(PROGRAMS / f"published_{name}.py")
    options = {"model-dir": directory / "model", "batch-size": BATCH_SIZE // size, "steps": STEPS}
    return [program, *(f"--{option}={value}" for option, value in options.items())]


@pytest.fixture(scope="module", params=MODELS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Runs a program in one process, and with the same initial values on two ranks."""
    name = request.param
    results = Trained(name, tmp_path_factory.mktemp(name), {})
    for size in (1, 2):
        directory = results.of(size)
        if size > 1:
            copy_first_checkpoints(results.of(1) / "model", directory / "model")
        ran = run(directory, size, arguments(name, directory, size), OPTIONS.get(name, ()))
        results.outputs[size] = ran.stdout
    return results


def test_two_ranks_hold_the_same_bits(program: Trained) -> None:
    check_ranks_equal(program.of(2))


def test_two_ranks_on_half_batches_equal_one_process(program: Trained) -> None:
    check_equals_single(program.of(2), program.of(1))


def test_training_moves_most_variables(program: Trained) -> None:
    """Without this the other comparisons would prove little."""
    changes = []
    for path in (program.of(1) / "model").rglob("model.ckpt-0.index"):
        before = tf.train.load_checkpoint(str(path.with_suffix("")))
        for name, value in trained(program.of(1), 0).items():
            model, _, variable = name.partition(": ")
            if model == path.parent.name:
                start = before.get_tensor(variable.rpartition(":")[0])
                changes.append(np.abs(value - start).max())
    assert np.mean(np.array(changes) > 1e-3) > 0.7


@pytest.mark.parametrize("size", [1, 2])
def test_models_are_evaluated_exported_and_predict(program: Trained, size: int) -> None:
    for word in ("METRICS", "PREDICTED", "EXPORTED"):
        assert program.outputs[size].count(f"{word} ") == size * MODELS[program.name], word
    for rank in range(size):
        pattern = "export/*" if rank == 0 else f"export/.rank-{rank}/*"
        exported = list((program.of(size) / "model").rglob(f"{pattern}/saved_model.pb"))
        assert len(exported) == MODELS[program.name]


def test_adanet_trains_in_one_process(tmp_path: Path) -> None:
    ran = run(tmp_path, 1, arguments("adanet", tmp_path, 1))
    model_dir = str(tmp_path / "model")
    assert tf.train.load_variable(model_dir, "global_step") == STEPS
    assert tf.train.load_variable(model_dir, "current_iteration") == 1
    for word in ("METRICS", "PREDICTED", "EXPORTED"):
        assert f"{word} " in ran.stdout


def test_adanet_is_refused_on_ranks(tmp_path: Path) -> None:
    """The chief of AdaNet prepares each iteration alone, in a training without the other ranks."""
    ran = run(tmp_path, 2, arguments("adanet", tmp_path, 2), code=78)
    assert "Traceback" not in ran.stdout
    assert "AutoEnsembleEstimator overrides the method `train`" in ran.stdout
