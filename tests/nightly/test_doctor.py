"""`hostopt doctor`: every kind of finding, and checks between ranks."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest
import trustme
from certificates import write_tls_dir
from doctors import examine_alone, install, texts, tf_config
from harness import (
    DEADLINE_S,
    ROOT,
    Process,
    deadline_s,
    listens,
    reserved_addresses,
    start_python,
)
from rings import NewRing

from hostopt.commands.doctor import examine
from hostopt.doctor import machine
from hostopt.doctor.checking import NOTE, OK, WRONG
from hostopt.errors import ConfigError
from hostopt.tensorflow import bus

DOCTOR = [sys.executable, "-m", "hostopt", "doctor"]


def start(*arguments: str, **environ: str) -> Process:
    return start_python("-m", "hostopt", *arguments, without="HOSTOPT_|TF_", **environ)


def start_all(
    addresses: list[str], *environs: dict[str, str], arguments: list[list[str]] | None = None
) -> list[tuple[int, str]]:
    """Runs a doctor on each rank at the same time; returns their exit codes and outputs."""
    arguments = arguments or [[] for _ in addresses]
    doctors = [
        start("doctor", *arguments[rank], **{"TF_CONFIG": tf_config(addresses, rank), **environ})
        for rank, environ in enumerate(environs)
    ]
    outputs = [doctor.communicate(timeout=60) for doctor in doctors]
    return [(each.returncode, out + err) for each, (out, err) in zip(doctors, outputs)]


# --- the command ------------------------------------------------------------------------------


def test_findings_of_a_healthy_machine(tmp_path: Path) -> None:
    doctor = start("doctor", "--model-dir", str(tmp_path), TF_USE_LEGACY_KERAS="1")
    out, err = doctor.ended_with(0, 60)
    assert err == ""
    assert {line.split()[0] for line in out.splitlines()} <= {OK, NOTE}
    assert f"numpy {importlib.metadata.version('numpy')}" in out
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_finding_exits_with_the_code_of_a_config_error() -> None:
    out, _ = start("doctor", HOSTOPT_BUKET_MB="3").ended_with(ConfigError.exit_code, 60)
    assert "WRONG hostopt does not read HOSTOPT_BUKET_MB" in out


# --- between ranks ----------------------------------------------------------------------------


def test_checks_between_connected_doctors(tmp_path: Path) -> None:
    doctor = start("run", "-np", "3", "--", *DOCTOR, "--model-dir", str(tmp_path / "model"))
    out, _ = doctor.ended_with(0, 60)
    for task in ("chief:0", "worker:0", "worker:1"):
        lines = re.findall(rf"^\[{task}\] (.*)$", out, re.MULTILINE)
        assert {line.split()[0] for line in lines} <= {OK, NOTE}
        assert "ok    all 3 ranks are connected, with the same options" in lines
        assert "ok    all ranks have the same versions" in lines
        assert any(re.match(r"ok .* this clock agrees with rank 0's", line) for line in lines) == (
            task != "chief:0"
        )
        assert any("MB/s" in line for line in lines)
    assert "[chief:0] ok    model_dir is shared by all ranks" in out
    assert list(tmp_path.iterdir()) == []


def test_connected_doctors_name_differences(tmp_path: Path) -> None:
    install(tmp_path / "other", "tensorflow", "2.20.99")
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    with reserved_addresses(2) as addresses:
        chief, worker = start_all(
            addresses,
            {},
            {"PYTHONPATH": f"{ROOT}:{tmp_path / 'other'}"},
            arguments=[["--model-dir", str(tmp_path / rank)] for rank in "01"],
        )
    for code, output in (chief, worker):
        assert code == ConfigError.exit_code
        assert re.search("^WRONG tensorflow differs: rank 0 .*, rank 1 2.20.99", output, re.M)
    assert re.search("^note  model_dir is not shared: rank 1 cannot see rank 0's", chief[1], re.M)


CONNECTED = "^ok    all 2 ranks are connected, with the same options$"


def test_several_evaluators_connect_to_each_other() -> None:
    with reserved_addresses(3) as addresses:
        config = {"cluster": {"chief": addresses[:1], "evaluator": addresses[1:]}}
        doctors = [
            {"TF_CONFIG": json.dumps({**config, "task": {"type": "evaluator", "index": index}})}
            for index in range(2)
        ]
        result = start_all(addresses, *doctors)
    for code, output in result:
        assert code == 0
        assert re.search(CONNECTED, output, re.MULTILINE)


@pytest.mark.parametrize(
    ("first", "second", "finding"),
    [
        (
            {},
            {"HOSTOPT_COMPRESSION": "fp16"},
            "^WRONG rank 0 .* has compression None, rank 1 .*'fp16'",
        ),
        ({"HOSTOPT_TOKEN": "one"}, {"HOSTOPT_TOKEN": "another"}, "^WRONG .*token"),
        ({"HOSTOPT_TLS_DIR": "tls"}, {"HOSTOPT_TLS_DIR": "tls"}, CONNECTED),
    ],
    ids=["other options", "another token", "TLS"],
)
def test_doctors_connect_with_equal_options_and_secrets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: dict[str, str],
    second: dict[str, str],
    finding: str,
) -> None:
    write_tls_dir(tmp_path / "tls", trustme.CA())
    monkeypatch.chdir(tmp_path)
    with reserved_addresses(2) as addresses:
        result = start_all(addresses, first, second)
    for code, output in result:
        assert code == (0 if finding == CONNECTED else ConfigError.exit_code)
        assert re.search(finding, output, re.MULTILINE)


def test_a_doctor_reports_the_loss_of_its_peer(processes: NewRing) -> None:
    ring = processes(2)
    worker = ring.start(
        1,
        """
        import os
        from hostopt.cluster.cluster import Cluster
        from hostopt.connect import connect_ring
        from hostopt.options import Options
        options = Options(communication="grpc")
        communicator = connect_ring(Cluster.from_tf_config(), options, "hostopt.Doctor")
        communicator.all_gather_bytes(b"{}", "versions of the doctors")
        os._exit(9)
        """,
    )
    environ = {"HOSTOPT_COMMUNICATION": "grpc", "TF_CONFIG": tf_config(ring.addresses)}
    result = list(examine(environ, None, timeout_s=deadline_s(DEADLINE_S)))
    assert any(f"{ring.name(1)} lost" in text for text in texts(result, WRONG))
    assert worker.exit_code() == 9


def test_a_training_that_waits_for_ranks_does_not_accept_a_doctor(processes: NewRing) -> None:
    ring = processes(2)
    script = """
        import hostopt
        with hostopt.connect() as communicator:
            print(communicator.all_reduce([1.0])[0])
    """
    worker = ring.start(1, script)
    while not listens(ring.addresses[1]):
        assert worker.process.poll() is None, worker.stderr
    environ = {"HOSTOPT_COMMUNICATION": "grpc", "TF_CONFIG": tf_config(ring.addresses)}
    notes = texts(examine_alone(environ), NOTE)
    assert any(f"({ring.addresses[1]}), which runs another program" in text for text in notes)
    assert any(f"{ring.addresses[1]}: the port is open" in text for text in notes)
    chief = ring.start(0, script)
    for rank in (chief, worker):
        rank.expect("2.0")
        assert rank.exit_code() == 0


# --- speed ----------------------------------------------------------------------------------


def test_the_bus_is_measured_in_both_directions() -> None:
    speeds = bus.speeds("/device:CPU:1", copy_bytes=1 << 20)
    ways = [f"{memory} {way}" for memory in ("pageable", "pinned") for way in ("to", "from")]
    assert list(speeds) == ways
    assert all(value > 0 for value in speeds.values())


def test_a_machine_whose_gpu_tensorflow_cannot_use(tmp_path: Path) -> None:
    (note,) = texts(list(machine.speeds(gpus=str(tmp_path))), NOTE)
    assert "TensorFlow finds no GPU" in note
