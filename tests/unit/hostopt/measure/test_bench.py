"""`hostopt bench` with real processes and tiny sizes; times are not checked."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rings import Spawn

from hostopt import __main__ as cli
from hostopt.collectives.communicator import Communicator
from hostopt.errors import ConfigError, ProtocolError
from hostopt.measure import bench, plain_tcp
from hostopt.options import Options
from hostopt.transport.addresses import hold_port, port_of
from hostopt.transport.inproc import InprocTransport


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


def test_the_share_of_a_line_is_what_a_rank_sends_over_it() -> None:
    timing = bench.Timing(1 << 30, (1.0, 0.5, 0.25), 0.1, sent_bytes=1e9, ring_bytes=1e9)
    *_, row = bench.format_table([timing], 20).splitlines()
    assert row.endswith("| 0.800 |")
    assert "share" not in bench.format_table([timing])


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


def test_ranks_agree_on_the_speed_of_plain_tcp(spawn_tcp: Spawn) -> None:
    speeds = spawn_tcp(3, plain_tcp.gbit_per_s)
    assert speeds[0] > 0
    assert speeds == [speeds[0]] * 3


def test_ports_that_a_rank_cannot_reach_have_no_speed(
    spawn_tcp: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold_port() as nobody_listens:
        closed_port = port_of(nobody_listens)

        def measure(communicator: Communicator) -> float | None:
            monkeypatch.setattr(plain_tcp, "_TIMEOUT_S", 0.5)
            monkeypatch.setattr(plain_tcp, "port_of", lambda _: closed_port)
            return plain_tcp.gbit_per_s(communicator)

        assert spawn_tcp(2, measure) == [None, None]


def test_the_speed_of_plain_tcp_is_below_the_table() -> None:
    timing = bench.Timing(1 << 30, (1.0,), 0.1, sent_bytes=1e9, ring_bytes=1e9, tcp_gbit=10.04)
    *_, row, _, note = bench.format_table([timing]).splitlines()
    assert row.endswith("| 0.797 |")
    assert note == "Plain TCP: 10 Gbit/s from rank to rank, on one connection."
    assert bench.format_table([timing], 20).splitlines()[-1].endswith("| 0.400 |")


@pytest.mark.parametrize("path", ["/", "/no/such/directory/times.json"])
def test_unwritable_bench_times_are_an_error(path: str) -> None:
    with pytest.raises(ConfigError, match=r"times cannot be written to .*\. Give another file"):
        bench.save(Path(path), [])
