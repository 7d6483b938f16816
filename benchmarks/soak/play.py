"""One fault, from its injection until the training has recovered, and all checks.

::

    inject --> launcher keeps running ---------------------> new checkpoint --> checks
       `-----> launcher has ended --> repair --> restart ----------^
"""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common
from benchmarks.soak import checks
from benchmarks.soak.faults import KINDS, Fault, Scene
from benchmarks.soak.recovery import has_settled, of_kind, recovery
from benchmarks.soak.training import Training, kill, within

GONE_S = 2.0  # until the ranks end after their launcher
KEPT_MB, KEPT_DESCRIPTORS = 100.0, 8  # tolerance for resources that a stranger made a rank use
_END_S = 90.0  # until the launcher ends, if it must
_SETTLED_S = 180.0
CALM_S = 15.0  # until descriptors and files are as before


class Play:
    """A fault in a running training.

    Args:
      training: a training that has settled.
      fault: the fault.
    """

    def __init__(self, training: Training, fault: Fault) -> None:
        self._training = training
        self._fault = fault
        self._kind = KINDS[fault.kind]
        self._scene = Scene(training, fault)
        self._chief_pid = training.pid("chief:0")
        self._leftovers = checks.leftovers(training.model_dir)
        self._before = checks.sample(training)
        self._log_bytes = training.log_bytes()
        self._problems: list[str] = []
        self.row: dict[str, Any] = {
            **asdict(fault),
            "time": time.time(),
            "problems": self._problems,
        }

    def run(self) -> None:
        """Injects the fault, waits until the training has recovered, and checks everything.

        `row` contains the fault, its `time`, the result of `recovery`, exit `codes`, a `sample`
        after the recovery, the number of `files`, and descriptions of all `problems`. If there are
        problems, it also contains the last lines of the `log`.

        Raises:
          BenchmarkError: the training does not resume, not even from a copy of its checkpoint.
        """
        time.sleep(self._fault.pause_s)
        copy = _Copy(self._training)
        self.row["time"] = start = time.time()
        code = None
        try:
            self.row["time"] = self._kind.inject(self._scene) or start
            code = self._follow(self.row["time"])
        except (common.BenchmarkError, OSError, psutil.Error) as error:
            self._problems.append(str(error).splitlines()[0])
            copy.restore()
            if self._settle(start, True) is not None:
                raise common.BenchmarkError(
                    "the training does not resume from a copy, either"
                ) from error
        self._check(code)

    def _follow(self, fault_time_s: float) -> int | None:
        """Waits for the expected end, and resumes the training; returns the launcher's code."""
        training, expected = self._training, self._kind.expected
        if expected.launcher is None:
            code = self._settle(time.time(), expected.restarts)
        else:
            code = self._wait_for_end(fault_time_s)
        if code is None:
            return None
        self._check_orphans("after the launcher's end")
        self._kind.repair(self._scene)
        training.start(*expected.options)
        again = self._settle(fault_time_s, True)
        if again is not None:
            raise common.BenchmarkError(f"started again, the launcher ended with code {again}")
        return code

    def _wait_for_end(self, fault_time_s: float) -> int:
        training = self._training

        def trains() -> bool:
            steps = of_kind(training.journal.read(), "step")
            return any(
                note["time"] > fault_time_s and note["pid"] != self._chief_pid for note in steps
            )

        training.wait_until(
            lambda: training.code is not None or trains(), "end of the launcher", _END_S
        )
        if training.code is None:
            raise common.BenchmarkError("the training continues")
        return training.code

    def _settle(self, since: float, restarted: bool) -> int | None:
        """Waits for a new checkpoint and all processes; returns the exit code of the launcher."""
        training = self._training

        def settled() -> bool:
            notes = training.journal.read()
            return has_settled(since, self._chief_pid, restarted, notes) and training.all_live()

        training.wait_until(
            lambda: training.code is not None or settled(), "new checkpoint", _SETTLED_S
        )
        return training.code

    # -- checks ----------------------------------------------------------------------------------

    def _check(self, code: int | None) -> None:
        training, expected = self._training, self._kind.expected
        notes = training.journal.read()
        attempts = of_kind(notes, "attempt")
        self.row.update(recovery(self.row["time"], notes))
        self.row["codes"] = {checks.LAUNCHER: code}
        for attempt in attempts:
            self.row["codes"].update(attempt["codes"])
        self._problems += self._scene.problems
        self._problems += checks.wrong_codes(expected, self._scene.role, code, attempts)
        if expected.keeps and self.row.get("again"):
            self._problems.append(f"{self.row['again']} steps repeated, wanted none")
        self._check_orphans("after the recovery")
        self._check_leftovers()
        if not self.row.get("first_step"):
            self._check_kept()
        self.row["sample"] = checks.sample(training)
        self.row["files"] = checks.count_files(training.model_dir)
        if self._problems:
            self.row["log"] = training.log_since(self._log_bytes)

    def _check_orphans(self, when: str) -> None:
        if within(GONE_S, lambda: not self._training.orphans()):
            return
        orphans = self._training.orphans()
        names = ", ".join(map(describe, orphans))
        self._problems.append(f"orphans {when}: {names}")
        kill(orphans)

    def _check_leftovers(self) -> None:
        """Checks for leftover files; files that vanish belong to a save in progress."""
        stay = checks.leftovers(self._training.model_dir) - self._leftovers

        def gone() -> bool:
            stay.intersection_update(checks.leftovers(self._training.model_dir))
            return not stay

        if not within(CALM_S, gone):
            self._problems.append(f"files that stay: {', '.join(sorted(stay))}")

    def _check_kept(self) -> None:
        """Checks that a surviving rank releases the resources that strangers made it use."""
        role = self._scene.role

        def more(measure: str) -> float:
            return checks.sample(self._training)[role][measure] - self._before[role][measure]

        if not within(CALM_S, lambda: more("descriptors") <= KEPT_DESCRIPTORS):
            self._problems.append(f"{role} keeps {more('descriptors'):g} descriptors more")
        if more("mb") > KEPT_MB:
            self._problems.append(f"{role} keeps {more('mb'):.0f} MB more")


class _Copy:
    """A backup of the newest checkpoint, to resume from if a fault has destroyed the original."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._directory = training.model_dir.with_name("copy")
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir()
        newest = training.newest()
        for path in newest.parent.glob(f"{newest.name}.*"):
            shutil.copy(path, self._directory)
        names = ("model_checkpoint_path", "all_model_checkpoint_paths")
        lines = [f'{name}: "{newest.name}"\n' for name in names]
        (self._directory / "checkpoint").write_text("".join(lines))

    def restore(self) -> None:
        """Kills all processes, replaces model_dir by the copy, and restarts."""
        self._training.kill_all()
        for path in (self._training.model_dir, self._training.moved_dir):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self._directory, self._training.model_dir)
        self._training.start()


def describe(process: psutil.Process) -> str:
    """Describes a process for messages."""
    try:
        words = [Path(word).name for word in process.cmdline()]
    except psutil.Error:
        words = []
    scripts = [word for word in words if word.endswith(".py")]
    return " ".join([str(process.pid), *scripts[:1]])
