"""The line of a run while it trains, its summary, and which lines of tasks are shown."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from clocks import Clock
from progress_notes import EVALUATION, TRAINING

from hostopt.launch import monitor
from hostopt.launch.monitor import LineFilter, Monitor, describe, summarize
from hostopt.telemetry.progress import VARIABLE, main_metric, read_progress, write_progress

# What tasks print on standard error, each line with True if it is shown.
LINES = [
    ("INFO:tensorflow:Using config: {'_session_config': device_count {", False),
    ('  key: "CPU"', False),
    ("}", False),
    (", '_keep_checkpoint_max': 5}", False),
    ("loss: 0.1", True),
    ("a line of the program", True),
    ("  indented", True),
    ("INFO:tensorflow:loss = 0.1, step = 100", False),
    ("  indented", False),
    ("I0000 00:00:1795524666.227085    6803 port.cc:153] oneDNN custom operations", False),
    ("2026-01-01 00:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN", False),
    ("2026-01-01 00:00:00.123456: W tensorflow/core/data.cc:1] no memory", True),
    ("WARNING: All log messages before absl::InitializeLog() is called are written", False),
    ("E0000 00:00:1.2 721 cuda_platform.cc:52] failed call to cuInit", False),
    ("E0000 00:00:1.2 721 rpc.cc:52] a connection is lost", True),
    ("E0000 00:00:1.2 721 cuda_driver.cc:1] CUDA_ERROR_OUT_OF_MEMORY", True),
    ("WARNING:tensorflow:my metric is deprecated", True),
    ("WARNING:tensorflow:From a.py:1: f (from b) is deprecated and will be removed", False),
    ("Instructions for updating:", False),
    ("Use something else.", False),
    ("WARNING:tensorflow:the ranks differ", True),
    ("WARNING:tensorflow:the ranks differ", False),
    ("ERROR:tensorflow:the disk is full", True),
    ("INFO:tensorflow:an open brace: {", False),
    ("a line of the program", True),
    ("INFO:tensorflow:Using config: {'_master': ''}", False),
    ("loss: 0.1", True),
    ("INFO:tensorflow:Using config: {'_session_config': allow_soft_placement: true", False),
    ("graph_options {", False),
    ("Fatal Python error: Segmentation fault", True),
    ("I1124 00:00:00.1 1 estimator.py:1] Using config: {'_session_config': a: true", False),
    ("log_device_placement: true", False),
    ("ERROR:tensorflow:the disk is full", True),
    ("a line of the program", True),
    ("WARNING:tensorflow:From a.py:1: g (from b) is deprecated and will be removed", False),
    ("Instructions for updating:", False),
    ("Traceback (most recent call last):", True),
    ('  File "main.py", line 1, in <module>', True),
    ("INFO:tensorflow:of another thread", False),
    ('  File "other.py", line 2, in f', True),
    ("ValueError: {'a': 1", True),
    ("after an open brace", True),
    ("To enable the following instructions: AVX2 FMA, in other operations, rebuild", False),
    (
        "W0000 00:00:1.2 7 local_rendezvous.cc:412] Local rendezvous is aborting with status: "
        "OUT_OF_RANGE: End of sequence",
        False,
    ),
    ("\t [[{{node IteratorGetNext}}]]", False),
    (
        "W0000 00:00:1.2 7 local_rendezvous.cc:412] Local rendezvous is aborting with status: "
        "INVALID_ARGUMENT: Incompatible shapes",
        True,
    ),
    ("I0000 00:00:12.3 7 worker_impl.cc:190] Worker registered. Worker config: goo.gle", False),
    ("port: 39689", False),
    ('protocol: "grpc"', False),
    ("", False),
    ("loss: 0.1", True),
    ("2026-01-01 00:00:00.1: I tensorflow/core/data/service/a.cc:1] with config: port: 1", False),
    ('protocol: "grpc"', False),
    ("a line of the program", True),
    ("loss: 0.1", True),
]


def test_lines_that_only_inform_are_hidden() -> None:
    shown = LineFilter()
    assert [(line, shown.shows(f"{line}\n".encode())) for line, _ in LINES] == LINES


def test_the_line() -> None:
    assert describe(1, {1: TRAINING}, EVALUATION) == (
        "step 500 of 2000 (25 %), 0:15 left, 100 steps/s, 6,400 examples/s, loss 0.25, accuracy "
        "0.9 at 450, saved at 450, communication 2 ms, 75 % hidden, slowest rank 1"
    )
    resumed = {**TRAINING, "first_step": 450, "resumed_step": 450}
    assert describe(2, {1: TRAINING, 2: resumed}, {}).startswith(
        "attempt 2, resumed at 450, step 500"
    )
    assert describe(2, {1: TRAINING}, {}) == "attempt 2 starts"
    first = {"step": 3, "last_step": None}
    evaluation = {"step": 2, "metric": "loss", "value": 0.5}
    assert describe(1, {1: first}, evaluation) == "step 3, loss 0.5 at 2"
    assert "0:00 left" in describe(1, {1: {**TRAINING, "step": 2100}}, {})
    ended = {"step": 9, "last_step": 9, "steps_per_s": 2.0, "is_ended": True}
    assert describe(1, {1: ended}, evaluation) == "step 9 of 9 (100 %), loss 0.5 at 2"


def test_the_summary() -> None:
    lines = dict(summarize({1: TRAINING}, EVALUATION, 3725.0))
    assert lines == {
        "steps": "0 to 500, loss 0.25",
        "time": "1:02:05",
        "speed": "90 steps/s, 5,760 examples/s",
        "communication": "2 ms, 75 % hidden, slowest rank 1",
        "step time": " input  forward and backward  update",
        "in ms": "     1                     8       1",
        "in %": "    10                    80      10",
        "evaluation": "accuracy 0.9 at step 450; best 0.95 at step 300",
        "model_dir": "/models/digits, saved at 450",
    }
    times_ms = {"input": 5.0, "update": 5.0}
    slow = {**TRAINING, "first_step": 450, "resumed_step": 450, "times_ms": times_ms}
    lines = dict(summarize({1: TRAINING, 2: slow}, {}, 1.0))
    assert lines["steps"] == "0 to 500, loss 0.25"
    assert lines["time"] == "0:01, attempt 2 resumed at 450"
    assert lines["in %"] == "    50      50  input-bound"
    traced = {**TRAINING, "timeline": "/traces/trace.rank0.json"}
    assert dict(summarize({1: traced}, {}, 1.0))["timeline"] == "/traces/trace.rank0.json"


def test_the_newest_attempt_and_evaluation_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = Monitor(str(tmp_path), None, verbose=False)
    (tmp_path / "error.txt").write_text("other files are ignored")
    for attempt, step in ((1, 40), (2, 30)):
        training = {**TRAINING, "step": step}
        path = Path(shown.progress_file(("chief", 0), attempt))
        path.write_text(json.dumps({"training": training}))
    for index, step in ((0, 25), (1, 20)):
        values = {"value": step / 10, "best": step / 10, "best_step": step}
        evaluation = {"step": step, "metric": "loss", **values}
        path = Path(shown.progress_file(("evaluator", index), 1))
        path.write_text(json.dumps({"evaluation": evaluation}))
    Path(shown.progress_file(("worker", 0), 1)).write_text("{")  # not the whole file
    shown.finish(137, "worker:0: exit code 137 (SIGKILL)")
    monitor.output.flush()
    err = capfd.readouterr().err
    assert re.search("^hostopt: steps: +0 to 30, loss 0.25$", err, re.MULTILINE)
    assert re.search(r"^hostopt: evaluation: +loss 2.5 at step 25$", err, re.MULTILINE)
    assert err.splitlines()[-1].endswith("137, root cause: worker:0: exit code 137 (SIGKILL)")


@pytest.mark.parametrize(
    ("is_ended", "begin"),
    [(False, "no step for 0:30, step 500 of 2000"), (True, "training ended 0:30 ago, step 500")],
)
def test_a_line_without_a_new_step(
    is_ended: bool, begin: str, tmp_path: Path, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    clock.govern(monitor)
    shown = Monitor(str(tmp_path), None, verbose=False)
    path = Path(shown.progress_file(("chief", 0), 1))
    path.write_text(json.dumps({"training": {**TRAINING, "is_ended": is_ended}}))
    for _ in range(2):
        clock.advance(monitor._PLAIN_S)
        shown.advance()
    monitor.output.flush()
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("hostopt: step 500 of 2000")
    assert second.startswith(f"hostopt: {begin}")


def test_progress_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.json"
    monkeypatch.setenv(VARIABLE, str(path))
    write_progress("training", {"step": 1})
    write_progress("evaluation", {"step": 1})
    write_progress("training", {"step": 2})
    assert read_progress(str(path)) == {"training": {"step": 2}, "evaluation": {"step": 1}}
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert VARIABLE not in os.environ  # processes that this one starts do not write to it
    write_progress("training", {"step": object()})  # no JSON
    assert read_progress(str(path))["training"] == {"step": 2}
    monkeypatch.setenv(VARIABLE, str(tmp_path / "missing" / "progress.json"))
    write_progress("training", {"step": 3})
    assert read_progress(str(tmp_path / "missing" / "progress.json")) == {}


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"loss": 0.5, "accuracy": 0.25}, ("accuracy", 0.25, 1)),
        ({"loss": 0.5, "mean": 1.0}, ("loss", 0.5, -1)),
    ],
)
def test_the_main_metric(metrics: dict[str, float], shown: tuple[str, float, int]) -> None:
    assert main_metric(metrics) == shown
