"""Metrics of a run, read over HTTP as Prometheus reads them."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, deadline_s
from progress_notes import EVALUATION, PROGRESS

from hostopt.errors import ConfigError
from hostopt.launch import metrics
from hostopt.launch.metrics import metrics_of, served
from hostopt.launch.monitor import Monitor

LABELS = {"step_part_seconds": "part", "wait_seconds_total": "rank", "evaluation": "metric"}


def test_all_metrics() -> None:
    metrics = list(metrics_of({1: {"step": 1}, 2: PROGRESS}, EVALUATION, 1))
    assert {each.name: dict(each.values) for each in metrics} == {
        "restarts_total": {"": 1},
        "step": {"": 500},
        "last_step": {"": 2000},
        "loss": {"": 0.25},
        "examples_per_second": {"": 6400},
        "checkpoint_step": {"": 450},
        "checkpoint_timestamp_seconds": {"": 1.5e9},
        "step_seconds": {"": 0.01},
        "step_part_seconds": {
            "input": 0.001,
            "forward_and_backward": 0.008,
            "update": 0.001,
            "exposed_communication": 0.0005,
        },
        "communication_seconds": {"": 0.002},
        "exposed_communication_seconds": {"": 0.0005},
        "sent_bytes_total": {"": 4096},
        "wait_seconds_total": {"0": 0.5, "1": 0.25},
        "evaluation": {"accuracy": 0.9},
        "evaluation_step": {"": 450},
    }
    assert {each.name: each.label for each in metrics if each.label} == LABELS


def test_each_metric_is_documented() -> None:
    page = (ROOT / "docs" / "watching.md").read_text()
    documented = re.findall(r"^\| `hostopt_(\w+)(?:\{(\w+)\})?` \| (\w+) \|", page, re.MULTILINE)
    metrics = metrics_of({1: PROGRESS}, EVALUATION, 0)
    kinds = {True: "counter", False: "gauge"}
    assert sorted(documented) == sorted(
        (each.name, each.label, kinds[each.name.endswith("_total")]) for each in metrics
    )


@pytest.mark.parametrize(
    "progress", [{}, {"step": 1}, {"step": "x"}, {"step": 1, "times_ms": 7}, {"waited_s": [None]}]
)
def test_progress_that_is_not_complete(progress: dict[str, Any]) -> None:
    names = [each.name for each in metrics_of({1: progress}, {"step": 1}, 2)]
    assert names[0] == "restarts_total"
    assert set(names) <= {"restarts_total", "step"}


def test_prometheus_client_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monitor = Monitor(str(tmp_path), None, verbose=True)
    with (
        pytest.raises(ConfigError, match=r"pip install 'hostopt\[metrics\]'$"),
        served(monitor, 0),
    ):
        pass


GET = b"GET /metrics HTTP/1.1\r\n\r\n"
TIMEOUT_S = deadline_s(30.0)
MIB = 1 << 20


@contextlib.contextmanager
def answering(body: bytes) -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with metrics.answering(listener, lambda: body):
        yield address


def received_by(caller: socket.socket, request: bytes = b"") -> bytes:
    """Sends a request, and returns all that the server sends before it ends the connection."""
    parts = []
    with contextlib.suppress(ConnectionError):
        caller.sendall(request)
        parts += iter(lambda: caller.recv(MIB), b"")
    return b"".join(parts)


def answer_to(address: tuple[str, int], request: bytes) -> bytes:
    with socket.create_connection(address, TIMEOUT_S) as caller:
        return received_by(caller, request)


def test_idle_connections_end_and_leave_room(no_thread_left: None) -> None:
    most = metrics.MOST_CONNECTIONS
    with contextlib.ExitStack() as stack:
        with answering(b"body") as address:
            threads = threading.active_count()
            idle = [
                stack.enter_context(socket.create_connection(address, TIMEOUT_S))
                for _ in range(3 * most)
            ]
            assert [received_by(each) for each in idle[:-most]] == [b""] * 2 * most
            answer = answer_to(address, GET)
            assert answer.startswith(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
            )
            assert answer.endswith(b"\r\n\r\nbody")
            assert threading.active_count() == threads
        assert [received_by(each) for each in idle[-most:]] == [b""] * most


@pytest.mark.parametrize("request_", [b"", b"GET / HTTP/1.1\r\n"])
def test_a_slow_request_ends(request_: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CONNECTION_S", 0.01)
    with answering(b"body") as address:
        assert answer_to(address, request_) == b""


def test_an_answer_that_is_read_slowly_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CONNECTION_S", 0.01)
    with answering(bytes(64 * MIB)) as address:
        assert len(answer_to(address, GET)) < 64 * MIB


def test_requests_that_are_not_answered() -> None:
    with answering(b"body") as address:
        assert answer_to(address, b"x" * 4 * metrics.REQUEST_BYTES) == b""
        refusal = answer_to(address, b"POST / HTTP/1.1\r\n\r\n")
    assert refusal.startswith(b"HTTP/1.1 405 ") and not refusal.endswith(b"body")


def test_the_server_ends_with_the_scope(tmp_path: Path, no_thread_left: None) -> None:
    with served(Monitor(str(tmp_path), None, verbose=True), 0) as port:
        assert socket.create_connection(("127.0.0.1", port)).close() is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
