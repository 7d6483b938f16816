"""Collectives and trainings over MPI, under real launchers: results, faults and ends."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import PROGRAMS, QUIET, ROOT, deadline_s, is_gone, run_python, until
from mpirun import HOSTOPT, KEEP_OTHERS, LAUNCHERS, run

COLLECTIVES = (sys.executable, PROGRAMS / "mpi_collectives.py")
FAULTS = (sys.executable, PROGRAMS / "mpi_faults.py")
CONNECT = "import hostopt; hostopt.connect(options=hostopt.Options(communication='mpi'))"
LIMIT_S = 2.0  # for all ranks to report an error, on an idle machine


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


# --- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_collectives_are_those_of_numpy(launcher: str, size: int) -> None:
    result = run(launcher, size, *COLLECTIVES)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert sorted(line["rank"] for line in lines) == list(range(size))
    assert {line["size"] for line in lines} == {size}
    assert min(line["checks"] for line in lines) > 1000


def test_the_api_of_horovod_in_any_order(launcher: str) -> None:
    program = (sys.executable, PROGRAMS / "collectives.py")
    environ = {**QUIET, "HOSTOPT_COMMUNICATION": "mpi"}
    result = run(launcher, 2, *HOSTOPT, "exec", "--", *program, limit_s=180.0, **environ)
    assert len(re.findall(r"made \d+ calls in 4 ways", result.stdout)) == 2


USES_MPI_ITSELF = """
import hostopt
import hostopt.tensorflow as hvd
from mpi4py import MPI
for _ in range(2):  # a ring after another one
    hvd.init()
    assert hvd.mpi_enabled() and hvd.mpi_built() and hvd.mpi_threads_supported()
    assert MPI.COMM_WORLD.Get_size() == hvd.size()
    assert float(hvd.allreduce(1.0, op=hvd.Sum, name="ones")) == hvd.size()
    hvd.shutdown()
    assert not hvd.mpi_enabled()
assert MPI.COMM_WORLD.allreduce(1) == 2
"""


def test_a_program_that_starts_mpi_itself(launcher: str) -> None:
    environ = {**QUIET, "HOSTOPT_COMMUNICATION": "mpi"}
    run(launcher, 2, sys.executable, "-c", USES_MPI_ITSELF, **environ)


TRAIN = (sys.executable, PROGRAMS / "train.py")


def test_two_ranks_train_like_one_on_the_whole_batch(launcher: str, tmp_path: Path) -> None:
    """A convolutional network for images of 28 x 28, for 20 steps from one checkpoint."""
    settings = {"dtype": "float32", "model": "conv", "communication": "mpi"}

    def train(name: str, size: int, steps: int, start: Path | None = None) -> Path:
        directory = tmp_path / name
        if start is None:
            directory.mkdir()
        else:
            shutil.copytree(start, directory, ignore=shutil.ignore_patterns("*.input"))
        paths = {"model_dir": str(directory), "dump_dir": str(directory)}
        argument = json.dumps({**settings, **paths, "steps": steps})
        run(launcher, size, *HOSTOPT, "exec", "--", *TRAIN, argument, **QUIET)
        return directory

    start = train("start", 1, 1)
    one = dict(np.load(train("one", 1, 21, start) / "sgd-0.npz"))
    directory = train("two", 2, 21, start)
    ranks = [dict(np.load(directory / f"sgd-{rank}.npz")) for rank in range(2)]
    names = set(one) - {"losses"}
    assert len(names) > 3
    for name in names:
        assert ranks[0][name].tobytes() == ranks[1][name].tobytes(), name
        np.testing.assert_allclose(ranks[0][name], one[name], rtol=0, atol=1e-5, err_msg=name)
    first = dict(np.load(start / "sgd-0.npz"))
    assert any(np.abs(first[name] - one[name]).max() > 1e-3 for name in names)  # it has trained


def test_an_evaluator_that_the_same_mpirun_starts(launcher: str, tmp_path: Path) -> None:
    example = (sys.executable, ROOT / "examples/mnist/main.py")
    arguments = ("--model-dir", tmp_path / "model", "--steps", 30)
    command = (*HOSTOPT, "exec", "--evaluators", 1, "--", *example, *arguments)
    result = run(launcher, 3, *command, HOSTOPT_COMMUNICATION="mpi", **QUIET)
    assert "accuracy" in result.stdout + result.stderr


# --- faults -------------------------------------------------------------------------------------


def errors_of(output: str) -> dict[int, tuple[float, str]]:
    """Seconds after which each rank has raised an error, and the error, by rank."""
    found = re.findall(r"^rank (\d) after ([\d.]+) s: (.*)$", output, re.MULTILINE)
    return {int(rank): (float(seconds), error) for rank, seconds, error in found}


def check_ended(output: str) -> None:
    """Checks that all ranks end. An mpirun that lets others go on may end before the last one."""
    pids = [int(pid) for pid in re.findall(r"^pid \d (\d+)$", output, re.MULTILINE)]
    assert len(pids) == 3
    until(lambda: all(map(is_gone, pids)), "end of all ranks")


@pytest.mark.parametrize("calls_before", [0, 1, 3])
@pytest.mark.parametrize(
    ("kind", "local"),
    [
        ("dtype", "all_reduce(sum) of 'w' float64[65536]"),
        ("shape", "all_reduce(sum) of 'w' float32[100]"),
        ("operator", "all_reduce(max) of 'w' float32[65536]"),
        ("name", "all_reduce(sum) of 'v' float32[65536]"),
        ("collective", "all_gather of 'w' float32[65536]"),
        ("over the ring", "gather_bytes of 'w'"),
    ],
)
def test_calls_that_differ(launcher: str, kind: str, local: str, calls_before: int) -> None:
    result = run(launcher, 3, *FAULTS, kind, calls_before, code=None)
    assert result.returncode != 0
    errors = errors_of(result.stdout)
    assert errors, result.stderr  # mpirun kills the others when the first rank has ended
    for seconds, error in errors.values():
        assert error.startswith("CollectiveMismatchError"), error
        assert "calls all_reduce(sum) of 'w' float32[65536], rank 1" in error
        assert f"calls {local} at step" in error
        assert seconds < deadline_s(LIMIT_S)
    check_ended(result.stdout)


def test_a_rank_that_never_calls(launcher: str) -> None:
    result = run(launcher, 3, *FAULTS, "stuck", code=None)
    assert result.returncode == 201 or launcher.startswith("mpich")  # which may name a killed one
    assert re.search(
        r"rank 2 has waited 0\.\d s for w .* rank 1 .* is in no collective", result.stderr
    )
    errors = errors_of(result.stdout)
    assert errors and 1 not in errors
    for _, error in errors.values():
        assert error.startswith("CollectiveTimeoutError"), error
        assert "is in no collective; its last was w at step 2" in error
        assert "Check what rank 1 is doing" in error
    check_ended(result.stdout)


@pytest.mark.parametrize("kind", ["left", "exception"])
def test_a_rank_that_ends(launcher: str, kind: str) -> None:
    result = run(launcher, 3, *FAULTS, kind, code=None)
    assert result.returncode != 0
    errors = errors_of(result.stdout)
    assert errors or kind == "exception"
    for seconds, error in errors.values():
        assert error.startswith("PeerLostError"), error
        assert "rank 1 (worker:0" in error
        assert seconds < deadline_s(LIMIT_S)
    check_ended(result.stdout)


def test_a_rank_that_is_killed(launcher: str) -> None:
    result = run(launcher, 3, *FAULTS, "SIGKILL", options=KEEP_OTHERS[launcher], code=None)
    assert "has ended" not in result.stdout
    check_ended(result.stdout)
    errors = errors_of(result.stdout)
    if not KEEP_OTHERS[launcher]:
        assert "signal 9" in result.stdout + result.stderr
        return
    assert errors, result.stderr
    assert 1 not in errors
    for seconds, error in errors.values():
        assert error.startswith("PeerLostError"), error
        assert "rank 1 (worker:0" in error
        assert "process gone" in error
        assert seconds < deadline_s(LIMIT_S)


def test_a_rank_that_is_frozen(launcher: str) -> None:
    result = run(launcher, 3, *FAULTS, "SIGSTOP", code=None)
    errors = errors_of(result.stdout)
    assert set(errors) & {0, 2}, result.stderr
    for seconds, error in errors.values():  # mpirun lets the frozen rank go on in the end
        assert error.startswith("PeerLostError"), error
        assert "rank 1 (worker:0" in error
        assert seconds < deadline_s(30.0)
    check_ended(result.stdout)


def test_a_forked_child_leaves_mpi_to_the_rank(launcher: str) -> None:
    code = f"""
import os, sys
{CONNECT.replace("hostopt.connect", "c = hostopt.connect")}
c.barrier()
child = os.fork()
if child == 0:
    sys.exit(3)  # calls the functions of atexit
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
c.barrier()
c.close()
"""
    run(launcher, 2, sys.executable, "-c", code)


def test_a_process_of_the_launcher_that_does_not_start_mpi(launcher: str) -> None:
    """An evaluator that runs another program, as if it were frozen."""
    code = f"""
import json, os, time
role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
if role == "evaluator":
    time.sleep(600)  # until mpirun ends this process
{CONNECT}
"""
    command = (*HOSTOPT, "exec", "--evaluators", 1, "--", sys.executable, "-c", code)
    result = run(launcher, 3, *command, code=None, HOSTOPT_RENDEZVOUS_TIMEOUT_S="10")
    assert result.returncode != 0
    assert "MPI_Init_thread has not returned within 10 s" in result.stderr
    assert "all processes of the launcher use communication='mpi'" in " ".join(
        result.stderr.split()
    )


# --- refusals -----------------------------------------------------------------------------------


def refusal(*command: str, **environ: str) -> str:
    return run_python(*command, code=78, limit_s=60.0, without="HOSTOPT_", **environ).stderr


def test_hostopt_run_cannot_start_mpi() -> None:
    command = (*HOSTOPT[1:], "run", "-np", "2", "--", sys.executable, "-c", CONNECT)
    assert "`hostopt run` has started this process" in refusal(*command)


def test_no_launcher_of_mpi() -> None:
    cluster = {"worker": ["127.0.0.1:1111", "127.0.0.1:1112"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    text = refusal("-c", CONNECT, TF_CONFIG=json.dumps(config))
    assert "no launcher of MPI has started this process" in text
    assert "mpirun -np N hostopt exec" in text


def test_mpi4py_is_not_installed(launcher: str, tmp_path: Path) -> None:
    Path(tmp_path, "mpi4py.py").write_text("raise ImportError('blocked')")
    paths = f"{tmp_path}:{ROOT}"
    result = run(launcher, 2, sys.executable, "-c", CONNECT, PYTHONPATH=paths, code=78)
    assert "Run `pip install 'hostopt[mpi]'` on all ranks" in result.stderr


def test_data_that_tls_would_not_protect(launcher: str, tmp_path: Path) -> None:
    environ = {"HOSTOPT_TLS_DIR": str(tmp_path)}
    result = run(launcher, 2, sys.executable, "-c", CONNECT, code=78, **environ)
    assert "tls_dir is set" in result.stderr


def test_the_library_of_another_mpi(launcher: str, tmp_path: Path) -> None:
    result = run(
        launcher, 2, sys.executable, "-c", CONNECT, MPI4PY_LIBMPI=str(tmp_path / "no.so"), code=78
    )
    assert "mpi4py cannot load the MPI library" in result.stderr
    assert "LD_LIBRARY_PATH" in result.stderr
