"""One fault from its beginning until the training has gone beyond it, and all that is checked.

::

    strike --> launcher goes on --------------------------> new checkpoint --> checks
       `-----> launcher has ended --> mend --> start again ------^
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

GONE_S = 2.0  # until the ranks of a launcher that has ended have ended, too
KEPT_MB, KEPT_DESCRIPTORS = 100.0, 8  # more than a rank had before: a stranger has left that
_END_S = 90.0  # until a launcher ends that must end
_SETTLED_S = 180.0
CALM_S = 15.0  # until descriptors and files are as they were


class Play:
    """A fault in a training that trains.

    Args:
      training: it has settled.
      fault: which one.
    """

    def __init__(self, training: Training, fault: Fault) -> None:
        self._training = training
        self._fault = fault
        self._kind = KINDS[fault.kind]
        self._scene = Scene(training, fault)
        self._lived = training.pid("chief:0")
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
        """Bring the fault about, wait until the training has gone beyond it, and check all.

        `row` has the fault; `time`, when it happened; what `recovery` finds; exit `codes`; the
        `sample` of afterwards, and the number of `files`; and all `problems` in words, with the
        last lines of the `log` if there are any.

        Raises:
          BenchmarkError: the training does not go on, not even from a copy of its checkpoint.
        """
        time.sleep(self._fault.pause_s)
        copy = _Copy(self._training)
        self.row["time"] = begun = time.time()
        code = None
        try:
            self.row["time"] = self._kind.strike(self._scene) or begun
            code = self._follow(self.row["time"])
        except (common.BenchmarkError, OSError, psutil.Error) as error:
            self._problems.append(str(error).splitlines()[0])
            copy.go_on_from()
            if self._settle(begun, True) is not None:
                raise common.BenchmarkError("it cannot go on from a copy, either") from error
        self._check(code)

    def _follow(self, struck: float) -> int | None:
        """Wait for what is wanted, and have the training go on; returns the launcher's code."""
        training, wanted = self._training, self._kind.wanted
        if wanted.launcher is None:
            code = self._settle(time.time(), wanted.restarts)
        else:
            code = self._wait_for_end(struck)
        if code is None:
            return None
        self._check_orphans("after the launcher's end")
        self._kind.mend(self._scene)
        training.start(*wanted.options)
        again = self._settle(struck, True)
        if again is not None:
            raise common.BenchmarkError(f"started again, the launcher ended with code {again}")
        return code

    def _wait_for_end(self, struck: float) -> int:
        training = self._training

        def trains() -> bool:
            steps = of_kind(training.journal.read(), "step")
            return any(note["time"] > struck and note["pid"] != self._lived for note in steps)

        training.wait_until(
            lambda: training.code is not None or trains(), "end of the launcher", _END_S
        )
        if training.code is None:
            raise common.BenchmarkError("it trains")
        return training.code

    def _settle(self, since: float, restarted: bool) -> int | None:
        """Wait until a new checkpoint is there, and all processes; returns the launcher's code."""
        training = self._training

        def settled() -> bool:
            notes = training.journal.read()
            return has_settled(since, self._lived, restarted, notes) and training.all_live()

        training.wait_until(
            lambda: training.code is not None or settled(), "new checkpoint", _SETTLED_S
        )
        return training.code

    # -- what is checked --------------------------------------------------------------------------

    def _check(self, code: int | None) -> None:
        training, wanted = self._training, self._kind.wanted
        notes = training.journal.read()
        attempts = of_kind(notes, "attempt")
        self.row.update(recovery(self.row["time"], notes))
        self.row["codes"] = {checks.LAUNCHER: code}
        for attempt in attempts:
            self.row["codes"].update(attempt["codes"])
        self._problems += self._scene.problems
        self._problems += checks.wrong_codes(wanted, self._scene.role, code, attempts)
        if wanted.keeps and self.row.get("again"):
            self._problems.append(f"{self.row['again']} steps made again, wanted none")
        self._check_orphans("in the end")
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
        """A save may be under way, so files are left over that stay."""
        stay = checks.leftovers(self._training.model_dir) - self._leftovers

        def gone() -> bool:
            stay.intersection_update(checks.leftovers(self._training.model_dir))
            return not stay

        if not within(CALM_S, gone):
            self._problems.append(f"files that stay: {', '.join(sorted(stay))}")

    def _check_kept(self) -> None:
        """A rank that lives on gives back what others made it take."""
        role = self._scene.role

        def more(measure: str) -> float:
            return checks.sample(self._training)[role][measure] - self._before[role][measure]

        if not within(CALM_S, lambda: more("descriptors") <= KEPT_DESCRIPTORS):
            self._problems.append(f"{role} keeps {more('descriptors'):g} descriptors more")
        if more("mb") > KEPT_MB:
            self._problems.append(f"{role} keeps {more('mb'):.0f} MB more")


class _Copy:
    """What a backup holds: the newest checkpoint, to go on from where a fault has ended all."""

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

    def go_on_from(self) -> None:
        """Kill all, put the copy in the place of model_dir, and start again."""
        self._training.kill_all()
        for path in (self._training.model_dir, self._training.moved_dir):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self._directory, self._training.model_dir)
        self._training.start()


def describe(process: psutil.Process) -> str:
    """A process, as messages show it."""
    try:
        words = [Path(word).name for word in process.cmdline()]
    except psutil.Error:
        words = []
    scripts = [word for word in words if word.endswith(".py")]
    return " ".join([str(process.pid), *scripts[:1]])
