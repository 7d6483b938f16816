"""Metrics of a run, read over HTTP as Prometheus reads them."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from harness import PROGRAMS, QUIET, ROOT, deadline_s, python, until
from launcher import NOTE, Launcher
from progress_notes import PROGRESS
from prometheus_client.parser import text_string_to_metric_families


class Reader:
    """Reads the metrics of a launcher that was started with `--metrics-port 0`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        line = process.stderr.readline()
        address = re.fullmatch(r"hostopt: metrics: (http://127\.0\.0\.1:\d+/metrics)\n", line)
        assert address, line
        self.address = address[1]
        self.lines: list[str] = []  # of standard error
        threading.Thread(target=lambda: self.lines.extend(process.stderr), daemon=True).start()

    def read(self) -> dict[str, float]:
        """Returns the samples by name and labels, such as ``wait_seconds_total{1}``."""
        with urllib.request.urlopen(self.address, timeout=deadline_s(10)) as response:
            text = response.read().decode()
        result = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = "".join(f"{{{value}}}" for value in sample.labels.values())
                result[sample.name.removeprefix("hostopt_") + labels] = sample.value
        return result


TASK = (
    NOTE
    + f"""
from hostopt.telemetry.progress import write_progress
progress = {PROGRESS!r}
note("started")
count = len(list(pathlib.Path(os.environ["NOTES"]).glob("started.*")))
if "chief" in os.environ["TF_CONFIG"].rpartition("task")[2]:
    write_progress("training", {{**progress, "step": count}})
    while not os.path.exists(os.environ["NOTES"] + f"/go.{{count}}"):
        time.sleep(0.01)
    if count == 1:
        os.kill(os.getpid(), 9)
"""
)


def test_a_run_that_is_restarted(launcher: Launcher) -> None:
    process = launcher.run(
        *("-np", "1", "--max-restarts", "1", "--metrics-port", "0", *python(TASK))
    )
    reader = Reader(process)
    until(lambda: "step" in reader.read(), "step")
    first = reader.read()
    assert (first["restarts_total"], first["step"]) == (0, 1)
    assert first["wait_seconds_total{1}"] == 0.25
    (launcher.notes / "go.1").touch()
    until(lambda: reader.read()["step"] == 2, "second attempt")
    assert reader.read()["restarts_total"] == 1
    (launcher.notes / "go.2").touch()
    assert process.wait(20) == 0, reader.lines
    for path in launcher.notes.glob("go.*"):
        path.unlink()
    with pytest.raises(OSError):
        reader.read()


def test_a_port_in_use(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = NOTE + 'note("started")'
        process = launcher.run("-np", "1", "--metrics-port", str(port), *python(code))
        _, err = process.communicate(timeout=20)
    assert process.returncode == 78
    assert err == (
        f"hostopt: port {port} of 127.0.0.1 cannot be used for metrics: Address already in use. "
        "Choose another --metrics-port, or 0 for any free one\n"
    )
    assert not [*launcher.notes.iterdir()]


def test_a_training_that_is_restarted(launcher: Launcher, tmp_path: Path) -> None:
    settings = {
        "model_dir": str(tmp_path / "model"),
        "optimizers": ["adam"],
        "steps": 90,
        "checkpoint_steps": 20,
        "fault": {"point": "between-updates", "step": 60, "action": "kill", "slot": 1},
    }
    program = (str(PROGRAMS / "train_with_fault.py"), json.dumps(settings))
    process = launcher.run(
        *("-np", "2", "--max-restarts", "2", "--metrics-port", "0", "--", sys.executable),
        *program,
        PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}",
        **QUIET,
    )
    reader = Reader(process)
    until(lambda: "sent_bytes_total" in reader.read(), "step", 60.0)
    first = reader.read()
    assert (first["restarts_total"], first["last_step"]) == (0, 90)
    assert first["step"] > 0 and first["sent_bytes_total"] > 0
    assert first["checkpoint_timestamp_seconds"] > 1.7e9
    until(lambda: reader.read()["restarts_total"] == 1, "restart", 60.0)
    assert process.wait(120) == 0, reader.lines
