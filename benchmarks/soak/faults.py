"""Catalogue of faults: how each kind is injected, and the expected consequences.

A kind has a name, a group, `expected` consequences and two methods: `inject` causes the fault, and
`repair` repairs the damage as an operator would, after the launcher has ended.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from benchmarks.soak.recovery import of_kind
from benchmarks.soak.training import (
    HERE,
    RESTORE_PREVIOUS,
    Training,
    role_of,
    within,
)

PROCESSES, FILES, WIRE = "processes", "files", "wire"
KILLED, TERMINATED, INTERRUPTED = (128 + n for n in (signal.SIGKILL, signal.SIGTERM, 2))
DAMAGED, REFUSED, PROTOCOL, LOST, TIMED_OUT = 74, 78, 76, 200, 201
GROUPS = (PROCESSES, FILES, WIRE)
_PAUSE_S = (0.0, 2.0)  # before a fault, so that it may hit a save or an evaluation
_INJECT_S = 20.0
_FREEZE_S = 1.0
_STRANGER_S = 90.0
_SECOND_RUN_S = 90.0
_FULL_BYTES = (
    1 << 12,
    1 << 16,
)  # too small for a checkpoint, the first even for its data
_DATA, _INDEX, _INPUT, _STATE = ".data-*", ".index", ".input", "checkpoint"


@dataclass(frozen=True)
class Expected:
    """Expected consequences of a fault.

    Args:
      launcher: exit code of the launcher; None if it keeps running.
      faulty: allowed exit codes of the rank with the fault; empty if it keeps running.
      others: allowed exit codes of the other ranks.
      evaluators: allowed exit codes of evaluators while the launcher keeps running.
      keeps: True if no step may be repeated.
      options: options of the launcher when it is started again.
    """

    launcher: int | None = None
    faulty: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    evaluators: tuple[int, ...] = ()
    keeps: bool = False
    options: tuple[str, ...] = ()

    @property
    def restarts(self) -> bool:
        """True if the ranks are restarted, by the launcher or by hand."""
        return self.launcher is not None or bool(self.faulty)

    def __str__(self) -> str:
        if not self.restarts:
            ended = f"evaluator {_codes(self.evaluators)}" if self.evaluators else ""
            return ended or "keeps running"
        launcher = "keeps running" if self.launcher is None else f"ends with {self.launcher}"
        if not self.faulty:
            return f"launcher {launcher}"
        return f"ranks {_codes(self.faulty)}, {_codes(self.others)}; launcher {launcher}"


def _codes(codes: Sequence[int]) -> str:
    return " or ".join(map(str, codes))


@dataclass(frozen=True)
class Fault:
    """One fault of a plan.

    Args:
      kind: name of the kind.
      rank: rank with the fault, if the fault is in one rank.
      pause_s: seconds to wait before the fault.
      seed: seed of all other random choices.
    """

    kind: str
    rank: int
    pause_s: float
    seed: int


def make_plan(seed: int, kinds: Sequence[str], ranks: int) -> Iterator[Fault]:
    """Chooses faults at random, each kind equally often.

    Args:
      seed: seed of the plan.
      kinds: names of the kinds.
      ranks: number of ranks.

    Yields:
      Faults, infinitely many.
    """
    chance = random.Random(seed)
    while True:
        for kind in chance.sample(kinds, len(kinds)):
            pause_s = round(chance.uniform(*_PAUSE_S), 2)
            yield Fault(kind, chance.randrange(ranks), pause_s, chance.randrange(1 << 31))


class Scene:
    """Context of a fault: the training, the rank with the fault, and random numbers.

    Args:
      training: a running training.
      fault: the fault.
    """

    def __init__(self, training: Training, fault: Fault) -> None:
        self.training = training
        self.role = role_of(fault.rank)
        self.chance = random.Random(fault.seed)
        self.problems: list[str] = []  # problems that the common checks do not find

    @property
    def pid(self) -> int:
        """Process id of the rank with the fault."""
        return self.training.pid(self.role)

    @property
    def address(self) -> tuple[str, int]:
        """Address of the rank with the fault."""
        start = self.training.journal.starts[self.role]
        host, _, port = start["address"].rpartition(":")
        return host, int(port)

    def kill_launcher(self) -> None:
        """Kills the training and leaves all files unchanged."""
        self.training.signal(signal.SIGKILL)
        self.training.end()
        within(_INJECT_S, lambda: not self.training.orphans())


class Kind:
    """A kind of fault.

    Args:
      name: name in tables.
      expected: expected consequences.
    """

    group = PROCESSES

    def __init__(self, name: str, expected: Expected) -> None:
        self.name = name
        self.expected = expected

    def inject(self, scene: Scene) -> float | None:
        """Injects the fault; returns its time if it was not immediate."""
        raise NotImplementedError

    def repair(self, scene: Scene) -> None:
        """Repairs the damage as an operator would, after the launcher has ended."""


# --- processes ----------------------------------------------------------------------------------


class SignalToRank(Kind):
    def __init__(self, name: str, signum: int, expected: Expected) -> None:
        super().__init__(name, expected)
        self._signum = signum

    def inject(self, scene: Scene) -> None:
        os.kill(scene.pid, self._signum)


class SignalToLauncher(SignalToRank):
    def inject(self, scene: Scene) -> None:
        scene.training.signal(self._signum)


class Freeze(Kind):
    def inject(self, scene: Scene) -> None:
        os.kill(scene.pid, signal.SIGSTOP)
        time.sleep(_FREEZE_S)
        os.kill(scene.pid, signal.SIGCONT)


class KillSupervisor(Kind):
    def inject(self, scene: Scene) -> None:
        os.kill(_parent(scene.pid), signal.SIGKILL)


class KillAllParents(Kind):
    """Kills the launcher and the supervisors at once, so that none sees another one end."""

    def inject(self, scene: Scene) -> None:
        pids = [scene.training.launcher, *scene.training.supervisors()]
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, signum)


class KillEvaluator(Kind):
    def inject(self, scene: Scene) -> None:
        os.kill(scene.training.pid("evaluator:0"), signal.SIGKILL)


class Inside(Kind):
    """A fault that a rank injects into itself, after a step or immediately; see rank.py."""

    def inject(self, scene: Scene) -> float | None:
        pid, journal = scene.pid, scene.training.journal
        journal.ask(pid, self.name)

        def happened() -> list[float]:
            faults = of_kind(journal.read(), "fault")
            return [note["time"] for note in faults if note["pid"] == pid]

        scene.training.wait_until(happened, f"{self.name} in {scene.role}", _INJECT_S)
        return happened()[0]


class InsideWire(Inside):
    group = WIRE


# --- files --------------------------------------------------------------------------------------


class Damage(Kind):
    """Damages files of the newest checkpoint while no training runs, then restarts it.

    Args:
      name: name in tables.
      part: suffix of the file after the name of the checkpoint, or _STATE.
      damage: function that damages the file.
    """

    group = FILES

    def __init__(
        self, name: str, part: str, damage: Callable[[Path, random.Random], None]
    ) -> None:
        codes = (DAMAGED,)
        super().__init__(name, Expected(DAMAGED, codes, codes, options=(RESTORE_PREVIOUS,)))
        self._part = part
        self._damage = damage

    def inject(self, scene: Scene) -> float:
        scene.kill_launcher()
        newest = scene.training.newest()
        pattern = _STATE if self._part == _STATE else newest.name + self._part
        path = max(newest.parent.glob(pattern), key=lambda path: path.stat().st_size)
        self._damage(path, scene.chance)
        time_s = time.time()
        scene.training.start()
        return time_s


class ReplaceByDirectory(Damage):
    """Replaces a file by a directory, which a save cannot overwrite."""

    def __init__(self, name: str, part: str) -> None:
        super().__init__(name, part, self._replace)

    def _replace(self, path: Path, chance: random.Random) -> None:
        self._path = path
        path.unlink()
        path.mkdir()

    def repair(self, scene: Scene) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.rmdir()


def _truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def _flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def _flip_in_first_half(path: Path, chance: random.Random) -> None:
    """Flips a bit in the first half; the second half of an index has bytes that are never read."""
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data) // 2)] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def _delete(path: Path, chance: random.Random) -> None:
    path.unlink()


class DiskFull(Kind):
    """Limits the number of bytes that the chief may write to a file."""

    group = FILES

    def inject(self, scene: Scene) -> None:
        most = scene.chance.choice(_FULL_BYTES)
        chief = scene.training.pid("chief:0")
        resource.prlimit(chief, resource.RLIMIT_FSIZE, (most, most))


class MoveAway(Kind):
    """Moves model_dir away until the training has ended."""

    group = FILES

    def inject(self, scene: Scene) -> None:
        scene.training.model_dir.rename(scene.training.moved_dir)

    def repair(self, scene: Scene) -> None:
        model_dir = scene.training.model_dir
        if model_dir.exists():  # files that an abort has written
            shutil.rmtree(model_dir)
        scene.training.moved_dir.rename(model_dir)


class Leftovers(Kind):
    """Creates the files that a chief killed during a save leaves behind, then kills it."""

    group = FILES

    def inject(self, scene: Scene) -> None:
        newest = scene.training.newest()
        folder = newest.with_name(newest.name + "0_temp")  # of a step that never comes
        folder.mkdir()
        for part in (".data-00000-of-00001", _INDEX):
            (folder / f"part-00000-of-00001{part}").write_bytes(bytes(1000))
        newest.with_name(f"{newest.name}0{_INPUT}.tmp").write_bytes(bytes(1000))
        os.kill(scene.training.pid("chief:0"), signal.SIGKILL)


class SecondRun(Kind):
    """Starts the same command in the same model_dir while the first one runs."""

    group = FILES

    def inject(self, scene: Scene) -> None:
        with contextlib.closing(scene.training.second()) as second:
            second.start()

            def decided() -> bool:
                return second.code is not None or bool(of_kind(second.journal.read(), "step"))

            second.wait_until(decided, "end of a second run", _SECOND_RUN_S)
            if second.code != REFUSED:
                came_to = "it trains" if second.code is None else f"exit code {second.code}"
                scene.problems.append(f"a second run: {came_to}, wanted exit code {REFUSED}")


# --- wire ---------------------------------------------------------------------------------------


class Stranger(Kind):
    """A process without the token that connects to the port of a rank; see stranger.py."""

    group = WIRE

    def inject(self, scene: Scene) -> None:
        host, port = scene.address
        command = [sys.executable, HERE / "stranger.py", self.name, host, port]
        common.run([*command, scene.chance.randrange(1 << 31)], _STRANGER_S)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- catalogue ----------------------------------------------------------------------------------

_KEEPS_RUNNING = Expected()
_ONE_KILLED = Expected(None, (KILLED,), (LOST,))

KINDS = {
    kind.name: kind
    for kind in (
        SignalToRank("kill", signal.SIGKILL, _ONE_KILLED),
        Inside("kill-with-child", _ONE_KILLED),
        KillSupervisor("kill-supervisor", _ONE_KILLED),
        SignalToRank("stop", signal.SIGSTOP, _ONE_KILLED),
        Freeze("freeze", _KEEPS_RUNNING),
        SignalToRank(
            "term", signal.SIGTERM, Expected(None, (TERMINATED,), (TERMINATED,), keeps=True)
        ),
        Inside("os-exit", Expected(None, (0,), (LOST,))),
        Inside("sys-exit", Expected(None, (0,), (LOST,))),
        Inside("raise", Expected(1, (1,), (LOST,))),
        Inside("hang", Expected(None, (KILLED, TERMINATED, TIMED_OUT), (TIMED_OUT,))),
        KillEvaluator("kill-evaluator", Expected(evaluators=(KILLED,))),
        SignalToLauncher("kill-launcher", signal.SIGKILL, Expected(KILLED)),
        KillAllParents("kill-all-parents", Expected(KILLED)),
        SignalToLauncher(
            "term-launcher",
            signal.SIGTERM,
            Expected(TERMINATED, (TERMINATED,), (TERMINATED,), keeps=True),
        ),
        SignalToLauncher(
            "ctrl-c",
            signal.SIGINT,
            Expected(INTERRUPTED, (INTERRUPTED,), (INTERRUPTED,), keeps=True),
        ),
        Damage("truncate-data", _DATA, _truncate),
        Damage("flip-index", _INDEX, _flip_in_first_half),
        Damage("flip-input", _INPUT, _flip),
        Damage("delete-checkpoint-file", _STATE, _delete),
        ReplaceByDirectory("replace-by-directory", _DATA),
        DiskFull("disk-full", Expected(DAMAGED, (DAMAGED,), (DAMAGED,))),
        MoveAway("move-model-dir", Expected(DAMAGED, (DAMAGED,), (DAMAGED,))),
        Leftovers("leftovers", Expected(None, (KILLED, LOST), (KILLED, LOST))),
        SecondRun("second-run", _KEEPS_RUNNING),
        InsideWire("close", Expected(None, (LOST,), (LOST,))),
        InsideWire("corrupt", Expected(None, (PROTOCOL,), (PROTOCOL,))),
        Stranger("idle-connections", _KEEPS_RUNNING),
        Stranger("gets", _KEEPS_RUNNING),
        Stranger("random-bytes", _KEEPS_RUNNING),
        Stranger("hellos", _KEEPS_RUNNING),
    )
}
