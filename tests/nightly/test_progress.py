"""Progress that trainings and evaluations write, as the summary of `hostopt run` shows it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from harness import PROGRAMS, QUIET, ROOT
from launcher import Launcher
from summaries import summaries

import estimator_ext
from estimator_ext.estimator.progress import ProgressHook
from hostopt.telemetry import progress

estimator_ext.install()


def summary_of(err: str) -> dict[str, str]:
    return dict(re.findall(r"^hostopt: ([a-z_% ]+): +(.*)$", err, re.MULTILINE))


def test_a_training_with_an_evaluator(launcher: Launcher, tmp_path: Path) -> None:
    main = ROOT / "examples" / "mnist" / "main.py"
    model_dir, logs = tmp_path / "model", tmp_path / "logs"
    options = ("-np", "2", "--evaluators", "1", "--log-dir", str(logs))
    arguments = ("--steps", "300", "--model-dir", str(model_dir))
    out, err = launcher.ended(*options, "--", sys.executable, str(main), *arguments, limit_s=200)
    assert len((out + err).splitlines()) <= 25
    summary = summary_of(err)
    assert summary["steps"].startswith("0 to 300, loss ")
    assert summary["model_dir"] == f"{model_dir}, saved at 300"
    assert summary["logs"] == str(logs)
    assert summary["exit code"] == "0"
    assert re.split("  +", summary["step time"]) == [
        "input",
        "copy to accelerator",
        "forward and backward",
        "exposed communication",
        "update",
        "between steps",
        "save",
    ]
    assert len(re.findall(r"[0-9.e-]+", summary["in ms"])) == 7
    assert sum(map(int, summary["in %"].split()[:7])) == pytest.approx(100, abs=3)
    printed = re.search(r"test accuracy: ([0-9.]+)", out)
    shown = re.search(r"^accuracy ([0-9.]+) at step 300", summary["evaluation"])
    assert printed and shown and float(shown[1]) == pytest.approx(float(printed[1]), abs=1e-4)
    assert "loss = " not in err and "loss = " in (logs / "chief-0.attempt-1.log").read_text()
    tags = {tag for _, tag, _ in summaries(model_dir)}
    assert {"step_ms/input", "step_ms/update", "step_ms/save"} <= tags


def test_a_training_that_is_restarted(launcher: Launcher, tmp_path: Path) -> None:
    settings = {
        "model_dir": str(tmp_path),
        "optimizers": ["adam"],
        "steps": 9,
        "checkpoint_steps": 2,
        "fault": {"point": "between-updates", "step": 5, "action": "kill", "slot": 1},
    }
    program = (str(PROGRAMS / "train_with_fault.py"), json.dumps(settings))
    _, err = launcher.ended(
        "-np", "2", "--max-restarts", "3", "--", *program, limit_s=200, **QUIET
    )
    summary = summary_of(err)
    assert summary["steps"].startswith("0 to 9")
    assert re.fullmatch(r"0:\d\d, attempt 2 resumed at 4", summary["time"])


def test_steps_are_counted_over_several_calls_of_train(launcher: Launcher, tmp_path: Path) -> None:
    program = (str(PROGRAMS / "several_trainings.py"), str(tmp_path))
    _, err = launcher.ended("-np", "2", "--", *program, limit_s=100, **QUIET)
    summary = summary_of(err)
    assert summary["steps"].startswith("0 to 7, loss ")
    assert summary["evaluation"] == "loss 3 at step 7; best 2 at step 3"


@pytest.mark.parametrize("size", [1, 2])
def test_an_input_that_is_too_slow_is_named(launcher: Launcher, tmp_path: Path, size: int) -> None:
    program = (str(PROGRAMS / "slow_input.py"), str(tmp_path))
    out, err = launcher.ended("-np", str(size), "--", *program, limit_s=100, **QUIET)
    assert out == ""
    summary = summary_of(err)
    assert summary["in %"].endswith("  input-bound")
    assert float(summary["in ms"].split()[0]) > 20
    speed = re.fullmatch(r"([0-9.]+) steps/s, ([0-9,]+) examples/s", summary["speed"])
    examples_per_step = float(speed[2].replace(",", "")) / float(speed[1])
    assert examples_per_step == pytest.approx(8 * size, rel=0.1)


@pytest.mark.parametrize(
    ("summary_steps", "launched", "needed"),
    [(0, False, False), (100, False, True), (0, True, True)],
)
def test_nothing_is_measured_that_nobody_reads(
    monkeypatch: pytest.MonkeyPatch, summary_steps: int, launched: bool, needed: bool
) -> None:
    monkeypatch.setattr(progress, "_path", None)
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    if launched:
        monkeypatch.setenv(progress.VARIABLE, "progress.json")
    assert ProgressHook({}, None, 1, [], "", summary_steps).is_needed == needed
