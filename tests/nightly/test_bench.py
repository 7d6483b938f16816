"""`hostopt bench` with real processes and tiny sizes; times are not checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from harness import ROOT, Process, reserved_addresses

from hostopt import bench


def bench_command(*arguments: str, **environ: str) -> Process:
    return Process(
        [sys.executable, "-m", "hostopt.cli", "bench", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_local_ranks_print_one_table(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    arguments = ["-np", "3", "--sizes", "12", "96KiB", "--repetitions", "2", "--json", str(path)]
    process = bench_command(*arguments, "--communication", "grpc")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 12 B", "| 96 KiB"]
    timings = bench.load(path)
    assert [timing.size_bytes for timing in timings] == [12, 96 << 10]
    assert [timing.ring_bytes for timing in timings] == [16, 128 << 10]
    # the small array by recursive doubling, where rank 0 sends it twice, the large one on the ring
    assert [timing.sent_bytes for timing in timings] == [24, 128 << 10]
    assert all(len(timing.seconds) == 2 and min(timing.seconds) > 0 for timing in timings)
    assert all(timing.processor_s > 0 for timing in timings)


def test_each_rank_can_be_started_by_hand(tmp_path: Path) -> None:
    with reserved_addresses(2) as addresses:
        tasks = [
            {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            for index in range(2)
        ]
        arguments = ["--sizes", "1KiB", "--repetitions", "1", "--compression", "none"]
        ranks = [bench_command(*arguments, TF_CONFIG=json.dumps(task)) for task in tasks]
        outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "| 1 KiB |" in outputs[0][0]
    assert outputs[1][0] == ""
