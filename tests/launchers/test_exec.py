"""`hostopt exec`, and programs that find their cluster, under real launchers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS, ROOT, deadline_s
from mpirun import HOSTOPT, LAUNCHERS, OPEN_MPI, command_of, run

PROGRAM = [sys.executable, str(PROGRAMS / "reduces_rank.py")]


def reports(result: Any) -> list[dict[str, Any]]:
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda each: each["rank"])


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("way", ["exec", "alone"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_are_found(launcher: str, way: str, size: int) -> None:
    command = [*HOSTOPT, "exec", "--", *PROGRAM] if way == "exec" else PROGRAM
    result = run(launcher, size, *command)
    found = reports(result)
    assert [each["rank"] for each in found] == list(range(size))
    assert all(each["ranks"] == list(range(size)) for each in found)
    assert len(found[0]["tf_config"]["cluster"]["worker"]) == size - 1
    if way == "exec":
        assert {each["threads"] for each in found} == {"1"}
        assert sorted(each["slot"] for each in found) == [str(i) for i in range(size)]


def test_two_runs_at_the_same_time_do_not_mix(launcher: str, tmp_path: Path) -> None:
    command = command_of(launcher, 2, *HOSTOPT, "exec", "--", *PROGRAM)
    environ = {**os.environ, **OPEN_MPI, "PYTHONPATH": str(ROOT)}
    directories = [tmp_path / "a", tmp_path / "b"]  # runs of Open MPI 4 delete that of each other
    for directory in directories:
        directory.mkdir()
    runs = [
        subprocess.Popen(
            command,
            env={**environ, "TMPDIR": str(directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for directory in directories
    ]
    clusters = []
    for each in runs:
        out, errors = each.communicate(timeout=deadline_s(90.0))
        assert each.returncode == 0, errors
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert len(lines) == 2
        clusters += [line["tf_config"]["cluster"]["chief"][0] for line in lines]
    assert len({*clusters}) == 2


def test_the_exit_code_of_a_rank(launcher: str) -> None:
    run(launcher, 2, *HOSTOPT, "exec", *PROGRAM, "7", code=7)


def test_one_process_needs_no_cluster(launcher: str) -> None:
    code = "import hostopt; print('size', hostopt.connect().size)"
    result = run(launcher, 1, *HOSTOPT, "exec", "--", sys.executable, "-c", code, code=None)
    assert "size 1" in result.stdout, result.stderr


def test_a_tf_config_for_all_processes_is_refused(launcher: str) -> None:
    cluster = {"worker": ["127.0.0.1:1111", "127.0.0.1:1112"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    result = run(
        launcher, 2, *HOSTOPT, "exec", "--", "true", TF_CONFIG=json.dumps(config), code=78
    )
    assert "TF_CONFIG names rank 0 of 2 ranks, but" in result.stderr


@pytest.mark.parametrize("missing", ["no-such-command", "missing.py"])
def test_a_missing_command(launcher: str, missing: str) -> None:
    result = run(launcher, 2, *HOSTOPT, "exec", "--", missing, code=2)
    assert missing in result.stderr


def test_nothing_has_started_this() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    result = subprocess.run(
        [*HOSTOPT, "exec", "--", "true"], env=environ, capture_output=True, text=True, check=False
    )
    assert result.returncode == 78
    assert "use `hostopt run -np N`" in result.stderr


def test_mnist_trains_with_an_evaluator(launcher: str, tmp_path: Path) -> None:
    example = [sys.executable, str(ROOT / "examples/mnist/main.py")]
    arguments = ["--model-dir", str(tmp_path / "model"), "--steps", "30"]
    result = run(launcher, 3, *HOSTOPT, "exec", "--evaluators", "1", "--", *example, *arguments)
    assert "accuracy" in result.stdout + result.stderr
