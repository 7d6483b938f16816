"""`hostopt bench` with real processes and tiny sizes; times are not checked."""

from __future__ import annotations

import json
from pathlib import Path

from harness import reserved_addresses, run_python, start_python

from hostopt.measure import bench

BENCH = ("-m", "hostopt", "bench")


def test_local_ranks_print_one_table(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    arguments = ["-np", "3", "--sizes", "12", "96KiB", "--repetitions", "2", "--json", str(path)]
    lines = run_python(*BENCH, *arguments, "--communication", "grpc").stdout.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| 12 B", "| 96 KiB"]
    assert lines[-1].startswith("Plain TCP: ")
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
        ranks = [start_python(*BENCH, *arguments, TF_CONFIG=json.dumps(task)) for task in tasks]
        outputs = [rank.ended_with(0, 60) for rank in ranks]
    assert "| 1 KiB |" in outputs[0][0]
    assert "share of" not in outputs[0][0]  # ranks of one host do not use it
    assert outputs[1][0] == ""
