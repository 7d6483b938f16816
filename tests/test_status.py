"""`hostopt status`: what each rank does, and which rank the others wait for."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from certificates import TOKEN, Certificates, environ_of
from harness import DEADLINE_S, PROGRAMS, QUIET, ROOT, Process, deadline_s, until
from launcher import Launcher
from rings import NewRing, RankProcess, RankProcesses, Spawn

from hostopt import lock_file
from hostopt.commands import status
from hostopt.commands.status_table import format_overview
from hostopt.communicator import Communicator
from hostopt.errors import AuthError, PeerLostError, ProtocolError
from hostopt.options import Options
from hostopt.transport.grpc import observer
from hostopt.transport.grpc.observation import Observation

TASKS = [{"task": f"worker:{index}", "address": f"h{index}:1"} for index in range(3)]
DETAILS: dict[str, Any] = {
    "step": 7,
    "memory_bytes": 3 << 20,
    "versions": {"hostopt": "0.1.0", "python": "3.11", "tensorflow": None},
    "missing": [],
    "wait": None,
    "send": None,
    "last": {"what": "kernel", "step": 4, "ago_s": 2.0},
    "error": None,
}


def waits(peer: int, for_s: float = 9.0, what: str = "kernel") -> dict[str, Any]:
    return {**DETAILS, "wait": {"peer": peer, "what": what, "for_s": for_s}}


def run_status(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a new process, with a deadline."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HOSTOPT_")}
    return subprocess.run(
        [sys.executable, "-m", "hostopt.cli", "status", *map(str, arguments)],
        env={**inherited, "PYTHONPATH": str(ROOT), **environ},
        check=False,
        capture_output=True,
        text=True,
        timeout=deadline_s(DEADLINE_S),
    )


# --- the table --------------------------------------------------------------------------------


def lines_of(*ranks: Any) -> list[str]:
    return format_overview({"ring": TASKS[: len(ranks)], "ranks": ranks}).splitlines()


def test_the_table() -> None:
    header, *rows = lines_of(DETAILS, waits(0, 0.25), "no answer for 2 s")
    assert re.split(" {2,}", header) == [
        "rank",
        "task",
        "address",
        "step",
        "memory",
        "hostopt",
        "TensorFlow",
        "Python",
        "state",
    ]
    shown = ["7", "3 MiB", "0.1.0", "-", "3.11"]
    assert [re.split(" {2,}", row) for row in rows] == [
        ["0", "worker:0", "h0:1", *shown, "in no collective for 2.0 s, after kernel"],
        ["1", "worker:1", "h1:1", *shown, "has waited 0.2 s for rank 0: kernel"],
        ["2", "worker:2", "h2:1", *"-----", "no answer for 2 s"],
    ]


def test_a_ring_without_an_estimator_shows_the_number_of_the_last_call() -> None:
    assert "  call 4  " in lines_of({**DETAILS, "step": None})[1]
    assert "  -  " in lines_of({**DETAILS, "step": None, "last": None})[1]


def test_memory_that_is_not_known() -> None:
    assert "  7     -       0.1.0  " in lines_of({**DETAILS, "memory_bytes": None})[1]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"last": None}, "in no collective so far"),
        ({"missing": [1, 2]}, "waits for ranks 1, 2 to connect"),
        ({"send": {"peer": 1, "for_s": 3.0}}, "rank 1 has taken no data for 3.0 s"),
        ({"error": "PeerLostError: rank 1 lost"}, "aborted: PeerLostError: rank 1 lost"),
    ],
)
def test_states(changes: dict[str, Any], state: str) -> None:
    assert lines_of({**DETAILS, **changes}, DETAILS, DETAILS)[1].endswith(f"  {state}")


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        (
            [waits(1), waits(2), DETAILS],
            "all others wait for rank 2 (worker:2, h2:1), which is in no collective for 2.0 s, "
            "after kernel",
        ),
        (
            [waits(1), "no answer for 2 s", DETAILS],
            "rank 0 waits for rank 1 (worker:1, h1:1), which does not answer: it is frozen, "
            "cannot run Python, or is gone",
        ),
        (
            [waits(1), waits(0), waits(0)],
            "all others wait for rank 0 (worker:0, h0:1), which waits for rank 1: they wait for "
            "each other",
        ),
    ],
)
def test_the_rank_that_the_others_wait_for(ranks: list[Any], line: str) -> None:
    assert lines_of(*ranks)[4:] == [line]


def test_a_slow_link() -> None:
    sends = {**DETAILS, "send": {"peer": 0, "for_s": 5.0}}
    assert lines_of(waits(1), sends, waits(0))[4:] == [
        "all others wait for rank 1 (worker:1, h1:1), which sends to rank 0: the link between "
        "them is slow"
    ]


def test_a_short_wait_is_no_one_s_fault() -> None:
    assert len(lines_of(waits(1, 0.5), DETAILS, DETAILS)) == 4


def test_texts_of_ranks_cannot_control_the_terminal() -> None:
    evil = "\x1b[2J\r\n\u202e\u009b" + "x" * 1000
    tasks = [{"task": evil, "address": evil}, TASKS[1]]
    versions = dict.fromkeys(("hostopt", "python", "tensorflow"), evil)
    details = {**waits(1, what=evil), "error": evil, "versions": versions}
    for ranks in ([details, evil], [{**details, "error": None}, {**DETAILS, "error": evil}]):
        shown = format_overview({"ring": tasks, "ranks": ranks})
        assert all(line.isprintable() for line in shown.split("\n"))
        assert len(shown.split("\n")) == 4
        assert len(shown) < 5000


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


def test_observers_at_the_same_time_share_one_round(
    spawn_grpc: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    on_details = Observation.on_details

    async def count(observation: Observation, *arguments: Any) -> bytes:
        asked.append(observation._peers.rank)
        return await on_details(observation, *arguments)

    monkeypatch.setattr(Observation, "on_details", count)
    monkeypatch.setattr("hostopt.transport.grpc.limits.OBSERVE_EVERY_S", 1000.0)

    def work(communicator: Communicator) -> None:
        communicator.barrier()
        if communicator.rank == 1:
            address = communicator.transport.cluster.ring[0].address
            for _ in range(20):
                overview = observer.observe(address, Options())
                assert len(overview["ranks"]) == 2
        assert communicator.all_reduce(np.ones(3))[0] == 2

    spawn_grpc(2, work)
    assert asked == [1]


# --- addresses that are no ranks --------------------------------------------------------------


def test_nothing_listens() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        with pytest.raises(PeerLostError, match=r"nothing listens at 127\.0\.0\.1:"):
            observer.observe(f"127.0.0.1:{holder.getsockname()[1]}", Options())


def test_another_program_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "ANSWER_S", 0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(PeerLostError, match="accepts connections but does not answer"),
    ):
        observer.observe(f"127.0.0.1:{server.getsockname()[1]}", Options())


def test_another_service(spawn_grpc: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        communicator.barrier()
        if communicator.rank == 0:
            address = communicator.transport.cluster.ring[1].address
            with pytest.raises(ProtocolError, match=r"UNIMPLEMENTED.*another program listens"):
                observer.observe(address, Options(), service="hostopt.Other")
        communicator.barrier()

    spawn_grpc(2, work)


def test_a_refusal_cannot_control_the_terminal() -> None:
    def refuse(_: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "\x1b[2J" + "x" * 1000)

    with ThreadPoolExecutor() as pool:
        server = grpc.server(pool)
        methods = {"Observe": grpc.unary_unary_rpc_method_handler(refuse)}
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("hostopt.Ring", methods)]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with pytest.raises(AuthError) as caught:
            observer.observe(f"127.0.0.1:{port}", Options())
        server.stop(None).wait(10)
    assert "refuses this command: ?[2Jxxx" in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


@pytest.mark.parametrize("target", ["nix", "host:", "host:0", "gs://bucket/model"])
def test_a_target_that_is_neither_a_directory_nor_an_address(target: str) -> None:
    result = run_status(target)
    assert result.returncode == 78
    assert result.stderr.endswith("or the address of one of its ranks\n")


# --- a model_dir ------------------------------------------------------------------------------

HOLD = """
import json, sys
from hostopt import lock_file
assert lock_file.acquire(sys.argv[1])
lock_file.note_ring(sys.argv[1], json.loads(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that has locked a directory as the chief of a ring does."""

    def __init__(self, directory: Path, addresses: list[str]) -> None:
        path = directory.resolve() / lock_file.TRAINING
        self.process = Process(
            [sys.executable, "-c", HOLD, str(path), json.dumps(addresses)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Holder:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


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


def test_loopback_addresses_of_another_host_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Holder(tmp_path, ["127.0.0.1:1", "127.0.0.1:2"]):
        monkeypatch.setattr(lock_file.socket, "gethostname", lambda: "another")
        with pytest.raises(status.ConfigError, match="can be reached on that host only"):
            status._holder_of(str(tmp_path))


@pytest.mark.tensorflow
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
    assert re.search(r"^0 +chief:0 .* 0\.1\.0 +2\.\d+\.\d+ ", results[-1].stdout, re.MULTILINE)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
