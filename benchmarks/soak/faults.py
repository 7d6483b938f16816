"""The catalogue: every kind of fault, how it is brought about, and what must follow.

A kind is an object with a name, a group, what is `wanted`, and two methods: `strike` breaks
something, and `mend` puts away what an operator would, once the launcher has ended.
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
_PAUSE_S = (0.0, 2.0)  # before a fault: it may come in the middle of a save or of an evaluation
_STRIKE_S = 20.0
_FREEZE_S = 1.0
_STRANGER_S = 90.0
_SECOND_RUN_S = 90.0
_FULL_BYTES = (1 << 12, 1 << 16)  # neither is room for a checkpoint, the first not for its data
_DATA, _INDEX, _INPUT, _STATE = ".data-*", ".index", ".input", "checkpoint"


@dataclass(frozen=True)
class Wanted:
    """What must follow a fault.

    Args:
      launcher: its exit code; None if it goes on.
      struck: exit codes that are right for the rank that suffers the fault; none if it lives.
      others: those for the other ranks.
      evaluators: exit codes that are right for evaluators while the launcher goes on.
      keeps: whether no step is made again.
      options: of the launcher when it is started again.
    """

    launcher: int | None = None
    struck: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    evaluators: tuple[int, ...] = ()
    keeps: bool = False
    options: tuple[str, ...] = ()

    @property
    def restarts(self) -> bool:
        """Whether the ranks are started again, by the launcher or by hand."""
        return self.launcher is not None or bool(self.struck)

    def __str__(self) -> str:
        if not self.restarts:
            ended = f"evaluator {_codes(self.evaluators)}" if self.evaluators else ""
            return ended or "goes on"
        launcher = "goes on" if self.launcher is None else f"ends with {self.launcher}"
        if not self.struck:
            return f"launcher {launcher}"
        return f"ranks {_codes(self.struck)}, {_codes(self.others)}; launcher {launcher}"


def _codes(codes: Sequence[int]) -> str:
    return " or ".join(map(str, codes))


@dataclass(frozen=True)
class Fault:
    """One fault of a plan.

    Args:
      kind: its name.
      rank: who suffers it, if it is about one rank.
      pause_s: to wait before it.
      seed: of all else that is left to chance.
    """

    kind: str
    rank: int
    pause_s: float
    seed: int


def make_plan(seed: int, kinds: Sequence[str], ranks: int) -> Iterator[Fault]:
    """Choose faults at random, each kind as often as the others.

    Args:
      seed: the same one makes the same plan.
      kinds: names.
      ranks: how many there are.

    Yields:
      Faults, without an end.
    """
    chance = random.Random(seed)
    while True:
        for kind in chance.sample(kinds, len(kinds)):
            pause_s = round(chance.uniform(*_PAUSE_S), 2)
            yield Fault(kind, chance.randrange(ranks), pause_s, chance.randrange(1 << 31))


class Scene:
    """Where a fault happens: a training, the rank that suffers, and chance.

    Args:
      training: it trains.
      fault: which one.
    """

    def __init__(self, training: Training, fault: Fault) -> None:
        self.training = training
        self.role = role_of(fault.rank)
        self.chance = random.Random(fault.seed)
        self.problems: list[str] = []  # what went wrong beside what all kinds are checked for

    @property
    def pid(self) -> int:
        """The process that suffers."""
        return self.training.pid(self.role)

    @property
    def address(self) -> tuple[str, int]:
        """Where the rank that suffers listens."""
        start = self.training.journal.starts[self.role]
        host, _, port = start["address"].rpartition(":")
        return host, int(port)

    def kill_launcher(self) -> None:
        """End the training within moments, and leave all files as they are."""
        self.training.signal(signal.SIGKILL)
        self.training.end()
        within(_STRIKE_S, lambda: not self.training.orphans())


class Kind:
    """A kind of fault.

    Args:
      name: as tables show it.
      wanted: what must follow.
    """

    group = PROCESSES

    def __init__(self, name: str, wanted: Wanted) -> None:
        self.name = name
        self.wanted = wanted

    def strike(self, scene: Scene) -> float | None:
        """Bring the fault about; returns when it happened, if that was not at once."""
        raise NotImplementedError

    def mend(self, scene: Scene) -> None:
        """Put away what an operator would, after the launcher has ended."""


# --- processes ----------------------------------------------------------------------------------


class SignalToRank(Kind):
    def __init__(self, name: str, signum: int, wanted: Wanted) -> None:
        super().__init__(name, wanted)
        self._signum = signum

    def strike(self, scene: Scene) -> None:
        os.kill(scene.pid, self._signum)


class SignalToLauncher(SignalToRank):
    def strike(self, scene: Scene) -> None:
        scene.training.signal(self._signum)


class Freeze(Kind):
    def strike(self, scene: Scene) -> None:
        os.kill(scene.pid, signal.SIGSTOP)
        time.sleep(_FREEZE_S)
        os.kill(scene.pid, signal.SIGCONT)


class KillSupervisor(Kind):
    def strike(self, scene: Scene) -> None:
        os.kill(_parent(scene.pid), signal.SIGKILL)


class KillAllParents(Kind):
    """The launcher and the supervisors, none of which sees another one end."""

    def strike(self, scene: Scene) -> None:
        pids = [scene.training.launcher, *scene.training.supervisors()]
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, signum)


class KillEvaluator(Kind):
    def strike(self, scene: Scene) -> None:
        os.kill(scene.training.pid("evaluator:0"), signal.SIGKILL)


class Inside(Kind):
    """What a rank does to itself, after a step or at once; see rank.py."""

    def strike(self, scene: Scene) -> float | None:
        pid, journal = scene.pid, scene.training.journal
        journal.ask(pid, self.name)

        def happened() -> list[float]:
            faults = of_kind(journal.read(), "fault")
            return [note["time"] for note in faults if note["pid"] == pid]

        scene.training.wait_until(happened, f"{self.name} in {scene.role}", _STRIKE_S)
        return happened()[0]


class InsideWire(Inside):
    group = WIRE


# --- files --------------------------------------------------------------------------------------


class Damage(Kind):
    """Files of the newest checkpoint are damaged while nobody trains; then it is started again.

    Args:
      name: as tables show it.
      part: which file it is: what its name has behind the checkpoint's, or _STATE.
      damage: what is done to it.
    """

    group = FILES

    def __init__(
        self, name: str, part: str, damage: Callable[[Path, random.Random], None]
    ) -> None:
        codes = (DAMAGED,)
        super().__init__(name, Wanted(DAMAGED, codes, codes, options=(RESTORE_PREVIOUS,)))
        self._part = part
        self._damage = damage

    def strike(self, scene: Scene) -> float:
        scene.kill_launcher()
        newest = scene.training.newest()
        pattern = _STATE if self._part == _STATE else newest.name + self._part
        path = max(newest.parent.glob(pattern), key=lambda path: path.stat().st_size)
        self._damage(path, scene.chance)
        struck = time.time()
        scene.training.start()
        return struck


class ReplaceByDirectory(Damage):
    """A file is replaced by a directory, which a save could not replace in turn."""

    def __init__(self, name: str, part: str) -> None:
        super().__init__(name, part, self._replace)

    def _replace(self, path: Path, chance: random.Random) -> None:
        self._path = path
        path.unlink()
        path.mkdir()

    def mend(self, scene: Scene) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.rmdir()


def _truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def _flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def _flip_in_first_half(path: Path, chance: random.Random) -> None:
    """The second half of an index has bytes that nobody reads."""
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data) // 2)] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def _delete(path: Path, chance: random.Random) -> None:
    path.unlink()


class DiskFull(Kind):
    """The chief may write no more than so many bytes into a file."""

    group = FILES

    def strike(self, scene: Scene) -> None:
        most = scene.chance.choice(_FULL_BYTES)
        chief = scene.training.pid("chief:0")
        resource.prlimit(chief, resource.RLIMIT_FSIZE, (most, most))


class MoveAway(Kind):
    """model_dir is not there any more, until the training has ended."""

    group = FILES

    def strike(self, scene: Scene) -> None:
        scene.training.model_dir.rename(scene.training.moved_dir)

    def mend(self, scene: Scene) -> None:
        model_dir = scene.training.model_dir
        if model_dir.exists():  # what an abort leaves was written there
            shutil.rmtree(model_dir)
        scene.training.moved_dir.rename(model_dir)


class Leftovers(Kind):
    """What a chief that is killed while it saves leaves behind; then it is killed."""

    group = FILES

    def strike(self, scene: Scene) -> None:
        newest = scene.training.newest()
        folder = newest.with_name(newest.name + "0_temp")  # of a step that never comes
        folder.mkdir()
        for part in (".data-00000-of-00001", _INDEX):
            (folder / f"part-00000-of-00001{part}").write_bytes(bytes(1000))
        newest.with_name(f"{newest.name}0{_INPUT}.tmp").write_bytes(bytes(1000))
        os.kill(scene.training.pid("chief:0"), signal.SIGKILL)


class SecondRun(Kind):
    """The same command once more, in the same model_dir, while the first runs."""

    group = FILES

    def strike(self, scene: Scene) -> None:
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
    """Somebody without the token who can reach the port of a rank; see stranger.py."""

    group = WIRE

    def strike(self, scene: Scene) -> None:
        host, port = scene.address
        command = [sys.executable, HERE / "stranger.py", self.name, host, port]
        common.run([*command, scene.chance.randrange(1 << 31)], _STRANGER_S)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- all of them --------------------------------------------------------------------------------

_GOES_ON = Wanted()
_ONE_KILLED = Wanted(None, (KILLED,), (LOST,))

KINDS = {
    kind.name: kind
    for kind in (
        SignalToRank("kill", signal.SIGKILL, _ONE_KILLED),
        Inside("kill-with-child", _ONE_KILLED),
        KillSupervisor("kill-supervisor", _ONE_KILLED),
        SignalToRank("stop", signal.SIGSTOP, _ONE_KILLED),
        Freeze("freeze", _GOES_ON),
        SignalToRank(
            "term", signal.SIGTERM, Wanted(None, (TERMINATED,), (TERMINATED,), keeps=True)
        ),
        Inside("os-exit", Wanted(None, (0,), (LOST,))),
        Inside("sys-exit", Wanted(None, (0,), (LOST,))),
        Inside("raise", Wanted(1, (1,), (LOST,))),
        Inside("hang", Wanted(None, (KILLED, TERMINATED, TIMED_OUT), (TIMED_OUT,))),
        KillEvaluator("kill-evaluator", Wanted(evaluators=(KILLED,))),
        SignalToLauncher("kill-launcher", signal.SIGKILL, Wanted(KILLED)),
        KillAllParents("kill-all-parents", Wanted(KILLED)),
        SignalToLauncher(
            "term-launcher",
            signal.SIGTERM,
            Wanted(TERMINATED, (TERMINATED,), (TERMINATED,), keeps=True),
        ),
        SignalToLauncher(
            "ctrl-c",
            signal.SIGINT,
            Wanted(INTERRUPTED, (INTERRUPTED,), (INTERRUPTED,), keeps=True),
        ),
        Damage("truncate-data", _DATA, _truncate),
        Damage("flip-index", _INDEX, _flip_in_first_half),
        Damage("flip-input", _INPUT, _flip),
        Damage("delete-checkpoint-file", _STATE, _delete),
        ReplaceByDirectory("replace-by-directory", _DATA),
        DiskFull("disk-full", Wanted(DAMAGED, (DAMAGED,), (DAMAGED,))),
        MoveAway("move-model-dir", Wanted(DAMAGED, (DAMAGED,), (DAMAGED,))),
        Leftovers("leftovers", Wanted(None, (KILLED, LOST), (KILLED, LOST))),
        SecondRun("second-run", _GOES_ON),
        InsideWire("close", Wanted(None, (LOST,), (LOST,))),
        InsideWire("corrupt", Wanted(None, (PROTOCOL,), (PROTOCOL,))),
        Stranger("idle-connections", _GOES_ON),
        Stranger("gets", _GOES_ON),
        Stranger("random-bytes", _GOES_ON),
        Stranger("hellos", _GOES_ON),
    )
}
