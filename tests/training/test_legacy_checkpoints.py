"""Checkpoints of all released versions, with either TensorFlow, are restored and trained on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from legacy_sets import LAST_STEP, SAVED_BY, SAVED_STEP, SETS, train
from ranks import Ranks

Values = dict[str, np.ndarray]


def values(path: Path, name: str) -> Values:
    with np.load(path / f"{name}.npz") as arrays:
        return dict(arrays)


def elements(path: Path, size: int) -> list[list[list[int]]]:
    """Returns the batches of each rank."""
    return [json.loads((path / f"elements-{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize(
    ("size", "cases"),
    [(2, ["adam", "scaled", "local", "divided"]), (1, ["local", "divided", "stock"])],
    ids=["two_ranks", "one_rank"],
)
@pytest.mark.parametrize(
    "legacy", sorted(SETS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_a_training_resumes(
    ranks: Ranks, tmp_path: Path, legacy: Path, size: int, cases: list[str]
) -> None:
    for case in cases:
        shutil.copytree(legacy / case / "model", tmp_path / case / "model")
    output = train(ranks, tmp_path, size, cases)
    starts_over = []
    for case in cases:
        check_restored(case, tmp_path / case, legacy / case, size)
        if SAVED_BY[case] == size:
            check_continued(case, tmp_path / case, legacy / case, size)
        else:
            check_trained(case, tmp_path / case, legacy / case, size)
            reason = f"saved by {SAVED_BY[case]} ranks, and now there are {size}"
            starts_over.append((case, reason))
        if case == "stock":
            starts_over.append((case, "saved without their state"))
    said = r"the data are read from the beginning: \S+/(\w+)/model/model.ckpt-4 was (.*)"
    assert re.findall(said, output) == starts_over


def check_restored(case: str, directory: Path, legacy: Path, size: int) -> None:
    """Checks the values with which each rank begins, bit for bit."""
    saved = values(legacy, f"values-{SAVED_STEP}")
    assert saved["global_step"] == SAVED_STEP
    divided = {name for name in saved if "/Adam" in name and case == "divided" and size > 1}
    for rank in range(size):
        found = values(directory, f"begin-{rank}")
        assert found.keys() == saved.keys() - divided
        for name, value in found.items():
            assert (value.dtype, value.tobytes()) == (saved[name].dtype, saved[name].tobytes())


def check_continued(case: str, directory: Path, legacy: Path, size: int) -> None:
    """Checks that the data continue, and that nothing shows that a training was interrupted."""
    if case != "stock":  # which reads the same batch again and again
        unbroken = [batches[len(batches) // 2 :] for batches in elements(legacy, size)]
        assert elements(directory, size) == unbroken
    last = f"values-{LAST_STEP}"
    check_close(values(directory, last), values(legacy, last))


def check_trained(case: str, directory: Path, legacy: Path, size: int) -> None:
    """Checks a training by another number of ranks, which begins with the first elements."""
    found, of_ranks = values(directory, f"values-{LAST_STEP}"), elements(directory, size)
    if size == SAVED_BY["adam"]:  # which has the same pipeline
        steps = LAST_STEP - SAVED_STEP
        assert of_ranks == [each[:steps] for each in elements(legacy.parent / "adam", size)]
    saved = values(legacy, f"values-{SAVED_STEP}")
    if case == "divided":
        check_close(found, adam(saved, np.mean(of_ranks, axis=(0, 2))))
    else:
        assert found["global_step"] == LAST_STEP
        assert [name for name, value in saved.items() if np.all(value == found[name])] == []


def check_close(found: Values, wanted: Values) -> None:
    """Compares values that another TensorFlow may round in another way."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def adam(saved: Values, means: np.ndarray) -> Values:
    """Returns the values after a step with the mean of each batch (Kingma and Ba 2015)."""
    new = {name: value.astype(np.float64) for name, value in saved.items()}
    for mean in means:
        unbias = np.sqrt(1 - new["beta2_power"]) / (1 - new["beta1_power"])
        for name, factors in ("weights", np.arange(1, 8) / 8), ("bias", np.ones(())):
            m, v, gradient = f"{name}/Adam", f"{name}/Adam_1", mean * factors
            new[m] = 0.9 * new[m] + 0.1 * gradient
            new[v] = 0.999 * new[v] + 0.001 * gradient**2
            new[name] = new[name] - unbias / 16 * new[m] / (np.sqrt(new[v]) + 1e-8)
        new["beta1_power"] = 0.9 * new["beta1_power"]
        new["beta2_power"] = 0.999 * new["beta2_power"]
        new["global_step"] = new["global_step"] + 1
    return new
