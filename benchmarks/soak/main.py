"""A training that is broken again and again, and one that is not: do they end in equal bits?"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common

HERE = Path(__file__).resolve().parent
RANKS = 3
ACTIONS = ("kill", "stop", "close", "corrupt")
_OUTSIDE = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}  # the others happen inside the rank
_BETWEEN_S = (20.0, 40.0)
_TRAINING_S = 5.0  # at least, between a recovery and the next fault: for a new checkpoint
_POLL_S = 0.1
_START_S = 180.0  # until steps are made
_FRESH_S = 1.0  # the last step is not older, where steps are made
_STRIKE_S = 20.0  # until a fault has happened that was asked for
_RECOVERY_S = 180.0
_END_S = 60.0  # from SIGTERM
_COLORS = {"kill": "tab:red", "stop": "tab:blue", "close": "tab:orange", "corrupt": "tab:purple"}


# --- plan ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
      at_s: seconds after the first step; later where the training has just recovered by then.
      rank: who suffers it.
      action: one of ACTIONS.
    """

    at_s: float
    rank: int
    action: str


def make_plan(seed: int, minutes: float) -> list[Fault]:
    """Choose faults at random: one every 20 to 40 s, each action as often as the others.

    Args:
      seed: the same one makes the same plan, of which fewer minutes are a beginning.
      minutes: how long faults come.

    Returns:
      The faults in their order.
    """
    chance = random.Random(seed)
    plan: list[Fault] = []
    actions: list[str] = []
    at_s = chance.uniform(*_BETWEEN_S)
    while at_s < 60 * minutes:
        actions = actions or chance.sample(ACTIONS, len(ACTIONS))
        plan.append(Fault(round(at_s, 1), chance.randrange(RANKS), actions.pop()))
        at_s += chance.uniform(*_BETWEEN_S)
    return plan


# --- what the ranks have noted ------------------------------------------------------------------


class Journal:
    """Notes of all ranks, in the order of their times.

    Args:
      directory: where the ranks write them.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.notes: list[dict[str, Any]] = []
        self._read_bytes = dict.fromkeys(range(RANKS), 0)

    def read(self) -> list[dict[str, Any]]:
        """Take up what is new, and return all."""
        for rank in self._read_bytes:
            path = self.directory / f"slot{rank}.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read_bytes[rank])
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read_bytes[rank] += len(whole + newline)
            self.notes += [{"rank": rank, **json.loads(line)} for line in whole.splitlines()]
        self.notes.sort(key=lambda note: note["time"])
        return self.notes

    def pid(self, rank: int) -> int:
        """Process of a rank that was started last."""
        starts = [note for note in self.read() if (note["kind"], note["rank"]) == ("start", rank)]
        return int(starts[-1]["pid"])


def recovery(struck: Mapping[str, Any], notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Find out what followed a fault.

    Args:
      struck: the fault, with the `time` at which it happened.
      notes: of all ranks, in the order of their times, up to the next fault.

    Returns:
      The fault; `error`, its `text`, and `detected_s` after the fault, where a rank reported it;
      `last_step` before the restart, `first_step` after it and the number of steps `again`, where
      it has come; `recovered_s` after the fault, where there was a step beyond.
    """
    row = dict(struck)
    steps = [note for note in notes if note["kind"] == "step"]
    before = [note for note in steps if note["time"] <= struck["time"]]
    after = [note for note in steps if note["time"] > struck["time"]]
    lived = before[-1]["pid"]
    restarted = [note for note in after if note["pid"] != lived]
    end = restarted[0]["time"] if restarted else float("inf")
    for note in notes:
        if note["kind"] == "error" and struck["time"] < note["time"] < end:
            detected_s = note["time"] - struck["time"]
            row.update(error=note["error"], text=note["text"], detected_s=detected_s)
            break
    if restarted:
        first = restarted[0]["step"]
        # a chief that is struck may have saved a step and not noted it
        last = max(first - 1, *(note["step"] for note in steps if note["time"] < end))
        row.update(last_step=last, first_step=first, again=last - first + 1)
        beyond = [note["time"] for note in restarted if note["step"] > last]
        if beyond:
            row["recovered_s"] = beyond[0] - struck["time"]
    return row


def recoveries(
    struck: Sequence[Mapping[str, Any]], notes: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """`recovery` of each fault, none of which counts what followed the next one."""
    ends = [fault["time"] for fault in struck[1:]] + [float("inf")]
    return [
        recovery(fault, [note for note in notes if note["time"] <= end])
        for fault, end in zip(struck, ends)
    ]


# --- trainings ----------------------------------------------------------------------------------


class Training:
    """A training under the launcher, in a directory of its own.

    Args:
      directory: does not exist yet.
      arguments: of each rank.
    """

    def __init__(self, directory: Path, *arguments: object) -> None:
        directory.mkdir()
        self.model_dir = directory / "model"
        self.journal = Journal(directory)
        self._log = directory / "log"
        rank: list[object] = [HERE / "rank.py", "--model-dir", self.model_dir]
        rank += ["--notes", directory, *arguments]
        command = [HERE / "launcher.py", "run", "-np", RANKS, "--max-restarts", 100_000, "--"]
        with self._log.open("wb") as log:
            self._launcher = subprocess.Popen(
                [sys.executable, *map(str, [*command, *rank])],
                env={**os.environ, **common.QUIET, **common.SAME_THREADS},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def restarts(self) -> int:
        """How often the launcher has begun again."""
        return self._log.read_text(errors="replace").count("; the next begins in ")

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait for something, which must come while the training runs.

        Raises:
          BenchmarkError: it does not come in time, or the training ended.
        """
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if self._launcher.poll() is not None:
                raise self._error(f"no {what}: exit code {self._launcher.returncode}")
            if time.monotonic() > deadline_s:
                raise self._error(f"no {what} within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def wait_for_steps(self) -> None:
        """Wait until steps are made; it may have begun again without a fault of ours."""
        self.wait_until(self._makes_steps, "steps", _START_S)

    def _makes_steps(self) -> bool:
        steps = [note["time"] for note in self.journal.read() if note["kind"] == "step"]
        return bool(steps) and time.time() - steps[-1] < _FRESH_S

    def strike(self, fault: Fault) -> dict[str, Any]:
        """Have a fault happen, and wait until the training has gone beyond it.

        Args:
          fault: which one.

        Returns:
          The fault with the time at which it happened.

        Raises:
          BenchmarkError: it did not happen, or nothing followed it.
        """
        self.wait_for_steps()
        pid, begun = self.journal.pid(fault.rank), time.time()
        if fault.action in _OUTSIDE:
            struck = {**asdict(fault), "time": begun}
            os.kill(pid, _OUTSIDE[fault.action])
        else:
            request = self.journal.directory / f"fault.{pid}"
            request.with_suffix(".new").write_text(fault.action)
            request.with_suffix(".new").replace(request)
            done = lambda: [  # noqa: E731
                note
                for note in self.journal.read()
                if (note["kind"], note["pid"]) == ("fault", pid)
            ]
            self.wait_until(lambda: bool(done()), f"fault {fault}", _STRIKE_S)
            struck = {**asdict(fault), "time": done()[0]["time"]}
        recovered = lambda: "recovered_s" in recovery(struck, self.journal.read())  # noqa: E731
        self.wait_until(recovered, f"recovery from {fault}", _RECOVERY_S)
        return struck

    def stop(self) -> int:
        """End the training with SIGTERM, and return the launcher's exit code."""
        self.wait_for_steps()
        self._launcher.send_signal(signal.SIGTERM)
        return self.end(_END_S)

    def end(self, timeout_s: float) -> int:
        """Wait for the end, and return the launcher's exit code.

        Raises:
          BenchmarkError: it does not come in time.
        """
        try:
            return self._launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self._error(f"no end within {timeout_s:g} s") from None

    def close(self) -> None:
        """Kill what is left; supervisors see to the ranks."""
        self._launcher.kill()
        self._launcher.wait()

    def _error(self, text: str) -> common.BenchmarkError:
        last = self._log.read_text(errors="replace").splitlines()[-30:]
        return common.BenchmarkError("\n".join([text, *last]))


@contextlib.contextmanager
def _training(directory: Path, *arguments: object) -> Any:
    training = Training(directory, *arguments)
    try:
        yield training
    finally:
        training.close()


def last_checkpoint(model_dir: Path) -> tuple[Path, int]:
    """The newest checkpoint and its step."""
    import tensorflow as tf

    path = tf.train.latest_checkpoint(str(model_dir))
    if path is None:
        raise common.BenchmarkError(f"no checkpoint in {model_dir}")
    return Path(path), int(path.rpartition("-")[2])


def first_difference(one: Path, other: Path) -> str | None:
    """Compare all variables of two checkpoints, slots included, bit for bit.

    Args:
      one: path of a checkpoint.
      other: path of the other.

    Returns:
      Which variable is the first that differs, and how; None where all are equal.
    """
    import tensorflow as tf

    readers = [tf.train.load_checkpoint(str(path)) for path in (one, other)]
    names = [reader.get_variable_to_shape_map() for reader in readers]
    for name in sorted({*names[0], *names[1]}):
        if not all(name in found for found in names):
            return f"{name} is in one checkpoint only"
        left, right = (reader.get_tensor(name) for reader in readers)
        if left.dtype != right.dtype or left.shape != right.shape:
            return f"{name} is {left.dtype}{left.shape} and {right.dtype}{right.shape}"
        if left.tobytes() != right.tobytes():
            return f"{name} has other values"
    return None


def measure(directory: Path, seed: int, minutes: float) -> dict[str, Any]:
    """Run both trainings, and compare what they come to.

    Args:
      directory: an empty one.
      seed: of the plan.
      minutes: how long faults come.

    Returns:
      What happened, as JSON can hold it.

    Raises:
      BenchmarkError: a training failed for good.
    """
    struck = []
    with _training(directory / "broken") as training:
        training.wait_for_steps()
        begun_s, begun = time.monotonic(), time.time()
        recovered_s = begun_s
        for fault in make_plan(seed, minutes):
            next_s = max(begun_s + fault.at_s, recovered_s + _TRAINING_S)
            if next_s > begun_s + 60 * minutes:
                break
            time.sleep(max(0.0, next_s - time.monotonic()))
            struck.append(training.strike(fault))
            recovered_s = time.monotonic()
            row = recovery(struck[-1], training.journal.read())
            common.say(
                f"{fault.at_s:.0f} s: {fault.action} of rank {fault.rank}: "
                f"{row.get('error')}, recovered after {row['recovered_s']:.1f} s"
            )
        time.sleep(max(0.0, begun_s + 60 * minutes - time.monotonic()))
        code = training.stop()
        notes, restarts = training.journal.read(), training.restarts
        checkpoint, step = last_checkpoint(training.model_dir)
    common.say(f"stopped at step {step} with exit code {code}; now the unbroken run")
    with _training(directory / "unbroken", "--max-steps", step) as unbroken:
        unbroken_code = unbroken.end(_START_S + 2 * 60 * minutes)
        if unbroken_code:
            raise common.BenchmarkError(f"the unbroken run ended with {unbroken_code}")
        reference, reference_step = last_checkpoint(unbroken.model_dir)
    difference = first_difference(checkpoint, reference)
    if reference_step != step:
        difference = f"the unbroken run ended at step {reference_step}"
    steps = [note for note in notes if note["kind"] == "step"]
    return {
        "seed": seed,
        "minutes": minutes,
        "exit_code": code,
        "restarts": restarts,
        "steps": step,
        "difference": difference,
        "faults": recoveries(struck, notes),
        "begun": begun,
        "lives": lives_of(steps, begun),
    }


def lives_of(steps: Sequence[Mapping[str, Any]], begun: float) -> list[list[list[float]]]:
    """Seconds since `begun` and step, of each process one in a second, which is enough to draw."""
    lives: dict[int, list[list[float]]] = {}
    for note in steps:
        point = [round(note["time"] - begun, 2), note["step"]]
        life = lives.setdefault(note["pid"], [point])
        if point[0] - life[-1][0] >= 1.0:
            life.append(point)
    return list(lives.values())


# --- results ------------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> str:
    """What became of it, a summary by action, and each fault."""
    difference = results["difference"]
    verdict = "equal, bit for bit" if difference is None else f"**different**: {difference}"
    text = (
        f"{len(results['faults'])} faults in {results['minutes']:g} minutes, "
        f"{results['restarts']} restarts, {results['steps']} steps; ended by SIGTERM with exit "
        f"code {results['exit_code']}. All variables and slots, against the unbroken run: "
        f"{verdict}."
    )
    return "\n\n".join([text, _summary(results["faults"]), _list(results["faults"])])


def _summary(faults: Sequence[dict[str, Any]]) -> str:
    rows = []
    for action in ACTIONS:
        of_action = [fault for fault in faults if fault["action"] == action]
        if of_action:
            again = sum(fault["again"] for fault in of_action)
            cells = [_median_and_max(of_action, key) for key in ("detected_s", "recovered_s")]
            rows.append([action, str(len(of_action)), *cells, str(again)])
    header = ["fault", "count", "detected after, s (median, max)"]
    return common.table([*header, "recovered after, s (median, max)", "steps done again"], rows)


def _median_and_max(faults: Sequence[dict[str, Any]], key: str) -> str:
    values = [fault[key] for fault in faults if key in fault]
    return f"{common.median(values):.1f}, {max(values):.1f}" if values else "-"


def _list(faults: Sequence[dict[str, Any]]) -> str:
    header = ["at, s", "rank", "fault", "detected after, s", "reported", "first step after"]
    rows = [
        [
            f"{fault['at_s']:.0f}",
            str(fault["rank"]),
            fault["action"],
            f"{fault['detected_s']:.1f}" if "detected_s" in fault else "-",
            fault.get("error", "-"),
            str(fault["first_step"]),
            f"{fault['recovered_s']:.1f}",
            str(fault["again"]),
        ]
        for fault in faults
    ]
    return common.table([*header, "recovered after, s", "steps done again"], rows)


def paint(results: dict[str, Any], axes: Any) -> None:
    for life in results["lives"]:
        times_s, steps = zip(*life)
        axes.plot(times_s, steps, color="black", marker=".", markersize=2)
    for action in ACTIONS:
        times_s = [
            f["time"] - results["begun"] for f in results["faults"] if f["action"] == action
        ]
        for number, time_s in enumerate(times_s):
            label = action if number == 0 else None
            axes.axvline(time_s, color=_COLORS[action], linewidth=1, label=label)
    axes.set_xlabel("s")
    axes.set_ylabel("global step")
    axes.set_title(f"{RANKS} ranks over gRPC, a fault every 20 to 40 s")
    axes.legend()


def main() -> None:
    parser = common.parser(__doc__, HERE)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long faults come")
    parser.add_argument("--seed", type=int, default=7, help="of the plan of faults")
    args = parser.parse_args()
    os.environ.update(common.QUIET)  # TensorFlow reads the checkpoints here
    with tempfile.TemporaryDirectory() as directory:
        try:
            found = measure(Path(directory), args.seed, args.minutes)
        except common.BenchmarkError as error:
            sys.exit(f"soak: {error}")
    common.publish({"machine": common.machine(), **found}, args, tables, paint)
    if found["difference"] is not None:
        sys.exit(f"soak: the trainings differ: {found['difference']}")


if __name__ == "__main__":
    main()
