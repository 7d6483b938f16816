"""What the benchmarks compute from times, and how they run programs; nobody measures here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import common, network, page  # noqa: E402


def load(name: str) -> Any:
    return page._load(ROOT / "benchmarks" / name / "main.py")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


# --- programs ---------------------------------------------------------------------------------


def test_a_program_gives_its_results() -> None:
    text = common.run(
        python("""
            from benchmarks import common
            print("[worker:0] ", end="")
            common.report(steps_per_s=2.5)
        """),
        60.0,
    )
    assert common.results_in(text, 1) == [{"steps_per_s": 2.5}]
    with pytest.raises(common.BenchmarkError, match="wanted 2 results, got 1"):
        common.results_in(text, 2)


def test_results_may_share_a_line_but_not_their_letters() -> None:
    assert common.results_in('x RESULT {"a": 1} ENDRESULT {"a": 2} END\n', 2) == [
        {"a": 1},
        {"a": 2},
    ]
    with pytest.raises(common.BenchmarkError, match="garbled"):
        common.results_in('RESULT {"a": RESULT {"a": 1} END', 1)


def test_a_failure_shows_the_last_words() -> None:
    with pytest.raises(common.BenchmarkError, match=r"exit code 3\n.*no such thing"):
        common.run(python("import sys; print('no such thing', file=sys.stderr); sys.exit(3)"), 60)


def test_what_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"""
        import pathlib, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path({str(pid)!r}).write_text(str(child.pid))
        child.wait()
    """
    with pytest.raises(common.BenchmarkError, match="took longer than 2 s"):
        common.run(python(code), 2.0)
    deadline_s = time.monotonic() + 10
    while psutil.pid_exists(int(pid.read_text())):
        if psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE:
            break
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_rank_that_failed_is_blamed_not_those_that_were_ended() -> None:
    sleeper = python("import time; time.sleep(600)")
    with pytest.raises(common.BenchmarkError, match="exit code 7"):
        common.run_together([(sleeper, {}), (python("raise SystemExit(7)"), {})], 60.0)


def test_rounds_are_interleaved_and_a_failure_costs_one_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []

    def good() -> int:
        calls.append("good")
        return len(calls)

    def bad() -> int:
        calls.append("bad")
        if len(calls) < 3:
            raise common.BenchmarkError("too weak")
        return len(calls)

    def never() -> int:
        raise common.BenchmarkError("not today")

    found = common.in_rounds({"good": good, "bad": bad, "never": never}, 2)
    assert calls == ["good", "bad"] * 2
    assert found == {"good": [1, 3], "bad": [4]}
    assert "round 1, bad FAILED: too weak" in capsys.readouterr().err


def test_a_peer_that_is_not_there_is_left_out_with_a_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "PEERS_DIR", tmp_path)
    common.peer_python.cache_clear()
    assert common.peer_python("gloo") is None
    assert f"Gloo (PyTorch) is left out: no {tmp_path}/gloo/bin/python" in capsys.readouterr().err
    common.peer_python.cache_clear()


def test_namespaces_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.shutil, "which", lambda program: program)
    with pytest.raises(common.BenchmarkError, match="need root"), network.joined():
        pass


def test_the_installer_is_sound_bash() -> None:
    script = str(ROOT / "benchmarks/peers/install.sh")
    subprocess.run(["bash", "-n", script], check=True)


# --- arithmetic -------------------------------------------------------------------------------


def test_ratios_and_tables() -> None:
    assert common.ratio(3.0, 2.0) == "1.50"
    assert common.ratio(None, 2.0) == "-"
    assert common.table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --: |\n| 1 | 2 |"


def test_hidden_is_what_of_the_communication_does_not_lengthen_the_step() -> None:
    found = {
        "none": [{"step": 100.0}, {"step": 102.0}, {"step": 98.0}],
        "buckets": [{"step": 110.0, "ring": 50.0}],
        "one bucket": [{"step": 150.0, "ring": 50.0}],
    }
    rows = load("overlap").evaluate(found, 100.0)
    assert [row["variant"] for row in rows] == ["buckets", "one bucket"]
    assert [row["hidden"] for row in rows] == [pytest.approx(0.8), pytest.approx(0.0)]


def test_latency_and_bandwidth_are_fitted() -> None:
    model = load("model")
    seconds = {size: 2e-3 + 1e-9 * size for size in (1 << 16, 1 << 20, 1 << 26)}
    assert model.fit(seconds) == (pytest.approx(2e-3), pytest.approx(1e-9))


def test_the_ring_of_the_model_goes_at_the_pace_of_the_slower_of_rank_and_line() -> None:
    model = load("model")
    byte_s = {"float32": 1e-9, "bf16": 1e-9}
    costs = model.Costs(round_s=1e-3, byte_s=byte_s, line_share=1.0, update_s_per_byte=0.0)
    # 4 ranks: 6 rounds of 1 ms, and 6/4 of 8e6 bytes at 8 Gbit/s (1e-9 s a byte), or 0.8 Gbit/s
    slow = model.ring_s(costs, 4, 8e6, 0.8, "float32")
    assert model.ring_s(costs, 4, 8e6, 8.0, "float32") == pytest.approx(0.006 + 0.012)
    assert model.ring_s(costs, 4, 8e6, 80.0, "float32") == pytest.approx(0.006 + 0.012)
    assert slow == pytest.approx(0.006 + 0.12)
    assert model.ring_s(costs, 4, 8e6, 0.8, "bf16") == pytest.approx(0.006 + 0.06)


def test_the_step_of_the_model_hides_all_but_the_last_bucket_where_it_can() -> None:
    model = load("model")
    costs = model.Costs(0.0, {}, 1.0, update_s_per_byte=1e-9)
    work = model.Workload(4e6, 1e6, forward_s=0.01, backward_s=0.04)
    # four buckets: the ring keeps up with backward, then it does not
    assert model.step_s(costs, work, 0.005) == pytest.approx(0.01 + 0.04 + 0.005 + 0.001)
    assert model.step_s(costs, work, 0.02) == pytest.approx(0.01 + 0.01 + 0.08 + 0.001)


def test_a_seed_has_one_plan_of_faults_and_all_actions_as_often() -> None:
    soak = load("soak")
    plan = soak.make_plan(7, 20)
    assert plan == soak.make_plan(7, 20) != soak.make_plan(8, 20)
    assert plan[: len(soak.make_plan(7, 5))] == soak.make_plan(7, 5)
    times_s = [0.0, *(fault.at_s for fault in plan), 1200.0]
    assert all(0.0 < after - before < 40.2 for before, after in zip(times_s, times_s[1:]))
    assert all(after - before > 19.8 for before, after in zip(times_s, times_s[1:-1]))
    actions = [fault.action for fault in plan]
    counts = [actions.count(action) for action in soak.ACTIONS]
    assert max(counts) - min(counts) <= 1
    assert {fault.rank for fault in plan} == {0, 1, 2}


def step(time_s: float, number: int, pid: int) -> dict[str, Any]:
    return {"kind": "step", "time": time_s, "step": number, "pid": pid}


def test_a_recovery_is_over_with_the_first_step_that_had_not_been_made() -> None:
    soak = load("soak")
    error = {"kind": "error", "time": 12.5, "pid": 2, "error": "PeerLostError", "text": "rank 1"}
    notes = [step(9.0, 8, 1), step(11.0, 9, 1), error]
    notes += [step(20.0, 8, 3), step(21.0, 9, 3), step(22.0, 10, 3)]
    fault = {"at_s": 10.0, "rank": 1, "action": "stop", "time": 10.0}
    assert "recovered_s" not in soak.recovery(fault, notes[:-1])
    assert "first_step" not in soak.recovery(fault, notes[:3])
    assert soak.recovery(fault, notes) == {
        **fault,
        "error": "PeerLostError",
        "text": "rank 1",
        "detected_s": 2.5,
        "last_step": 9,
        "first_step": 8,
        "again": 2,
        "recovered_s": 12.0,
    }
    text = soak.tables(
        {
            "minutes": 1.0,
            "restarts": 1,
            "steps": 10,
            "exit_code": 143,
            "difference": "kernel has other values",
            "faults": soak.recoveries([fault], notes),
        }
    )
    assert "| stop | 1 | 2.5, 2.5 | 12.0, 12.0 | 2 |" in text
    assert "| 10 | 1 | stop | 2.5 | PeerLostError | 8 | 12.0 | 2 |" in text
    assert "**different**: kernel has other values" in text


ALLREDUCE = {
    "machine": {
        "date": "2026-01-02T00:00:00+00:00",
        "cpu": "a processor",
        "cores": 2,
        "memory_gib": 4.0,
        "python": "3.11.7",
        "versions": {"numpy": "1.26.4"},
    },
    "gb_per_s": {
        "hostopt grpc": {"65536": 0.5, "1048576": 1.0},
        "tf": {"65536": 0.25, "1048576": 0.5},
    },
    "peak_memory_in_gradients": {"without": [1.5, 1.6, 1.4], "hostopt grpc": [3.0]},
    "more_ranks": [],
}


def test_tables_are_made_from_json() -> None:
    text = load("allreduce").tables(json.loads(json.dumps(ALLREDUCE)))
    assert "| hostopt grpc | 0.50 | 1.00 |" in text
    assert "| **hostopt grpc / TensorFlow RING** | 2.00 | 2.00 |" in text
    assert "| hostopt grpc | 3.00 | 1.50 |" in text


def test_the_page_gets_tables_between_its_marks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "docs").mkdir()
    written = tmp_path / "docs/benchmarks.md"
    for name in page.PAGES:
        (tmp_path / name).write_text((ROOT / name).read_text())
    for name in [name for names in page.PAGES.values() for name in names]:
        folder = tmp_path / "benchmarks" / name
        folder.mkdir(parents=True)
        (folder / "main.py").write_bytes((ROOT / "benchmarks" / name / "main.py").read_bytes())
    results = tmp_path / "benchmarks/allreduce/results.json"
    results.write_text(json.dumps(ALLREDUCE))
    monkeypatch.setattr(common, "ROOT", tmp_path)
    page.main()
    once = written.read_text()
    page.main()
    assert written.read_text() == once
    section = once.partition("<!-- allreduce -->\n")[2].partition("<!-- end of allreduce -->")[0]
    assert "| hostopt grpc | 0.50 | 1.00 |" in section
    assert "*2026-01-02: a processor, 2 cores, 4 GiB; Python 3.11.7, numpy 1.26.4.*" in section
    assert "<!-- model -->\nNo results yet.\n<!-- end of model -->" in once
