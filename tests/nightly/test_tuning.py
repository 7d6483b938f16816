"""Options chosen by trial: the rules, and the commands with real ranks. Times are not checked."""

from __future__ import annotations

import json
import re
from pathlib import Path

from harness import run_python

from hostopt.measure import bench, tuning
from hostopt.options import Options

BENCH = ("-m", "hostopt", "bench", "-np", "2", "--suggest")
CHOICE = (
    r"HOSTOPT_COMMUNICATION=(\S+) HOSTOPT_SEGMENT_BYTES=(\d+) HOSTOPT_STREAMS=(\d+) "
    r"HOSTOPT_BUCKET_MB=([\d.]+)"
)


def test_bench_suggests_options_that_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    run = run_python(*BENCH, "--communication", "grpc", "--json", path)
    *table, _, variables = run.stdout.splitlines()
    trials = bench.load(path, tuning.Trial)
    assert "\n".join(table) == tuning.format_table(trials)
    assert [each.communication for each in trials] == ["grpc"] * 4
    assert len({each.segment_bytes for each in trials}) == 4
    environ = dict(pair.split("=") for pair in variables.split())
    assert Options().with_environment(environ) == tuning.fastest(trials).applied_to(Options())


def test_bench_tries_more_streams(tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    run_python(*BENCH, "--communication", "grpc+tcp", "--json", path)
    assert [each.streams for each in bench.load(path, tuning.Trial)] == [1, 1, 1, 1, 2]


def test_shared_memory_has_no_segments_to_try(tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    run = run_python(*BENCH, "--communication", "shm", "--json", path)
    assert [each.communication for each in bench.load(path, tuning.Trial)] == ["shm"]
    assert run.stderr.count("hostopt: trial of ") == 1  # by one rank only


def test_autotune_sets_the_same_options_on_all_ranks(tmp_path: Path) -> None:
    program = """
import json, hostopt, numpy as np
with hostopt.connect() as communicator:
    total = communicator.all_reduce(np.ones(3))
    options = communicator.transport.options
    chosen = options.communication, options.segment_bytes, options.streams, options.bucket_mb
    print("chosen", json.dumps([*chosen, total.tolist()]), flush=True)
"""
    (tmp_path / "main.py").write_text(program)
    run = run_python("-m", "hostopt", "run", "-np", 3, "--autotune", "--", tmp_path / "main.py")
    chosen = re.findall("chosen (.*)", run.stdout)
    assert len(chosen) == 3
    assert len(set(chosen)) == 1
    communication, segment_bytes, streams, bucket_mb, total = json.loads(chosen[0])
    assert total == [3.0] * 3
    (printed,) = re.findall(CHOICE, run.stderr)  # by one rank only
    assert printed == (communication, str(segment_bytes), str(streams), f"{bucket_mb:g}")
