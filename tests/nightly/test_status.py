"""`hostopt status`: what each rank does, and which rank the others wait for."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from certificates import TOKEN, Certificates, environ_of
from harness import DEADLINE_S, PROGRAMS, QUIET, ROOT, run_python, until
from launcher import Launcher
from rings import NewRing, RankProcess, RankProcesses
from statuses import Holder

from hostopt.errors import PeerLostError
from hostopt.options import Options
from hostopt.transport.grpc import observer
from hostopt.versions import VERSION


def run_status(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a new process, with a deadline."""
    command = ("-m", "hostopt", "status", *arguments)
    return run_python(*command, code=None, limit_s=DEADLINE_S, without="HOSTOPT_", **environ)


# --- rings of processes -----------------------------------------------------------------------

RING = """
import sys
import numpy as np
import hostopt

communicator = hostopt.connect()
communicator.all_reduce(np.ones(3), name="the first")
print("ready", flush=True)
if communicator.rank == 1:
    sys.stdin.readline()
total = communicator.all_reduce(np.arange(50_000.0), name="the second")
assert total[7] == 7 * communicator.size
communicator.finish()
print("done", flush=True)
"""


def start_stuck(processes: NewRing, **environ: str) -> tuple[RankProcesses, list[RankProcess]]:
    """Starts three ranks, of which rank 1 is stuck in user code until it gets a line."""
    patient = {"HOSTOPT_STALL_WARNING_S": "300", "HOSTOPT_COLLECTIVE_TIMEOUT_S": "300"}
    ring = processes(3)
    started = ring.start_all(RING, **patient, **environ)
    for process in started:
        process.expect("ready")
    return ring, started


def let_finish(started: list[RankProcess]) -> None:
    started[1].write_line("continue")
    for process in started:
        process.expect("done")
        assert process.exit_code() == 0, process.stderr


@pytest.mark.parametrize("communication", ["auto", "grpc+tcp", "grpc"])
def test_all_ranks_show_the_rank_that_is_stuck(processes: NewRing, communication: str) -> None:
    ring, started = start_stuck(processes, HOSTOPT_COMMUNICATION=communication)
    blamed = f"all others wait for {ring.name(1)}, which is in no collective for "
    for address in ring.addresses:
        until(lambda: blamed in run_status(address).stdout, "blame")  # noqa: B023
        result = run_status(address)
        assert result.returncode == 0, result.stderr
        rows = result.stdout.splitlines()[1:4]
        for rank, row in enumerate(rows):
            assert re.match(rf"{rank} +\S+ +{ring.addresses[rank]} +call \d+ +\d+ MiB ", row)
        assert re.search(r"in no collective for [\d.]+ s, after the first", rows[1])
        for rank in (0, 2):
            assert re.search(r"has waited [\d.]+ s for rank \d: .*the second", rows[rank])
    let_finish(started)
    assert all(not process.stderr for process in started)


def test_json(processes: NewRing) -> None:
    ring, started = start_stuck(processes)
    overview = json.loads(run_status(ring.addresses[0], "--json").stdout)
    assert [task["address"] for task in overview["ring"]] == ring.addresses
    assert overview["ranks"][1]["last"]["what"].startswith("the first")
    let_finish(started)


def test_a_frozen_rank(processes: NewRing) -> None:
    ring, started = start_stuck(processes)
    started[2].process.send_signal(signal.SIGSTOP)
    result = run_status(ring.addresses[0])
    assert result.returncode == 200
    assert result.stdout.splitlines()[3].endswith("  no answer for 2 s")
    assert "1 of 3 ranks do not answer, the first is rank 2" in result.stderr
    asked = run_status(ring.addresses[2])
    assert (asked.returncode, asked.stdout) == (200, "")
    assert f"{ring.addresses[2]} accepts connections but does not answer" in asked.stderr
    started[2].process.send_signal(signal.SIGCONT)
    let_finish(started)


def test_a_ring_that_has_not_met(processes: NewRing) -> None:
    ring = processes(3)
    early = ring.start(0, RING)
    results = []

    def answers() -> bool:
        results.append(run_status(ring.addresses[0]))
        return bool(results[-1].stdout)

    until(answers, "answer")
    rows = results[-1].stdout.splitlines()
    assert rows[1].endswith("waits for ranks 1, 2 to connect")
    assert [row.endswith("not connected yet") for row in rows[2:4]] == [True, True]
    assert results[-1].returncode == 200
    early.kill()
    early.exit_code()


# The ranks' security, the caller's, and the end of the error message.
REFUSALS = [
    ("token", "other-token", "refuses this command: the caller has another token"),
    ("token", "nothing", "refuses this command: the caller has no token, and this rank has one"),
    ("nothing", "token", "refuses this command: the caller has a token, and this rank has none"),
    ("good", "nothing", "wants TLS, and this command has no tls_dir"),
    ("nothing", "good", "answers without TLS, which this command wants"),
    ("good", "of-another-ca", "has a certificate that is not accepted: unable to get local"),
    ("good", "refused", "does not accept the certificate of this command"),
    ("token+good", "good", "refuses this command: the caller has no token"),
]


@pytest.mark.parametrize(("way", "others_way", "message"), REFUSALS)
def test_a_caller_without_the_secrets_of_the_ring_is_refused(
    processes: NewRing, certificates: Certificates, way: str, others_way: str, message: str
) -> None:
    ring, started = start_stuck(processes, **environ_of(certificates, way))
    refused = run_status(ring.addresses[0], **environ_of(certificates, others_way))
    assert (refused.returncode, refused.stdout) == (77, "")
    assert message in refused.stderr
    answered = run_status(ring.addresses[0], **environ_of(certificates, way))
    assert answered.returncode == 0, answered.stderr
    assert len(answered.stdout.splitlines()) >= 4
    assert TOKEN not in refused.stderr + answered.stdout + started[0].stderr
    let_finish(started)


SUMS = """
import hashlib
import numpy as np
import hostopt

communicator = hostopt.connect()
print("ready", flush=True)
values = np.random.RandomState(communicator.rank).rand(30_000).astype(np.float32)
digest = hashlib.sha256()
for step in range(400):
    digest.update(communicator.all_reduce(values * np.float32(1 + step)).tobytes())
print(digest.hexdigest(), flush=True)
"""


def test_questions_do_not_change_the_results(processes: NewRing) -> None:
    digests, answers = [], []
    for is_asked in (False, True):
        ring = processes(2)
        started = ring.start_all(SUMS)
        for process in started:
            process.expect("ready")
        while is_asked and started[0].process.poll() is None:
            try:
                answers.append(observer.observe(ring.addresses[len(answers) % 2], Options()))
            except PeerLostError:  # the ring has ended
                break
        digests += [process.line() for process in started]
        for process in started:
            assert process.exit_code() == 0, process.stderr
            assert not process.stderr
    assert len(set(digests)) == 1
    assert answers


# --- addresses that are no ranks --------------------------------------------------------------


@pytest.mark.parametrize("target", ["nix", "host:", "host:0", "gs://bucket/model"])
def test_a_target_that_is_neither_a_directory_nor_an_address(target: str) -> None:
    result = run_status(target)
    assert result.returncode == 78
    assert result.stderr.endswith("or the address of one of its ranks\n")


# --- a model_dir ------------------------------------------------------------------------------


def test_a_directory_that_is_not_locked(tmp_path: Path) -> None:
    with Holder(tmp_path, []):
        pass
    for directory in (tmp_path, ROOT):  # it has been locked before, or never
        result = run_status(directory)
        assert result.returncode == 78
        assert f"no training has locked {directory}" in result.stderr


def test_a_training_of_one_process(tmp_path: Path) -> None:
    with Holder(tmp_path, []) as holder:
        result = run_status(tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"process {holder.process.pid} on host ")
    assert result.stdout.endswith(" UTC. It has no ring to ask\n")


def test_another_rank_is_asked_if_the_chief_does_not_answer(
    processes: NewRing, tmp_path: Path
) -> None:
    ring, started = start_stuck(processes)
    started[0].process.send_signal(signal.SIGSTOP)
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    with Holder(model_dir, ring.addresses):
        result = run_status(model_dir)
    assert result.returncode == 200
    assert result.stdout.splitlines()[1].endswith("  no answer for 2 s")
    started[0].process.send_signal(signal.SIGCONT)
    let_finish(started)


def test_a_training_under_the_launcher(launcher: Launcher, tmp_path: Path) -> None:
    settings = {"model_dir": str(tmp_path), "steps": 40, "stop_at": 8}
    program = str(PROGRAMS / "train.py")
    process = launcher.run(
        *("-np", "2", "--", sys.executable, program, json.dumps(settings)), **QUIET
    )
    results = []

    def is_stuck() -> bool:
        assert process.poll() is None, process.communicate()
        results.append(run_status(tmp_path / "sgd"))
        return len(re.findall(r"^[01] .* 7 +\d+ MiB ", results[-1].stdout, re.MULTILINE)) == 2

    until(is_stuck, "step 7", 60.0)
    assert results[-1].returncode == 0, results[-1].stderr
    versions = rf"{re.escape(VERSION)} +2\.\d+\.\d+"
    assert re.search(rf"^0 +chief:0 .* {versions} ", results[-1].stdout, re.MULTILINE)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
