"""The labs in examples: real processes train them, and the numbers they report are checked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import run_python
from lab_runs import (
    ALONE,
    BROADCAST,
    DISTRIBUTED,
    EXAMPLES,
    SHARDED,
    assert_is_picture,
    assert_ways_send_less_and_less,
    run,
)
from ranks import Ranks

DRAWS = {"MPLBACKEND": "Agg"}
NOTEBOOK = EXAMPLES / "linear_regression" / "lab.ipynb"
WORKERS = 2  # three would only take longer
# far above rounding errors, far below the distance of workers that are not synchronized
APART = 0.01


# --- linear regression ---------------------------------------------------------------------------


def paths_in(directory: str) -> dict[int, np.ndarray]:
    """Returns the paths of the workers by stage, [workers, steps + 1, 2]."""
    numbers = json.loads(Path(directory, "paths.json").read_text())
    return {int(stage): np.array(paths) for stage, paths in numbers.items()}


@pytest.fixture(scope="module")
def notebook() -> tuple[str, str]:
    """Directories of the two runs that the notebook makes: with two workers here, and with one."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program = "\n\n".join([*code, "print(output, alone, sep=chr(10))"])
    program = program.replace("WORKERS = 3", f"WORKERS = {WORKERS}")
    lines = run_python("-c", program, cwd=NOTEBOOK.parent, **DRAWS).stdout.splitlines()
    return lines[-2], lines[-1]


def test_the_notebook_has_the_format_that_jupyter_reads() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_workers_of_linear_regression_differ_until_gradients_are_averaged(
    notebook: tuple[str, str],
) -> None:
    paths = paths_in(notebook[0])
    for stage in (ALONE, SHARDED, BROADCAST):
        distances = np.linalg.norm(paths[stage][0] - paths[stage][1], axis=-1)
        assert (distances[0] == 0) == (stage == BROADCAST)
        assert distances[1:].min() > APART
    np.testing.assert_array_equal(paths[DISTRIBUTED][0], paths[DISTRIBUTED][1])


def test_linear_regression_takes_the_path_of_one_process(notebook: tuple[str, str]) -> None:
    together, alone = (paths_in(directory)[DISTRIBUTED] for directory in notebook)
    assert (len(together), len(alone)) == (WORKERS, 1)
    np.testing.assert_allclose(together[0], alone[0], rtol=0, atol=1e-5)


def test_linear_regression_draws_each_stage(notebook: tuple[str, str]) -> None:
    for name in ("stage0", "stage1", "stage2", "stage3", "stages"):
        assert_is_picture(Path(notebook[0], f"{name}.png"))


# --- MNIST with Keras ----------------------------------------------------------------------------


def test_keras_mnist_learns_the_digits(ranks: Ranks, tmp_path: Path) -> None:
    learning_rate = 0.02
    arguments = ["--output", tmp_path, "--epochs", 2, "--warmup-epochs", 2]
    arguments += ["--batch-size", 32, "--learning-rate", learning_rate]
    outputs = run(ranks, "keras_mnist", 2, *arguments)

    reported = [re.search(rf"^rank {rank}: (.*)$", outputs[rank], re.M)[1] for rank in range(2)]
    assert reported[0] == reported[1]
    history = json.loads((tmp_path / "history.json").read_text())
    assert history["workers"] == 2
    metrics = history["metrics"]
    assert f"val_accuracy {metrics['val_accuracy'][-1]:.4f}" in reported[0]
    are_few = "small digits" in outputs[0]  # there is no MNIST
    assert metrics["val_accuracy"][-1] > (0.5 if are_few else 0.93)
    # from one worker's to twice as much, so it is halfway after the first of two epochs
    np.testing.assert_allclose(metrics["lr"], [1.5 * learning_rate, 2 * learning_rate])
    assert (tmp_path / "model.weights.h5").exists()

    picture = tmp_path / "runs.png"
    file = tmp_path / "history.json"
    run_python(EXAMPLES / "keras_mnist" / "plot.py", file, file, "--output", picture, **DRAWS)
    assert_is_picture(picture)


# --- a slow link ---------------------------------------------------------------------------------


def test_slow_link_trains_in_each_way(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ["--output", tmp_path, "--steps", 30, "--every", 10, "--hidden", 16]
    outputs = run(ranks, "slow_link", 2, *arguments)
    assert_ways_send_less_and_less(tmp_path, 30, 10)
    assert len(re.findall(r"MB sent, test accuracy", outputs[0])) == 4
    assert "MB sent" not in outputs[1]


# --- a residual network as an Estimator ----------------------------------------------------------


def train_imagenet(ranks: Ranks, size: int, model_dir: Path, steps: int) -> dict[str, Any]:
    """Trains with ranks, which must end with the same variables.

    Returns:
      Numbers of the steps.
    """
    arguments = ["--image-size", 32, "--classes", 10, "--width", 8, "--batch-size", 8]
    arguments += ["--warmup-steps", 8, "--learning-rate", 0.02]
    arguments += ["--model-dir", model_dir, "--steps", steps]
    outputs = run(ranks, "imagenet_cnn", size, *arguments)
    speeds, variables = [], []
    for rank, output in enumerate(outputs):
        line = re.search(rf"^rank {rank}: ([\d.]+) images/s, variables (\w+)$", output, re.M)
        speeds.append(float(line[1]))
        variables.append(line[2])
    assert len({*variables}) == 1
    total = re.search(rf"^total: ([\d.]+) images/s on {size} workers$", outputs[0], re.M)
    assert float(total[1]) == pytest.approx(sum(speeds), abs=0.2)
    assert (model_dir / f"model.ckpt-{steps}.index").exists()
    assert_is_picture(model_dir / "steps.png")
    return json.loads((model_dir / "steps.json").read_text())


def test_imagenet_cnn_warms_up_and_resumes_with_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    numbers = train_imagenet(ranks, 2, tmp_path, 12)
    assert numbers["step"] == [*range(12)]
    expected = [0.02 + 0.02 * min(step / 8, 1) for step in range(12)]
    np.testing.assert_allclose(numbers["learning_rate"], expected, rtol=1e-6)
    assert np.mean(numbers["loss"][-3:]) < np.mean(numbers["loss"][:3])

    resumed = train_imagenet(ranks, 1, tmp_path, 15)
    assert resumed["step"] == [12, 13, 14]
    np.testing.assert_allclose(resumed["learning_rate"], 0.02)
    assert np.mean(resumed["loss"]) < np.mean(numbers["loss"][:3])
