"""Rings of real processes over gRPC: output and exit codes with and without faults."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from harness import jobs_of
from ring_scripts import MEET
from rings import NewRing, Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.transport.grpc import client

SUM = """
assert communicator.all_reduce(np.ones(1000))[0] == size
"""


# --- runs without faults ----------------------------------------------------------------------


def test_a_run_without_faults(processes: NewRing) -> None:
    ring = processes(3)
    script = """
        for step in range(20):
            total = communicator.all_reduce(np.arange(50_000.0) + rank)
            assert total[-1] == 3 * 49_999 + 3, total
        communicator.finish()
        say("done")
    """
    for process in ring.start_all(MEET + unindent(script)):
        process.expect("done")
        assert process.exit_code() == 0, process.stderr
        assert not process.stderr


def test_a_rank_may_end_long_before_the_others(processes: NewRing) -> None:
    ring = processes(3)
    script = """
        weights = communicator.broadcast(np.full(100_000, rank + 7.0))
        assert weights[-1] == 7
        say("has them")
        if rank:
            sys.stdin.read()
        if rank == 1:
            say("and ends")
    """
    first, second, third = ring.start_all(MEET + unindent(script))
    first.expect("has them")
    assert first.exit_code() == 0, first.stderr
    for process in (second, third):
        process.expect("has them")
        process.close_stdin()
        assert process.exit_code() == 0, process.stderr
        assert "Traceback" not in process.stderr


def test_a_rank_may_end_right_after_the_rendezvous(processes: NewRing) -> None:
    ring = processes(2)
    script = MEET + "assert communicator.broadcast(np.full(3, rank + 7.0))[0] == 7"
    early = ring.start(1, script, PROGRESS_EVERY_S="0.1")
    assert "missing: chief:0" in early.line()  # it polls rank 0 at intervals
    late = ring.start(0, script)
    assert late.exit_code() == 0, late.stderr
    assert early.exit_code() == 0, early.stderr


def test_a_rank_may_restart_during_the_rendezvous(processes: NewRing) -> None:
    ring = processes(3)
    script = MEET + SUM + "say('done')"
    waiting = [ring.start(rank, script, PROGRESS_EVERY_S="0.1") for rank in (0, 2)]
    while f"missing: worker:0 ({ring.addresses[1]})" not in waiting[1].line():
        pass  # the two ranks have connected
    waiting[1].kill()
    while not waiting[0].line().endswith(f"worker:1 ({ring.addresses[2]})"):
        pass  # it is missing again
    again = [ring.start(rank, script) for rank in (1, 2)]
    for process in again:
        process.expect("done")
        assert process.exit_code() == 0, process.stderr
    assert waiting[0].exit_code() == 0, waiting[0].stderr


def test_rings_that_fail_at_once_follow_each_other(processes: NewRing) -> None:
    """Rank 1 is often still in its rendezvous when rank 0 fails and begins the next one."""
    ring = processes(2)
    script = """
        import numpy as np, hostopt
        for number in range(20):
            try:
                with hostopt.connect() as communicator:
                    if communicator.rank == 0:
                        raise hostopt.CheckpointError(f"no room {number}")
                    communicator.broadcast(np.ones(3))
            except hostopt.CheckpointError as error:
                print(error, flush=True)
    """
    for process in ring.start_all(script):
        for number in range(20):
            process.expect(f"no room {number}")
        assert process.exit_code() == 0, process.stderr


def test_grpc_settings_stay_out_of_the_environment() -> None:
    script = """
        import os
        given = os.environ.get("GRPC_EXPERIMENTS")
        from hostopt.transport.grpc.transport import grpc
        assert os.environ.get("GRPC_EXPERIMENTS") == given
        grpc.insecure_channel("localhost:1").close()  # some releases look at it only now
    """
    for environ in ({}, {"GRPC_EXPERIMENTS": "no_such_experiment"}):
        run = subprocess.run(
            [sys.executable, "-c", unindent(script)],
            env={**os.environ, "GRPC_VERBOSITY": "error", **environ},
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=True,
        )
        # gRPC logs unknown variables: one of the user, and none of hostopt
        assert ("no_such_experiment" in run.stderr) == bool(environ)
        assert run.stderr.count("nknown experiment") == len(environ)


# --- rendezvous -------------------------------------------------------------------------------


def test_missing_ranks_are_logged_regularly(processes: NewRing) -> None:
    ring = processes(2)
    first = ring.start(0, MEET + SUM, PROGRESS_EVERY_S="0.1")
    for _ in range(2):
        line = first.line()
        assert line.startswith("rank 0 has waited ")
        assert line.endswith(f"missing: worker:0 ({ring.addresses[1]})")
    second = ring.start(1, MEET + SUM)
    for process in (first, second):
        assert process.exit_code() == 0, process.stderr


def test_a_forked_child_does_not_affect_the_ring(processes: NewRing) -> None:
    script = """
        child = os.fork()
        if not child:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert communicator.all_reduce(np.ones(1000))[0] == size
        say("done")
    """
    for process in processes(2).start_all(MEET + unindent(script)):
        process.expect("done")
        assert process.exit_code() == 0, process.stderr


def test_a_rank_may_start_other_programs(processes: NewRing) -> None:
    # preexec_fn asks for fork(), which Python 3.9 always uses and later ones seldom
    script = """
        import subprocess
        for _ in range(30):
            communicator.all_reduce(np.ones(9))
            child = subprocess.Popen([sys.executable, "-S", "-c", ""], preexec_fn=lambda: None)
            communicator.all_reduce(np.ones(9))
            assert child.wait() == 0, child.returncode
        say("done")
    """
    for process in processes(2).start_all(MEET + unindent(script)):
        process.expect("done")
        assert process.exit_code() == 0, process.stderr


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_with_different_rings(processes: NewRing, first: int) -> None:
    ring = processes(3)
    jobs = [jobs_of(ring.addresses[:2]), jobs_of(ring.addresses)]
    before = ring.start(first, MEET, jobs=jobs[first], PROGRESS_EVERY_S="0.1")
    assert "missing" in before.line()
    after = ring.start(1 - first, MEET, jobs=jobs[1 - first])
    for process in (before, after):
        assert process.exit_code() == 78, process.stderr
        assert "ConfigError" in process.stderr
        assert '"cluster" in TF_CONFIG' in process.stderr
        assert ring.addresses[2] in process.stderr


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("option", "values", "shown"),
    [
        ("compression", ["fp16", "none"], ["'fp16'", "None"]),
        ("communication", ["grpc", "auto"], ["'grpc'", "'auto'"]),
    ],
)
def test_ranks_with_different_options(
    processes: NewRing, first: int, option: str, values: list[str], shown: list[str]
) -> None:
    ring = processes(2)
    environ = [{f"HOSTOPT_{option.upper()}": value} for value in values]
    before = ring.start(first, MEET, PROGRESS_EVERY_S="0.1", **environ[first])
    assert "missing" in before.line()
    after = ring.start(1 - first, MEET, **environ[1 - first])
    names = [f"{ring.name(rank)} has {option} {shown[rank]}" for rank in range(2)]
    for process in (before, after):
        assert process.exit_code() == 78, process.stderr
        result = f"ConfigError: {names[0]}, {names[1]}. Give all ranks the same options\n"
        assert result in process.stderr


# --- a rank that dies -------------------------------------------------------------------------


@pytest.mark.parametrize("communication", ["grpc", "shm"])
@pytest.mark.parametrize(("size", "victim"), [(3, 0), (3, 2), (4, 1), (4, 2)])
def test_a_killed_rank_is_named_by_all_others(
    processes: NewRing, size: int, victim: int, communication: str
) -> None:
    ring = processes(size)
    script = f"say('ready')\nif rank == {victim}: sys.stdin.read()"
    started = ring.start_all(MEET + SUM + script + SUM, HOSTOPT_COMMUNICATION=communication)
    for process in started:
        process.expect("ready")
    started[victim].kill()
    for rank, process in enumerate(started):
        if rank == victim:
            assert process.exit_code() == -9
            continue
        assert process.exit_code() == 200, process.stderr
        assert f"\nhostopt.errors.PeerLostError: {ring.name(victim)} lost" in process.stderr


def test_a_rank_killed_before_its_first_message(processes: NewRing) -> None:
    ring = processes(3)
    script = """
        say("ready")
        if rank == 0:
            sys.stdin.read()
        communicator.broadcast(np.ones(10))
    """
    started = ring.start_all(MEET + unindent(script))
    for process in started:
        process.expect("ready")
    started[0].kill()
    for process in started[1:]:
        assert process.exit_code() == 200, process.stderr
        assert f"PeerLostError: {ring.name(0)} lost" in process.stderr


def test_a_user_exception_is_reported_by_all_ranks(processes: NewRing) -> None:
    ring = processes(4)
    script = """
        def bake():
            raise ValueError("no more flour")
        say("ready")
        sys.stdin.read()
        if rank == 1:
            bake()
    """
    started = ring.start_all(MEET + SUM + unindent(script) + SUM)
    for process in started:
        process.expect("ready")
    for process in started:
        process.close_stdin()
    assert [process.exit_code() for process in started] == [200, 1, 200, 200]
    own = started[1].stderr
    assert own.startswith("Traceback")
    assert "in bake" in own
    assert "\nValueError: no more flour\n" in own
    for rank in (0, 2, 3):
        (line,) = [text for text in started[rank].stderr.splitlines() if "PeerLostError:" in text]
        assert ring.name(1) in line
        assert "ValueError: no more flour" in line


def test_a_rank_with_fewer_calls_than_the_others(processes: NewRing) -> None:
    ring = processes(3)
    script = MEET + SUM + "communicator.finish() if rank == 2 else communicator.barrier()"
    for process in ring.start_all(script):
        assert process.exit_code() == 200, process.stderr
        assert ring.name(2) in process.stderr
        assert "finished" in process.stderr


# --- bad frames and strangers -----------------------------------------------------------------


def test_a_long_idle_ring_stays_connected(
    spawn_grpc: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    # by default gRPC closes connections without calls after half an hour
    control_options = client.control_options
    idle = ("grpc.client_idle_timeout_ms", 1000)
    monkeypatch.setattr(client, "control_options", lambda *args: [idle, *control_options(*args)])

    def work(communicator: Communicator) -> None:
        for _ in range(30):
            assert communicator.all_reduce(np.ones(3))[0] == 3
            threading.Event().wait(0.1)

    spawn_grpc(3, work)


def unindent(script: str) -> str:
    """Unindents a script to follow `MEET`."""
    return script.replace("\n        ", "\n")
