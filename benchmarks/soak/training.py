"""A training under the launcher, which may end and be started again, and all of its processes."""

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
    """The task of a rank, as the launcher shows it."""
    return "chief:0" if rank == 0 else f"worker:{rank - 1}"


class Training:
    """A training that goes on in one directory, however often its launcher is started.

    Args:
      directory: where the model, the log and temporary files are; made if it is not there.
      *arguments: of each rank.
      evaluators: how many.
      model_dir: another place for the model.
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
        self._token = secrets.token_hex(16)  # strangers have none
        self.moved_dir = self.model_dir.with_name("moved")  # where a fault may put it
        self.temporary = directory / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self._log = directory / "log"
        self._log.touch()
        self._arguments = arguments
        self._evaluators = evaluators
        self._launcher: subprocess.Popen[bytes] | None = None

    # -- the launcher ----------------------------------------------------------------------------

    def start(self, *options: str) -> None:
        """Start the launcher.

        Args:
          *options: of `hostopt run`, beside those that are always the same.
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
                start_new_session=True,  # Ctrl-C is for the soak alone
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
        """Send a signal to the launcher."""
        os.kill(self.launcher, signum)

    def end(self, timeout_s: float = _END_S) -> int:
        """Wait for the launcher's end, and return its exit code.

        Raises:
          BenchmarkError: it does not come in time.
        """
        self.wait_until(lambda: self.code is not None, "end of the launcher", timeout_s)
        assert self.code is not None
        return self.code

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float) -> None:
        """Wait for something.

        Raises:
          BenchmarkError: it does not come in time.
        """
        if not within(timeout_s, condition):
            raise common.BenchmarkError(f"no {what} within {timeout_s:g} s")

    def second(self) -> Training:
        """Another run, with the same command and model_dir."""
        directory = self._log.with_name("second")
        arguments, evaluators = self._arguments, self._evaluators
        return Training(directory, *arguments, evaluators=evaluators, model_dir=self.model_dir)

    # -- processes -------------------------------------------------------------------------------

    def pid(self, role: str) -> int:
        """The process of a role that was started last."""
        return int(self.journal.starts[role]["pid"])

    def roles(self) -> list[str]:
        """All roles beside the launcher."""
        return [*map(role_of, range(RANKS)), *(f"evaluator:{i}" for i in range(self._evaluators))]

    def all_live(self) -> bool:
        """Whether the last process of each role is there."""
        return all(
            role in self.journal.starts and psutil.pid_exists(self.pid(role))
            for role in self.roles()
        )

    def supervisors(self) -> list[int]:
        """The processes between the launcher and its tasks."""
        return [child.pid for child in psutil.Process(self.launcher).children()]

    def processes(self) -> list[psutil.Process]:
        """All processes of this training, whoever their parents are now."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def orphans(self) -> list[psutil.Process]:
        """Those that are not below the launcher that runs, or all if none does."""
        lives = self._launcher is not None and self.code is None
        return [process for process in self.processes() if not (lives and self._belongs(process))]

    def kill_all(self) -> None:
        """Kill the launcher and whatever is left."""
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
        kill(self.processes())

    def close(self) -> None:
        """`kill_all`, and hear of nothing any more."""
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
        return True  # it has ended meanwhile

    # -- files -----------------------------------------------------------------------------------

    def newest(self) -> Path:
        """Path of the checkpoint that the file `checkpoint` names."""
        text = (self.model_dir / "checkpoint").read_text()
        found = re.search(r'^model_checkpoint_path: "(.*)"', text)
        if found is None:
            raise common.BenchmarkError(f"no checkpoint is named in {text!r}")
        return self.model_dir / found[1]

    def log_bytes(self) -> int:
        """Size of what all processes have printed."""
        return self._log.stat().st_size

    def log_since(self, begin: int, lines: int = 40) -> list[str]:
        """The last lines of what they have printed since it had this size."""
        with self._log.open("rb") as log:
            log.seek(begin)
            text = log.read().decode(errors="replace")
        return [line for line in text.splitlines() if not _NOISE.search(line)][-lines:]


def within(timeout_s: float, condition: Callable[[], Any]) -> bool:
    """Wait for something, and return whether it came in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def kill(processes: list[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, _GONE_S)
