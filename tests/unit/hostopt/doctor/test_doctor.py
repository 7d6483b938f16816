"""`hostopt doctor`: every kind of finding, and checks between ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import doctors
import pytest
import trustme
from certificates import write_tls_dir
from doctors import examine_alone, install, texts, tf_config
from harness import (
    reserved_addresses,
)
from rings import Spawn

from hostopt import __main__ as cli
from hostopt.collectives.communicator import Communicator
from hostopt.doctor import machine, network
from hostopt.doctor.checking import NOTE, OK, WRONG, Finding, run
from hostopt.transport import security
from hostopt.transport.grpc import ring as grpc_ring


def the_only(verdict: str, findings: list[Finding]) -> str:
    (text,) = texts(findings, verdict)
    return text


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for peers only for a moment, as none comes."""
    monkeypatch.setattr(doctors, "ALONE_S", 0.02)
    monkeypatch.setattr(security, "_PROBE_TIMEOUT_S", 0.02)
    monkeypatch.setattr(grpc_ring, "DEFAULT", replace(grpc_ring.DEFAULT, last_message_s=0.02))


# --- the command ------------------------------------------------------------------------------


@pytest.mark.parametrize("time_", ["0", "-1", "nan", "soon"])
def test_invalid_timeouts_are_refused(time_: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["doctor", "--timeout-s", time_])
    assert "--timeout-s" in capsys.readouterr().err


# --- running a check ----------------------------------------------------------------------


def test_an_error_in_a_check_is_a_finding() -> None:
    def stones() -> Iterator[Finding]:
        yield Finding(OK, "one")
        raise LookupError("two")

    assert run(stones, timeout_s=30) == [
        Finding(OK, "one"),
        Finding(WRONG, "the check of stones failed: LookupError('two')"),
    ]


def test_a_check_that_hangs_is_a_finding() -> None:
    disk, peer = socket.socketpair()

    def a_disk() -> Iterator[Finding]:
        yield Finding(OK, "one")
        disk.recv(1)

    with disk, peer:
        result = run(a_disk, timeout_s=0.1)
        peer.send(b"!")
    assert result[0] == Finding(OK, "one")
    assert "did not finish within 0.1 s" in the_only(WRONG, result)


# --- software ---------------------------------------------------------------------------------


def test_an_incompatible_package_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "tensorflow", "2.15.9", "protobuf (<5.0.0dev,>=3.20.3)", "numpy<9", "absent")
    install(tmp_path, "protobuf", "5.29.6")
    monkeypatch.syspath_prepend(tmp_path)
    wrong = texts(list(machine.versions()), WRONG)
    assert any(
        re.fullmatch(
            r"protobuf is 5.29.6, but tensorflow 2.15.9 requires .*<5.*: pip install .*", text
        )
        for text in wrong
    )
    assert any(
        text.startswith("absent is not installed, but tensorflow 2.15.9 requires it")
        for text in wrong
    )
    assert not [text for text in wrong if text.startswith("numpy is")]


def test_a_tensorflow_that_is_too_new_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "tensorflow", "2.99.0")
    monkeypatch.syspath_prepend(tmp_path)
    wrong = texts(list(machine.versions()), WRONG)
    assert any(
        re.match("tensorflow is 2.99.0, but hostopt .* requires .*<2.22", text) for text in wrong
    )


@pytest.mark.parametrize(
    ("release", "value", "verdict"),
    [("2.15.1", None, OK), ("2.16.2", None, NOTE), ("2.21.0", "1", OK), ("2.21.0", "0", WRONG)],
)
def test_keras_3_is_wrong(
    release: str,
    value: str | None,
    verdict: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, "tensorflow", release)
    monkeypatch.syspath_prepend(tmp_path)
    environ = {} if value is None else {"TF_USE_LEGACY_KERAS": value}
    assert [finding.verdict for finding in machine.keras(environ)] == [verdict]


def test_a_misspelt_variable_gets_a_suggestion() -> None:
    result = examine_alone({"HOSTOPT_BUKET_MB": "3", "HOSTOPT_TOKEN": "secret"})
    advice = "did you mean HOSTOPT_BUCKET_MB? Correct the name, or unset it"
    assert the_only(WRONG, result).endswith(advice)
    assert not any("secret" in text for _, text in result)


def test_an_unknown_variable_is_a_note() -> None:
    assert any(
        "HOSTOPT_ELSEWHERE" in text
        for text in texts(examine_alone({"HOSTOPT_ELSEWHERE": ""}), NOTE)
    )


def test_an_invalid_value_is_wrong() -> None:
    assert "HOSTOPT_STALL_WARNING_S is 'long'" in the_only(
        WRONG, examine_alone({"HOSTOPT_STALL_WARNING_S": "long"})
    )


def test_proxies_are_a_note() -> None:
    assert any(
        text.startswith("HTTP_PROXY, https_proxy: ")
        for text in texts(
            examine_alone({"https_proxy": "http://p:3128", "HTTP_PROXY": "http://p"}), NOTE
        )
    )


# --- this machine -----------------------------------------------------------------------------


def test_no_shared_memory_is_a_note(tmp_path: Path) -> None:
    assert "--shm-size" in the_only(NOTE, list(machine.shared_memory(str(tmp_path / "none"))))


def test_little_shared_memory_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = os.statvfs(tmp_path)
    monkeypatch.setattr(machine, "_DOCKER_SHM_BYTES", size.f_blocks * size.f_frsize)
    assert "--shm-size" in the_only(NOTE, list(machine.shared_memory(str(tmp_path))))


def test_shared_memory_of_killed_ranks_is_a_note(tmp_path: Path) -> None:
    for name, age_s in (("hostopt-old", 1000), ("hostopt-new", 0), ("other-old", 1000)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    left = [each for each in machine.shared_memory(str(tmp_path)) if "remain of" in each.text]
    assert [finding.text.split()[0] for finding in left] == ["1"]


def test_a_missing_model_dir_is_not_created(tmp_path: Path) -> None:
    result = list(machine.model_dir(str(tmp_path / "a" / "b")))
    assert f"{tmp_path} can be written to" in the_only(OK, result)
    assert list(tmp_path.iterdir()) == []


def test_a_model_dir_that_cannot_be_written_to_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = the_only(WRONG, list(machine.model_dir(str(tmp_path / "file" / "model"))))
    assert f"{tmp_path / 'file'} cannot be written to (Not a directory)" in wrong


def test_a_remote_model_dir_is_a_note() -> None:
    assert "gs://bucket/model" in the_only(NOTE, list(machine.model_dir("gs://bucket/model")))


def test_the_newest_checkpoint_is_named_if_it_is_complete(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text(
        'model_checkpoint_path: "model.ckpt-7"\nall_model_checkpoint_paths: "model.ckpt-3"\n'
    )
    names = ["model.ckpt-7.index", "model.ckpt-7.data-00000-of-00002"]
    for name in names:
        (tmp_path / name).touch()
    newest = str(tmp_path / "model.ckpt-7")
    assert newest in the_only(WRONG, list(machine.model_dir(str(tmp_path))))
    (tmp_path / "model.ckpt-7.data-00001-of-00002").touch()
    assert the_only(NOTE, list(machine.model_dir(str(tmp_path)))).endswith(newest)
    (tmp_path / names[0]).unlink()
    assert newest in the_only(WRONG, list(machine.model_dir(str(tmp_path))))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\0",
        b'model_checkpoint_path: "\0"\n',
        b'model_checkpoint_path: ""\n',
        b"x" * 9999,
    ],
)
def test_a_checkpoint_file_with_other_contents_is_wrong(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoint").write_bytes(content)
    assert "names no checkpoint: correct" in the_only(
        WRONG, list(machine.model_dir(str(tmp_path)))
    )


def test_an_unreadable_checkpoint_file_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    result = the_only(WRONG, list(machine.model_dir(str(tmp_path))))
    assert result.endswith("checkpoint cannot be read (Is a directory): correct or remove it")


def test_only_files_with_names_of_shards_are_counted(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-7"\n')
    for name in ("index", "data-00000-of-abcde", "data-00000-of-00001.tmp"):
        (tmp_path / f"model.ckpt-7.{name}").touch()
    assert "of which files are missing" in the_only(WRONG, list(machine.model_dir(str(tmp_path))))


# --- the cluster ------------------------------------------------------------------------------


def test_an_invalid_tf_config_is_wrong_with_the_message_of_a_training() -> None:
    assert "TF_CONFIG is not JSON" in the_only(WRONG, examine_alone({"TF_CONFIG": "{"}))
    lonely = {"TF_CONFIG": tf_config(["no-such-host.invalid:1"])}
    assert "does not resolve" in the_only(WRONG, examine_alone(lonely))


def test_a_host_that_does_not_resolve_is_wrong() -> None:
    with reserved_addresses(1) as addresses:
        config = tf_config([*addresses, "no-such-host.invalid:2222"])
        wrong = the_only(WRONG, examine_alone({"TF_CONFIG": config, "HOSTOPT_INSECURE": "1"}))
    assert "'no-such-host.invalid' of worker:0 does not resolve" in wrong


def test_a_port_in_use_is_wrong_and_its_process_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, reserved_addresses(1) as addresses:
        port = taken.getsockname()[1]
        result = examine_alone({"TF_CONFIG": tf_config([f"127.0.0.1:{port}", *addresses])})
    assert f"port {port} of this task" in the_only(WRONG, result)
    assert f"is in use by process {os.getpid()} (" in the_only(WRONG, result)


def test_an_address_of_another_machine_is_a_note(alone: None) -> None:
    result = examine_alone(
        {"TF_CONFIG": tf_config(["192.0.2.1:1", "127.0.0.1:1"]), "HOSTOPT_INSECURE": "1"}
    )
    assert any("192.0.2.1" in text and "NAT" in text for text in texts(result, NOTE))


@contextlib.contextmanager
def silent_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address that answers no call: its backlog is full. Nobody waits for it for long."""
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        address, connect, enough_s = silent.getsockname(), socket.create_connection, 0.02
        with contextlib.suppress(socket.timeout):  # in Python 3.9 no TimeoutError
            while True:
                stack.enter_context(connect(address, enough_s))

        def connect_to(to: tuple[str, int], timeout_s: float) -> socket.socket:
            return connect(to, enough_s if to == address else timeout_s)

        monkeypatch.setattr(socket, "create_connection", connect_to)
        yield f"127.0.0.1:{address[1]}"


def test_a_doctor_without_peers_reports_skipped_checks_and_reachable_tasks(
    monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    with silent_address(monkeypatch) as silent, reserved_addresses(2) as addresses:
        result = examine_alone({"TF_CONFIG": tf_config([*addresses, silent])})
    notes = texts(result, NOTE)
    assert any(f"missing: worker:0 ({addresses[1]}), worker:1" in text for text in notes)
    assert any(f"{addresses[1]}: its machine answers" in text for text in notes)
    assert f"{silent} cannot be reached" in the_only(WRONG, result)


@pytest.mark.parametrize(
    ("job", "text"),
    [
        ("evaluator", "evaluator:0 evaluates for 2 ranks"),
        ("data", "data:0, 127.0.0.1:3 prepares data for 2 ranks"),
    ],
)
def test_a_process_beside_the_ring_skips_the_rendezvous(
    tmp_path: Path, job: str, text: str
) -> None:
    config = {
        "cluster": {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "data": ["127.0.0.1:3"]},
        "task": {"type": job, "index": 0},
    }
    result = examine_alone({"TF_CONFIG": json.dumps(config)}, tmp_path)
    assert f"TF_CONFIG: {text}" == result[-2].text
    assert not texts(result, WRONG)


# --- token and certificates -------------------------------------------------------------------


@pytest.fixture
def loopback() -> Iterator[dict[str, str]]:
    """Environment of a rank of two, on this machine."""
    with reserved_addresses(2) as addresses:
        yield {"TF_CONFIG": tf_config(addresses)}


def test_addresses_other_than_loopback_need_a_token(alone: None) -> None:
    environ = {"TF_CONFIG": tf_config(["0.0.0.0:1", "127.0.0.1:1"])}
    assert "neither a token nor certificates" in the_only(WRONG, examine_alone(environ))
    result = examine_alone({**environ, "HOSTOPT_TOKEN": "secret"})
    assert "the ranks authenticate with a token" in texts(result, OK)
    assert not any("secret" in text for _, text in result)
    result = examine_alone({**environ, "HOSTOPT_INSECURE": "true"})
    assert any("no token and no certificates" in text for text in texts(result, NOTE))


def test_a_token_that_others_may_read_is_wrong(tmp_path: Path, loopback: dict[str, str]) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o640)
    result = examine_alone({**loopback, "HOSTOPT_TOKEN_FILE": str(tmp_path / "token")})
    assert "has mode 0640" in the_only(WRONG, result)


@pytest.mark.parametrize(("days", "verdict"), [(-1, WRONG), (3, NOTE), (300, OK)])
def test_a_certificate_that_expires_soon_is_a_note(
    days: float, verdict: str, tmp_path: Path, loopback: dict[str, str], alone: None
) -> None:
    result = examine_alone(
        {
            **loopback,
            "HOSTOPT_TLS_DIR": str(write_tls_dir(tmp_path / "tls", trustme.CA(), days=days)),
        }
    )
    expected = (
        "certificate has expired" if verdict == WRONG else "certificate of this rank is valid"
    )
    assert any(expected in text for text in texts(result, verdict))


# --- between ranks ----------------------------------------------------------------------------


def test_a_rank_reports_its_wrong_clock(spawn_inproc: Spawn) -> None:
    def work(communicator: Communicator) -> list[Finding]:
        shift_s = [0.0, 0.5, -7200.0][communicator.rank]
        return list(network.clocks(communicator, lambda: time.time() + shift_s))

    first, second, third = spawn_inproc(3, work)
    assert first == []
    assert [finding.verdict for finding in second] == [OK]
    assert "this clock is 7200.0 s behind rank 0's" in the_only(WRONG, third)


def test_a_slow_link_is_a_note(spawn_grpc: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_SLOW_BYTES_PER_S", 1e15)
    result = spawn_grpc(3, lambda communicator: list(network.links(communicator)))
    for rank, findings in enumerate(result):
        assert the_only(NOTE, findings).startswith(f"rank {(rank - 1) % 3} sends this rank ")


# --- speed ----------------------------------------------------------------------------------


def test_a_host_without_a_gpu_measures_its_memory() -> None:
    (finding,) = machine.speeds(gpus="/dev/none*")
    assert re.fullmatch(r"\d+ threads move [0-9.]+ GB/s through host memory", finding.text)


def test_a_gpu_whose_bus_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "false")
    assert "could not be measured" in the_only(NOTE, list(machine.speeds(gpus=str(tmp_path))))


def test_what_a_step_needs_at_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = {"pageable to": 8e9, "pageable from": 9e9, "pinned to": 50e9, "pinned from": 40e9}
    monkeypatch.setattr(machine, "_bus", lambda: bus)
    monkeypatch.setattr(machine, "_memory_bytes_per_s", lambda threads: 100e9)
    memory, copies, step = texts(list(machine.speeds(gpus=str(tmp_path))), OK)
    assert "move 100 GB/s" in memory
    assert "pageable to the GPU 8, pageable from the GPU 9, pinned to the GPU 50" in copies
    assert "need 28 ms for Adam and 10 ms for a copy" in step
