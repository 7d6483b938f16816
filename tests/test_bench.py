"""`hostopt bench` with real processes and tiny sizes; times are not checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Process, reserved_addresses

from hostopt import bench, cli
from hostopt.communicator import Communicator
from hostopt.errors import ConfigError, ProtocolError
from hostopt.options import Options
from hostopt.transport.inproc import InprocTransport

ROOT = Path(__file__).resolve().parents[1]


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


def test_usage_is_printed_without_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "--sizes", "1KiB"])
    assert caught.value.code == 2
    assert "give -np N, or start each rank with its TF_CONFIG" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("64KiB", 65536), ("0.5MiB", 1 << 19), ("2GiB", 1 << 31), ("8B", 8)],
)
def test_sizes_have_units(text: str, size_bytes: int) -> None:
    assert bench.parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "0", "-4", "6", "nan", "1TiB", "64 k", "MiB", "1e400"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="wanted a multiple of 4 bytes"):
        bench.parse_size(text)


def test_sizes_are_written_with_the_largest_whole_unit() -> None:
    sizes = [12, 1024, 1536, 1 << 20, 3 << 30]
    assert [bench.format_size(s) for s in sizes] == ["12 B", "1 KiB", "1536 B", "1 MiB", "3 GiB"]


def in_threads(size: int, function: Any) -> list[Any]:
    """`function(communicator)` on each rank, with its result or error."""
    transports = InprocTransport.connect(size, Options())
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = function(Communicator(transports[rank]))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@pytest.mark.parametrize("size", [1, 2, 5])
def test_correct_sums_pass(size: int) -> None:
    def check(communicator: Communicator) -> None:
        bench.check_sums(bench.CommunicatorGroup(communicator), 400)

    assert in_threads(size, check) == [None] * size


def test_a_wrong_sum_is_detected() -> None:
    class Wrong(bench.CommunicatorGroup):
        def all_reduce(self, buffer: np.ndarray) -> np.ndarray:
            super().all_reduce(buffer)[7] += 1
            return buffer

    def check(communicator: Communicator) -> None:
        bench.check_sums(Wrong(communicator), 400)

    errors = in_threads(2, check)
    assert all(isinstance(error, ProtocolError) for error in errors)
    assert "element 7 is 8.0, wanted 7.0" in str(errors[0])


def test_all_ranks_report_the_time_of_the_slowest() -> None:
    def measure(communicator: Communicator) -> Any:
        return bench.measure(bench.CommunicatorGroup(communicator), 64, 3)

    times = in_threads(3, measure)
    assert times[0] == times[1] == times[2]
    assert len(times[0][0]) == 3
