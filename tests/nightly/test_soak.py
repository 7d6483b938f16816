"""Plans, checks and tables of the soak, without any training."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import ROOT, until

sys.path.insert(0, str(ROOT))

from benchmarks import page
from benchmarks.soak import checks, faults, notes, report
from benchmarks.soak.faults import KINDS, Expected
from benchmarks.soak.recovery import has_settled, recovery, steps_by_process
from benchmarks.soak.training import Training

# --- plan and catalogue -----------------------------------------------------------------------


def first(count: int, seed: int) -> list[faults.Fault]:
    return list(itertools.islice(faults.make_plan(seed, list(KINDS), 2), count))


def test_a_seed_determines_the_plan_and_all_kinds_are_equally_frequent() -> None:
    plan = first(100, 7)
    assert plan == first(100, 7) != first(100, 8)
    assert plan[:20] == first(20, 7)
    for count in (len(KINDS), 100):
        chosen = [fault.kind for fault in plan[:count]]
        often = [chosen.count(kind) for kind in KINDS]
        assert max(often) - min(often) <= 1
    assert {fault.rank for fault in plan} == {0, 1}
    assert {fault.kind for fault in plan} == set(KINDS)


def test_the_readme_lists_all_kinds_with_their_expected_outcome() -> None:
    text = (ROOT / "benchmarks/soak/README.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    expected = {row[0].strip("| `"): row[-1].rstrip(" |") for row in rows}
    assert expected == {name: str(kind.expected) for name, kind in KINDS.items()}
    assert {kind.group for kind in KINDS.values()} == set(faults.GROUPS)


# --- what followed ----------------------------------------------------------------------------


def note(kind: str, time_s: float, pid: int, **attributes: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time_s, "pid": pid, **attributes}


def step(time_s: float, number: int, pid: int) -> dict[str, Any]:
    return note("step", time_s, pid, step=number)


ERROR = note("error", 12.5, 2, error="PeerLostError", text="rank 1")
NOTES = [step(9.0, 8, 1), step(11.0, 9, 1), ERROR]
NOTES += [step(20.0, 8, 3), step(21.0, 9, 3), step(22.0, 10, 3)]


def test_a_recovery_ends_with_the_first_new_step() -> None:
    assert "recovered_s" not in recovery(10.0, NOTES[:-1])
    assert "first_step" not in recovery(10.0, NOTES[:3])
    assert recovery(10.0, NOTES) == {
        "error": "PeerLostError",
        "text": "rank 1",
        "detected_s": 2.5,
        "last_step": 9,
        "first_step": 8,
        "again": 2,
        "recovered_s": 12.0,
    }


def test_a_training_has_recovered_with_a_checkpoint_after_the_fault() -> None:
    old, early, beyond = (
        note("saved", t, p, step=s) for t, p, s in ((9, 1, 8), (21, 3, 9), (23, 3, 10))
    )
    assert not has_settled(10.0, 1, False, [*NOTES[:2], old])
    assert has_settled(10.0, 1, False, [*NOTES[:2], note("saved", 11.5, 1, step=9)])
    assert not has_settled(10.0, 1, True, [*NOTES[:2], note("saved", 11.5, 1, step=9)])
    for restart_is_wanted in (False, True):
        assert not has_settled(10.0, 1, restart_is_wanted, [*NOTES, early])
        assert has_settled(10.0, 1, restart_is_wanted, [*NOTES, early, beyond])


def test_a_process_is_drawn_with_one_point_per_second() -> None:
    steps = [step(100.0 + n / 4, n, 1) for n in range(9)] + [step(104.0, 5, 2)]
    assert steps_by_process(steps, 100.0) == {1: [[0.0, 0], [1.0, 4], [2.0, 8]], 2: [[4.0, 5]]}


# --- checks -----------------------------------------------------------------------------------


def attempt(**codes: int) -> dict[str, Any]:
    return {"codes": {f"{job}:0": code for job, code in codes.items()}}


ONE_KILLED = Expected(None, (137,), (200,))
ENDS = Expected(74, (74,), (74,))


@pytest.mark.parametrize(
    ("expected", "code", "attempts", "wrong"),
    [
        (ONE_KILLED, None, [attempt(chief=200, worker=137)], []),
        (ONE_KILLED, None, [attempt(chief=137, worker=200)], ["chief:0", "worker:0"]),
        (ONE_KILLED, None, [], ["no rank ended"]),
        (ONE_KILLED, None, [attempt(chief=200, worker=137)] * 2, ["2 attempts ended, wanted 1"]),
        (
            ONE_KILLED,
            74,
            [attempt(chief=200, worker=137)],
            ["launcher: code 74, wanted keeps running"],
        ),
        (ENDS, 1, [attempt(chief=74, worker=74)], ["launcher: code 1, wanted code 74"]),
        (ENDS, 74, [attempt(chief=74, worker=74), attempt(evaluator=143)], []),
        (ENDS, 74, [attempt(chief=74, worker=74), attempt(evaluator=1)], ["evaluator:0: code 1"]),
        (Expected(), None, [], []),
        (Expected(), None, [attempt(chief=200, worker=200)], ["1 attempts ended, wanted 0"]),
        (Expected(), None, [attempt(evaluator=1)], ["evaluator:0: code 1"]),
        (Expected(evaluators=(137,)), None, [attempt(evaluator=137)], []),
        (Expected(evaluators=(137,)), None, [], ["no evaluator ended"]),
    ],
)
def test_exit_codes_are_documented_or_reported_as_wrong(
    expected: Expected, code: int | None, attempts: list[dict[str, Any]], wrong: list[str]
) -> None:
    result = checks.wrong_codes(expected, "worker:0", code, attempts)
    assert len(result) == len(wrong)
    assert all(one.startswith(other) for one, other in zip(result, wrong))


GROWING = [500.0 + 20 * n for n in range(15)]


def samples(megabytes: list[float]) -> list[dict[str, Any]]:
    return [{"chief:0": {"descriptors": 20, "mb": mb}} for mb in megabytes]


def test_growth_from_the_first_third_to_the_last_is_reported() -> None:
    few, flat, grown = (
        checks.growth(samples(megabytes))
        for megabytes in (
            [500.0, 900.0],
            [500.0, 700.0, 510.0] * 5,
            [500.0 + 20 * n for n in range(15)],
        )
    )
    assert [row["flat"] for row in few] == [None, None]  # too few samples
    assert [row["flat"] for row in flat] == [True, True]
    assert [row["flat"] for row in grown] == [True, False]
    assert grown[1] == {
        "role": "chief:0",
        "measure": "mb",
        "first": 540.0,
        "last": 740.0,
        "most": 780.0,
        "flat": False,
    }


def test_files_without_a_checkpoint_are_reported(tmp_path: Path) -> None:
    assert checks.leftovers(tmp_path) == set()
    (tmp_path / "checkpoint").write_text(
        'model_checkpoint_path: "model.ckpt-9"\nall_model_checkpoint_paths: "model.ckpt-9"\n'
    )
    kept = ["graph.pbtxt", "model.ckpt-9.index", "model.ckpt-9.input", "eval"]
    left = ["model.ckpt-12_temp", "model.ckpt-12.input.tmp", "model.ckpt-1.index"]
    for name in kept + left:
        (tmp_path / name).touch()
    assert checks.leftovers(tmp_path) == set(left)


# --- processes --------------------------------------------------------------------------------


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path / "soak")
    yield training
    training.close()


def test_a_process_is_found_after_its_parents_have_ended(training: Training) -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'])"
    keep, give = os.pipe()
    environ = {**os.environ, notes.VARIABLE: training.journal.name}
    subprocess.run([sys.executable, "-c", child], env=environ, stdin=keep, check=True)
    (orphan,) = training.orphans()
    training.kill_all()
    assert not psutil.pid_exists(orphan.pid) or orphan.status() == psutil.STATUS_ZOMBIE
    assert training.orphans() == []
    os.close(keep)
    os.close(give)


def test_processes_report_events_and_receive_commands(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, asked, received = training.journal, threading.Event(), []
    monkeypatch.setenv(notes.VARIABLE, journal.name)
    events = notes.Notes("chief:0")
    events.add("start", address="127.0.0.1:1")
    events.add("step", step=1)
    events.add("saved", step=1)
    events.add("step", step=2)
    until(lambda: len(journal.read()) == 4, "notes")
    assert [note["kind"] for note in journal.begin_chapter()] == ["start", "step", "saved", "step"]
    assert [note["step"] for note in journal.read()] == [2]
    assert training.pid("chief:0") == os.getpid()
    notes.listen(lambda fault: (received.append(fault), asked.set()))
    journal.ask(os.getpid(), "hang")
    assert asked.wait(15)
    assert received == ["hang"]


# --- results ----------------------------------------------------------------------------------


def results(**fault: Any) -> dict[str, Any]:
    common = {"kind": "kill", "at_s": 10.0, "rank": 1, "time": 10.0, "files": 20, "problems": []}
    return {
        "machine": {},
        "minutes": 1.0,
        "begun": 0.0,
        "faults": [{**common, **fault}],
        "growth": checks.growth(samples(GROWING)[:2]),
        "lives": [],
        "end": {"exit_code": 143, "steps": 10, "difference": None},
    }


def test_a_table_has_a_row_for_each_kind() -> None:
    result = results(**recovery(10.0, NOTES))
    text = report.tables(json.loads(json.dumps(result)))
    assert "1 faults of 1 kinds in 1 minutes, 10 steps; ended by SIGTERM" in text
    assert "equal, bit for bit" in text
    row = "| kill | ranks 137, 200; launcher keeps running | 1 of 1 | 2.5, 2.5 | 12.0, 12.0 | 2 |"
    assert row in text
    assert "| chief:0 | mb | 500 | 520 | 520 |" in text
    assert "Not as expected" not in text
    assert report.verdict(result) == []


def test_every_failure_is_reported() -> None:
    result = results(problems=["launcher: code 1, wanted 74"])
    result["growth"] = checks.growth(samples(GROWING))
    result["end"] = {"exit_code": 1, "steps": 10, "difference": "kernel has other values"}
    assert report.verdict(result) == [
        "kill at 10 s: launcher: code 1, wanted 74",
        "chief:0: mb grew from 540 to 740",
        "ended by SIGTERM with exit code 1, wanted 143",
        "the trainings differ: kernel has other values",
    ]
    text = report.tables(result)
    assert "| 0 of 1 |" in text
    assert "**different**: kernel has other values" in text
    assert "- kill at 10 s: launcher: code 1, wanted 74" in text
    assert report.verdict({**result, "faults": [], "growth": [], "end": None}) == [
        "the soak was interrupted, and nothing was compared"
    ]


def test_the_published_results_can_be_drawn(tmp_path: Path) -> None:
    from benchmarks import common

    soak = page._load(ROOT / "benchmarks/soak/main.py")
    result = json.loads((ROOT / "benchmarks/soak/results.json").read_text())
    common.draw(tmp_path / "soak.png", lambda axes: soak.paint(result, axes))
    assert (tmp_path / "soak.png").stat().st_size > 1000
