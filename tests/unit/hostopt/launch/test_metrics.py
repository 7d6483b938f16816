"""Metrics of a run, read over HTTP as Prometheus reads them."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT
from progress_notes import EVALUATION, PROGRESS

from hostopt.errors import ConfigError
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


def test_the_server_ends_with_the_scope(tmp_path: Path, no_thread_left: None) -> None:
    with served(Monitor(str(tmp_path), None, verbose=True), 0) as port:
        assert socket.create_connection(("127.0.0.1", port)).close() is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
