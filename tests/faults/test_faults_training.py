"""Trainings in which a rank breaks: errors, exit codes and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import deadline_s, reserved_addresses, until
from ranks import Rank, Ranks

STEPS = 4  # also the number of checkpoints that are kept
LAST = 9  # step of resumed trainings
# Every step is saved. There are several buckets, with the updates of two variables between two of
# them. Data is reshuffled in each epoch.
SETTINGS = {
    "optimizers": ["adam"],
    "steps": STEPS,
    "checkpoint_steps": 1,
    "bucket_mb": 2**-12,
    "shuffled": True,
    "collective_timeout_s": 30.0,
}


def settings(directory: Path, **chosen: Any) -> list[str]:
    directories = {"model_dir": str(directory / "model"), "dump_dir": str(directory)}
    return [json.dumps({**SETTINGS, **directories, **chosen})]


def checkpoints(directory: Path) -> dict[int, dict[str, np.ndarray]]:
    """Reads the variables of all checkpoints; returns them by step."""
    model = directory / "model" / "adam"
    by_step = {}
    for index in model.glob("model.ckpt-*.index"):
        reader = tf.train.load_checkpoint(str(index.with_suffix("")))
        variables = {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}
        by_step[int(index.stem.rpartition("-")[2])] = variables
    return by_step


@pytest.fixture(autouse=True)
def nothing_left(ranks: Ranks) -> Iterator[None]:
    """Checks that a test leaves no process and no shared memory."""
    before = set(Path("/dev/shm").glob("hostopt-*"))
    yield
    left = [rank.name for rank in ranks.started if rank.process.poll() is None]
    assert not left, f"still running at the end of the test: {', '.join(left)}"
    # files of other tests come and go
    left_files = set(Path("/dev/shm").glob("hostopt-*")) - before
    until(lambda: not any(path.exists() for path in left_files), "the end of its shared memory")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, np.ndarray]]:
    """Reads the checkpoints of two ranks without a fault."""
    directory = tmp_path_factory.mktemp("unbroken")
    with Ranks(directory) as ranks:
        for rank in ranks.run("train_with_fault.py", 2, arguments=settings(directory)):
            assert "has waited" not in rank.output  # no false alarm
        assert not (directory / "model" / "adam" / "hostopt-debug").exists()
        result = checkpoints(directory)
        assert sorted(result)[-1] == STEPS
        return result


def start(
    ranks: Ranks,
    directory: Path,
    addresses: list[str],
    victim: int,
    fault: dict,
    chosen: dict[str, Any] | None = None,
    **environ: str,
) -> list[Rank]:
    """Starts a training whose rank `victim` has a fault; `chosen` are settings of the program."""
    return ranks.start(
        "train_with_fault.py",
        {"worker": addresses},
        arguments=settings(directory, **(chosen or {})),
        task_arguments={f"worker:{victim}": [json.dumps({"fault": fault})]},
        environ=environ,
    )


FAULTS = [
    ("between-updates", "kill", 1, "shm"),
    ("between-updates", "raise", 0, "grpc"),
    ("before-reduce", "kill", 1, "grpc+tcp"),
    ("after-reduce", "kill", 0, "shm"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The last checkpoint of a longer run of two ranks without a fault."""
    directory = tmp_path_factory.mktemp("whole")
    with Ranks(directory) as ranks:
        ranks.run("train_with_fault.py", 2, arguments=settings(directory, steps=LAST))
        return checkpoints(directory)[LAST]


@pytest.mark.parametrize(("point", "action", "victim", "communication"), FAULTS)
def test_an_incomplete_step_is_not_saved_and_the_same_command_resumes_exactly(
    tmp_path: Path,
    ranks: Ranks,
    unbroken: dict[int, dict[str, np.ndarray]],
    whole: dict[str, np.ndarray],
    point: str,
    action: str,
    victim: int,
    communication: str,
) -> None:
    fault = {"point": point, "step": 3, "action": action}
    with reserved_addresses(2) as addresses:
        started = start(
            ranks, tmp_path, addresses, victim, fault, HOSTOPT_COMMUNICATION=communication
        )
        assert started[victim].wait(60) == {"kill": -9, "raise": 1}[action]
        survivor = started[1 - victim]
        assert survivor.wait(10) == 200, survivor.output
    verb = {"kill": "lost", "raise": "stopped with an error"}[action]
    assert f"PeerLostError: rank {victim} (worker:{victim}, {addresses[victim]}) {verb}" in (
        survivor.output
    )
    if action == "raise":
        for rank in started:
            assert "ZeroDivisionError: in the middle of a step" in rank.output
    result = checkpoints(tmp_path)
    # a chief whose worker dies when both have the sums may complete that step
    assert max(result) in (3, 4) if victim == 1 and point != "before-reduce" else max(result) == 3
    for step, variables in result.items():
        assert variables["global_step"] == step
        for name, value in unbroken[step].items():
            np.testing.assert_array_equal(variables[name], value, err_msg=f"{name} at {step}")
    ranks.run("train_with_fault.py", 2, arguments=settings(tmp_path, steps=LAST))
    resumed = checkpoints(tmp_path)[LAST]
    assert resumed.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


def test_a_rank_that_is_stuck_in_input_fn_is_named_with_its_stacks(
    tmp_path: Path, ranks: Ranks
) -> None:
    fault = {"point": "input", "step": 4, "action": "sleep"}
    environ = {
        "HOSTOPT_STALL_WARNING_S": str(deadline_s(1)),
        "HOSTOPT_COLLECTIVE_TIMEOUT_S": str(deadline_s(3)),
    }
    with reserved_addresses(2) as addresses:
        chief, stuck = start(ranks, tmp_path, addresses, 1, fault, **environ)
        assert chief.wait(60) == 201, chief.output
        assert stuck.process.poll() is None
        assert "CollectiveTimeoutError" in chief.output
        assert f"rank 1 (worker:1, {addresses[1]}) is in no collective" in chief.output
        assert "rank 0 has waited " in chief.output  # the warning before the timeout
        debug = tmp_path / "model" / "adam" / "hostopt-debug"
        assert "stuck_in_user_code" in (debug / "rank_1.stacks.txt").read_text()
        assert (
            json.loads((debug / "rank_0.events.json").read_text())["error"]["facts"]["rank"] == 1
        )
        stuck.process.kill()
        stuck.process.wait()


def test_a_missing_rank_is_named(tmp_path: Path, ranks: Ranks) -> None:
    with reserved_addresses(2) as addresses:
        (chief,) = ranks.start(
            "train_with_fault.py",
            {"worker": addresses},
            tasks=[("worker", 0)],
            arguments=settings(tmp_path),
            environ={"HOSTOPT_RENDEZVOUS_TIMEOUT_S": "3"},
        )
        assert chief.wait(60) == 202, chief.output
    assert f"missing: worker:1 ({addresses[1]})" in chief.output


def test_a_full_disk_ends_all_ranks_and_keeps_the_last_checkpoint(
    tmp_path: Path, ranks: Ranks
) -> None:
    # from step 3 on no file may exceed 1 MB; a checkpoint has 2 MB
    chosen = {"hidden": 8000, "checkpoint_steps": 2}
    fault = {"point": "before-reduce", "step": 2, "action": "fill"}
    with reserved_addresses(2) as addresses:
        for rank in start(ranks, tmp_path, addresses, 0, fault, chosen):
            assert rank.wait(60) == 74, rank.output
            assert "CheckpointError: cannot save " in rank.output
            assert "model.ckpt-4: " in rank.output
            assert "File too large" in rank.output
            assert "MB are needed" in rank.output
            assert "Newest intact checkpoint: step 2." in rank.output
    assert sorted(checkpoints(tmp_path)) == [0, 2]
    model = tmp_path / "model" / "adam"
    assert tf.train.latest_checkpoint(str(model)) == str(model / "model.ckpt-2")
    assert not list(model.glob("*ckpt-4*"))


def test_running_out_of_descriptors_is_a_resource_error(tmp_path: Path, ranks: Ranks) -> None:
    fault = {"point": "before-reduce", "step": 2, "action": "open-no-more"}
    with reserved_addresses(2) as addresses:
        started = start(ranks, tmp_path, addresses, 0, fault)
        for rank in started:
            assert rank.wait(60) == 203, rank.output
            assert "ResourceError: " in rank.output
            assert "no file descriptor is left (" in rank.output
            assert "Too many open files" in rank.output
            assert "Free disk space" not in rank.output
            assert "Re-run the same command to resume" in rank.output
        assert "Newest intact checkpoint: step 2." in started[1].output
        for rank in ranks.start(
            "train_with_fault.py", {"worker": addresses}, arguments=settings(tmp_path)
        ):
            assert rank.wait(60) == 0, rank.output
    assert max(checkpoints(tmp_path)) == STEPS


def test_a_damaged_newest_checkpoint_is_refused_or_skipped(tmp_path: Path, ranks: Ranks) -> None:
    arguments = settings(tmp_path, checkpoint_steps=2)
    ranks.run("train_with_fault.py", 2, arguments=arguments)
    model = tmp_path / "model" / "adam"
    intact = tf.train.load_variable(str(model / "model.ckpt-2"), "dense/kernel")
    data = next(model.glob("model.ckpt-4.data-00000-of-*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with reserved_addresses(2) as addresses:
        started = ranks.start("train_with_fault.py", {"worker": addresses}, arguments=arguments)
        for rank in started:
            assert rank.wait(60) == 74, rank.output
            assert f"CheckpointError: cannot read {model}/model.ckpt-4.data-*, " in rank.output
            assert "Newest intact checkpoint: step 2." in rank.output
    previous = {"HOSTOPT_RESTORE_PREVIOUS": "true"}
    chief, _ = ranks.run("train_with_fault.py", 2, arguments=arguments, environ=previous)
    assert f"Training resumes from {model}/model.ckpt-2" in chief.output
    assert f"Restoring parameters from {model}/model.ckpt-2" in chief.output
    result = checkpoints(tmp_path)  # all of them can be read
    assert max(result) == STEPS
    np.testing.assert_array_equal(result[2]["dense/kernel"], intact)
