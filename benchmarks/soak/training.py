"""A training under the launcher, which may end and be restarted, and all of its processes."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common
from benchmarks.soak import notes

HERE = Path(__file__).resolve().parent
RANKS = 2
RESTORE_PREVIOUS = "--restore-previous"
_NOISE = re.compile(r" [IW]0000 00:00|absl::InitializeLog|deprecated|Instructions for|^\S* Use ")
_POLL_S = 0.05
_END_S = 60.0
_GONE_S = 10.0


def role_of(rank: int) -> str:
    """Returns the task of a rank, as the launcher shows it."""
    return "chief:0" if rank == 0 else f"worker:{rank - 1}"


class Training:
    """A training in one directory, over any number of starts of its launcher.

    Args:
      directory: directory of the model, the log and temporary files; created if necessary.
      *arguments: arguments of each rank.
      evaluators: number of evaluators.
      model_dir: another directory for the model.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: object,
        evaluators: int = 0,
        model_dir: Path | None = None,
    ) -> None:
        self.journal = notes.Journal()
        self.model_dir = model_dir or directory / "model"
        self._token = secrets.token_hex(16)  # unknown to strangers
        self.moved_dir = self.model_dir.with_name("moved")  # target of the fault that moves it
        self.temporary = directory / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self._log = directory / "log"
        self._log.touch()
        self._arguments = arguments
        self._evaluators = evaluators
        self._launcher: subprocess.Popen[bytes] | None = None

    # -- the launcher ----------------------------------------------------------------------------

    def start(self, *options: str) -> None:
        """Starts the launcher.

        Args:
          *options: options of `hostopt run`, in addition to the fixed ones.
        """
        run = ["run", "-np", RANKS, "--evaluators", self._evaluators, "--max-restarts", 100_000]
        rank = [HERE / "rank.py", "--model-dir", self.model_dir, *self._arguments]
        with self._log.open("ab") as log:
            self._launcher = subprocess.Popen(
                [
                    sys.executable,
                    *map(str, [HERE / "launcher.py", *run, *options, "--", *rank]),
                ],
                env={
                    **os.environ,
                    **common.QUIET,
                    **common.SAME_THREADS,
                    notes.VARIABLE: self.journal.name,
                    "PYTHONPATH": str(common.ROOT),
                    "TMPDIR": str(self.temporary),
                    "HOSTOPT_TOKEN": self._token,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C goes to the soak only
            )

    @property
    def launcher(self) -> int:
        """Process of the launcher."""
        assert self._launcher is not None
        return self._launcher.pid

    @property
    def code(self) -> int | None:
        """Exit code of the launcher, as a shell shows it; None while it runs."""
        if self._launcher is None:
            return None
        code = self._launcher.poll()
        return 128 - code if code is not None and code < 0 else code

    def signal(self, signum: int) -> None:
        """Sends a signal to the launcher."""
        os.kill(self.launcher, signum)

    def end(self, timeout_s: float = _END_S) -> int:
        """Waits for the end of the launcher, and returns its exit code.

        Raises:
          BenchmarkError: it does not end in time.
        """
        self.wait_until(lambda: self.code is not None, "end of the launcher", timeout_s)
        assert self.code is not None
        return self.code

    def wait_until(self, condition: Callable[[], object], name: str, timeout_s: float) -> None:
        """Waits for a condition.

        Raises:
          BenchmarkError: it does not become true in time.
        """
        if not within(timeout_s, condition):
            raise common.BenchmarkError(f"no {name} within {timeout_s:g} s")

    def second(self) -> Training:
        """Runs the same command in the same model_dir."""
        directory = self._log.with_name("second")
        arguments, evaluators = self._arguments, self._evaluators
        return Training(directory, *arguments, evaluators=evaluators, model_dir=self.model_dir)

    # -- processes -------------------------------------------------------------------------------

    def pid(self, role: str) -> int:
        """Returns the latest process of a role."""
        return int(self.journal.starts[role]["pid"])

    def roles(self) -> list[str]:
        """All roles except the launcher."""
        return [*map(role_of, range(RANKS)), *(f"evaluator:{i}" for i in range(self._evaluators))]

    def all_live(self) -> bool:
        """Returns True if the latest process of each role is running."""
        return all(
            role in self.journal.starts and psutil.pid_exists(self.pid(role))
            for role in self.roles()
        )

    def supervisors(self) -> list[int]:
        """Returns the processes between the launcher and its tasks."""
        return [child.pid for child in psutil.Process(self.launcher).children()]

    def processes(self) -> list[psutil.Process]:
        """Returns all processes of this training, including those with a new parent."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def orphans(self) -> list[psutil.Process]:
        """Returns processes that do not descend from the running launcher; all if none runs."""
        runs = self._launcher is not None and self.code is None
        return [process for process in self.processes() if not (runs and self._belongs(process))]

    def kill_all(self) -> None:
        """Kills the launcher and all remaining processes."""
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
        kill(self.processes())

    def close(self) -> None:
        """Kills all processes, and closes the journal."""
        self.kill_all()
        self.journal.close()

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                return process.environ().get(notes.VARIABLE) == self.journal.name
        return False

    def _belongs(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return self.launcher in (process.pid, *(parent.pid for parent in process.parents()))
        return True  # ended in the meantime

    # -- files -----------------------------------------------------------------------------------

    def newest(self) -> Path:
        """Returns the path of the checkpoint that the file `checkpoint` names."""
        text = (self.model_dir / "checkpoint").read_text()
        result = re.search(r'^model_checkpoint_path: "(.*)"', text)
        if result is None:
            raise common.BenchmarkError(f"no checkpoint is named in {text!r}")
        return self.model_dir / result[1]

    def log_bytes(self) -> int:
        """Returns the size of the output of all processes."""
        return self._log.stat().st_size

    def log_since(self, begin: int, lines: int = 40) -> list[str]:
        """Returns the last lines of the output after this size."""
        with self._log.open("rb") as log:
            log.seek(begin)
            text = log.read().decode(errors="replace")
        return [line for line in text.splitlines() if not _NOISE.search(line)][-lines:]


def within(timeout_s: float, condition: Callable[[], Any]) -> bool:
    """Waits for a condition; returns True if it became true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def kill(processes: list[psutil.Process]) -> None:
    """Kills processes, and waits until they have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, _GONE_S)
