"""Data workers that are killed, frozen or absent, and how the ranks continue or end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import reserved_addresses, until
from ranks import Rank, Ranks
from served import PROGRAM, Served

# Elements of a data worker at one time: its buffer, and the calls of two ranks.
MOST_LOST = 100


def steps(served: Served) -> int:
    """Number of batches that both ranks have seen."""
    return min(len(served.batches(task)) for task in ("chief-0", "worker-0"))


def await_steps(served: Served) -> None:
    until(lambda: steps(served) >= 5, "5 steps", 100)


def kill(served: Served, task: str) -> None:
    """Kills a process of the launcher after 5 steps."""
    await_steps(served)
    (pid,) = served.launcher.pids(f"started-{task}", 1)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_data_worker_is_restarted_and_the_epoch_ends(served: Served, index: int) -> None:
    arguments = ("-np", "2", "--data-workers", "2", "--max-restarts", "1")
    process = served.start(*arguments, count=1200, step_s=0.1)
    kill(served, f"data-{index}")
    output = served.output(process)
    assert f"data:{index}: exit code 137 (SIGKILL); restarting it in" in output
    assert "elements that it had taken, and those in its shuffle buffers, are lost" in output
    elements = served.elements()
    assert len(set(elements)) == len(elements)  # at most once
    assert set(elements) <= set(range(1, 1201))
    assert len(elements) >= 1200 - MOST_LOST


def test_without_a_restart_left_the_ranks_end_and_the_data_worker_is_named(
    served: Served,
) -> None:
    process = served.start("-np", "2", "--data-workers", "2", epochs=0, step_s=0.1)
    kill(served, "data-1")
    output = served.output(process, 128 + signal.SIGKILL)
    assert "root cause: data:1: exit code 137 (SIGKILL)" in output
    assert output.splitlines()[-1].endswith(
        "data:1: exit code 137 (SIGKILL); the ranks need its data"
    )


def test_a_data_worker_that_always_fails_ends_the_run(served: Served) -> None:
    arguments = ("-np", "2", "--data-workers", "2", "--max-restarts", "5")
    output = served.run(*arguments, code=3, die_at=[1, 3])
    assert output.splitlines()[-1].endswith("data:1: exit code 3; the ranks need its data")


def test_a_signal_saves_the_ranks_before_the_data_workers_end(served: Served) -> None:
    process = served.start("-np", "2", "--data-workers", "2", epochs=0, step_s=0.1)
    await_steps(served)
    process.send_signal(signal.SIGTERM)
    output = served.output(process, 128 + signal.SIGTERM)
    (saved,) = served.directory.glob("model/model.ckpt-[1-9]*.index")
    assert f"saved at {saved.stem.rpartition('-')[2]}" in output


def test_the_data_workers_serve_the_next_attempt_of_the_ranks(served: Served) -> None:
    arguments = ("-np", "2", "--data-workers", "1", "--max-restarts", "1")
    config = {"save_checkpoints_steps": 2}
    process = served.start(*arguments, count=200, step_s=0.1, config=config)
    kill(served, "worker-0")
    output = served.output(process)
    assert "restarting in" in output
    assert "the data are read from the beginning" in output
    assert len(list(served.directory.glob("started-data-0.*"))) == 1
    elements = served.elements()
    assert set(elements) == set(range(1, 201))  # all of them in the second attempt
    assert len(elements) >= 200 + 5 * 2 * 4


# -- without a launcher --------------------------------------------------------------------


@pytest.fixture
def started(tmp_path: Path, ranks: Ranks) -> Any:
    """`started(**settings)` starts two ranks and two data workers, each by its TF_CONFIG."""
    with reserved_addresses(4) as addresses:
        jobs = {"chief": addresses[:1], "worker": addresses[1:2], "data": addresses[2:]}

        def start(tasks: Any = (), environ: Any = None, **settings: Any) -> list[Rank]:
            arguments = [Served(tmp_path).arguments(gone_s=10.0, **settings)]
            return ranks.start(PROGRAM, jobs, tasks=tasks, arguments=arguments, environ=environ)

        yield start


def test_data_workers_end_after_the_chief(started: Any, tmp_path: Path) -> None:
    for rank in started(count=40):
        assert rank.wait() == 0, rank.output
        is_data_worker = rank.name.startswith("data")
        end = "the ranks have ended: {}, " if is_data_worker else "{} has ended"
        assert end.format(rank.name) in rank.output
    assert Served(tmp_path).elements() == list(range(1, 41))


def test_a_signal_to_all_processes_saves_a_checkpoint(started: Any, tmp_path: Path) -> None:
    processes = started(epochs=0, step_s=0.1)
    await_steps(Served(tmp_path))
    for rank in processes:
        rank.signal(signal.SIGTERM)
    for rank in processes:
        assert rank.wait() == 143, rank.output
    assert len([*tmp_path.glob("model/model.ckpt-[1-9]*.index")]) == 1


def test_a_dispatcher_without_a_journal_that_comes_back_ends_the_ranks(
    started: Any, tmp_path: Path
) -> None:
    chief, worker, first, second = started(epochs=0, step_s=0.1)
    await_steps(Served(tmp_path))
    first.signal(signal.SIGKILL)
    first.wait()
    (again,) = started(tasks=[("data", 0)], epochs=0)
    codes = {rank.wait() for rank in (chief, worker)}
    assert codes <= {1, 200}
    assert (again.wait(), second.wait()) == (0, 0)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_data_worker_that_stays_away_is_named_on_all_ranks(started: Any, signum: Any) -> None:
    environ = {"HOSTOPT_RENDEZVOUS_TIMEOUT_S": "40"}
    chief, worker, first, second = started(epochs=0, step_s=0.1, environ=environ)
    await_steps(Served(chief.log.parent))
    first.signal(signum)
    for rank in (chief, worker):
        assert rank.wait() == 200, rank.output
        assert "PeerLostError: data worker data:0, 127.0.0.1:" in rank.output
        assert "has not answered for 40 s" in rank.output
    assert second.wait() == 0, second.output
    first.signal(signal.SIGKILL)
    first.wait()


def test_a_data_worker_without_a_chief_ends(started: Any) -> None:
    environ = {"HOSTOPT_EVALUATOR_TIMEOUT_S": "5"}
    for rank in started(tasks=[("data", 0), ("data", 1)], environ=environ):
        assert rank.wait() == 202, rank.output
        assert "chief:0, 127.0.0.1:" in rank.output
        assert "has not appeared within 5 s" in rank.output


def test_a_data_worker_that_never_starts_is_named(started: Any) -> None:
    environ = {"HOSTOPT_RENDEZVOUS_TIMEOUT_S": "40"}
    tasks = [("chief", 0), ("worker", 0), ("data", 0)]
    chief, worker, data = started(tasks=tasks, environ=environ)
    for rank in (chief, worker):
        assert rank.wait() == 202, rank.output
        assert "data worker data:1, 127.0.0.1:" in rank.output
    assert data.wait() == 0, data.output
