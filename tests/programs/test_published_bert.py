"""Unmodified programs of bert-tensorflow and albert-tensorflow from PyPI."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from harness import ROOT
from published import check_equals_single, check_ranks_equal, copy_first_checkpoints, run

sys.path.insert(0, str(ROOT / "examples" / "bert"))
from make_data import make_data

PROGRAMS = {
    "run_classifier": ["-m", "bert.run_classifier"],
    "run_pretraining": ["-m", "bert.run_pretraining"],
    "run_squad": ["-m", "bert.run_squad"],
    "run_albert_classifier": [str(ROOT / "examples" / "bert" / "run_albert_classifier.py")],
}
# the runner would find this by itself, but the tests run a program that saves the variables, too
OPTIONS = {"run_classifier": ["--v1"], "run_albert_classifier": ["--v1"]}
STEPS = 20
# Biases that are added to all inputs of a softmax, and so have no effect.
CANCELLED = re.compile(r"/key/bias:|squad/output_bias:")
# The flag that makes each program train that many steps.
LENGTHS = {
    "run_classifier": "--num_train_epochs=1",
    "run_pretraining": f"--num_train_steps={STEPS}",
    "run_squad": "--num_train_epochs=2",
    "run_albert_classifier": "--num_train_epochs=1",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    make_data(directory)
    program = ["-m", "bert.create_pretraining_data"]
    run(directory, 1, [*program, f"--flagfile={directory}/create_pretraining_data.flags"])
    return directory


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_ranks_train_evaluate_and_predict_as_one(
    data: Path, tmp_path: Path, name: str
) -> None:
    outputs = []
    for size in (1, 2):
        directory = tmp_path / str(size)
        model_dir = directory / "model"
        if size == 2:
            copy_first_checkpoints(tmp_path / "1", directory)
        flags = [f"--flagfile={data}/{name}.flags", f"--output_dir={model_dir}", LENGTHS[name]]
        # in a cluster also for one rank, so that both have the same learning rates
        run(directory, size, [*PROGRAMS[name], *flags], OPTIONS.get(name, ()), is_cluster=True)
        assert tf.train.load_variable(str(model_dir), "global_step") == STEPS
        outputs.append(results(name, model_dir))
    check_ranks_equal(tmp_path / "2")
    check_equals_single(tmp_path / "2", tmp_path / "1", noise=CANCELLED)
    assert outputs[0] == pytest.approx(outputs[1], rel=1e-4)


def results(name: str, model_dir: Path) -> dict[str, float]:
    """Reads the results of evaluation or prediction."""
    if name == "run_squad":
        questions = json.loads((model_dir / "predictions.json").read_text())
        return {"answers": len(questions)}
    lines = (model_dir / "eval_results.txt").read_text().splitlines()
    values = {key: float(value) for key, value in (line.split(" = ") for line in lines)}
    if "classifier" in name:
        rows = (model_dir / "test_results.tsv").read_text().splitlines()
        values["predictions"] = len(rows)
    return values
