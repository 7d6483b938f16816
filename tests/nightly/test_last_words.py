"""Output of `hostopt run` when a training fails: the cause is last, and appears once."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS
from launcher import Launcher

NOISE = re.compile(
    r"chttp2|goaway|too_many_pings|During handling of|Original stack trace", re.IGNORECASE
)
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}  # hides lines of TensorFlow on standard error


def run(
    launcher: Launcher,
    model_dir: Path,
    program: str = "train.py",
    rank_settings: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[int, str]:
    """Returns exit code and standard error of a training on two ranks.

    Args:
      launcher: starts the training.
      model_dir: directory of the model.
      program: program of tests/programs.
      rank_settings: settings of rank 1, if they differ.
      **settings: settings of both ranks.
    """
    common = {"model_dir": str(model_dir), "optimizers": ["adam"], "checkpoint_steps": 2}
    chosen = {**common, **settings}
    if rank_settings is not None:
        chosen = {"runs": [{**chosen, "rank_settings": {"1": rank_settings}}]}
    process = launcher.run("-np", "2", "--", str(PROGRAMS / program), json.dumps(chosen), **QUIET)
    _, err = process.communicate(timeout=150)
    assert not NOISE.search(err), err
    return process.returncode, err


def reports_of(err: str, task: str) -> list[str]:
    """Returns the lines in which a rank reports the error that ends it."""
    return [line for line in err.splitlines() if line.startswith(f"[{task}] hostopt: rank")]


@pytest.mark.parametrize(
    ("rank_settings", "cause"),
    [
        ({"raise_in": "model_fn"}, "ZeroDivisionError: raised in model_fn"),
        ({"raise_in": "host_call op", "raise_at": 3}, "ZeroDivisionError: raised in host_call op"),
        ({"raise_in": "input_fn", "raise_at": 3}, "ZeroDivisionError: raised in input_fn"),
    ],
)
@pytest.mark.parametrize("communication", ["grpc", "auto"])
def test_an_exception_on_one_rank(
    launcher: Launcher,
    tmp_path: Path,
    rank_settings: dict[str, Any],
    cause: str,
    communication: str,
) -> None:
    code, err = run(launcher, tmp_path, rank_settings=rank_settings, communication=communication)
    assert code == 1
    file = tmp_path / "adam" / "hostopt-debug" / "rank_1.error.txt"
    last = err.splitlines()[-1]
    assert last.startswith("hostopt: worker:0: ")
    assert last.endswith(f"{cause} [traceback: {file}]")
    (other,) = reports_of(err, "chief:0")
    assert "PeerLostError: rank 1 (worker:0, " in other
    assert f"{cause}. " in other
    assert "[chief:0] Traceback" not in err
    # the traceback is shown, down to the line of the program
    assert "[worker:0] Traceback (most recent call last):" in err
    assert re.search(r"\[worker:0\] +raise ERRORS\[settings\[\"raise_kind\"\]\]", err)
    (report,) = reports_of(err, "worker:0")
    assert report.endswith(f" ends with this error [full traceback: {file}]")
    assert cause in file.read_text()
    assert "Traceback" in file.with_name("rank_0.error.txt").read_text()


def test_a_nonfinite_gradient(launcher: Launcher, tmp_path: Path) -> None:
    code, err = run(launcher, tmp_path, nan_at=[1, 3])
    assert code == 79
    last = err.splitlines()[-1]
    assert re.match(
        r"hostopt: (chief|worker):0: NonFiniteGradientError: not finite in step 3", last
    )
    assert "rank 1 (worker:0, " in last
    assert "lower the learning rate or clip" in last
    assert "Traceback" not in err
    assert len(reports_of(err, "chief:0")) == len(reports_of(err, "worker:0")) == 1


def test_ranks_with_different_models(launcher: Launcher, tmp_path: Path) -> None:
    code, err = run(launcher, tmp_path, rank_settings={"learning_rate": 0.02})
    assert code == 65
    last = err.splitlines()[-1]
    assert "CollectiveMismatchError: the updates of variables differ between rank 0" in last
    assert "lr=0.01" in last
    assert "lr=0.02" in last
    assert "Traceback" not in err


def test_a_rank_that_is_killed_is_reported_by_the_other(
    launcher: Launcher, tmp_path: Path
) -> None:
    fault = {"point": "before-reduce", "step": 5, "action": "kill", "slot": 1}
    code, err = run(launcher, tmp_path, "train_with_fault.py", fault=fault)
    assert code == 137
    *_, verdict, last = err.splitlines()
    assert "root cause: worker:0: exit code 137 (SIGKILL)" in verdict
    assert last.startswith("hostopt: chief:0: PeerLostError: rank 1 (worker:0, ")
    assert "Newest intact checkpoint: step 4. Re-run the same command to resume." in last
    assert "Traceback" not in err


def test_the_complete_error_is_shown_without_a_directory(
    launcher: Launcher, tmp_path: Path
) -> None:
    code = """
        import hostopt
        communicator = hostopt.connect()
        if communicator.rank == 1:
            try:
                1 // 0
            except ZeroDivisionError:
                raise ValueError("of rank 1")
        communicator.barrier()
    """
    script = tmp_path / "main.py"
    script.write_text(textwrap.dedent(code))
    _, err = launcher.ended("-np", "2", "--", str(script), code=1, limit_s=60)
    assert "[worker:0] During handling of the above exception" in err
    assert "[chief:0] Traceback" in err
    assert err.splitlines()[-1] == "hostopt: worker:0: ValueError: of rank 1"
