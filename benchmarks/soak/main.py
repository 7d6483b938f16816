"""Compares a training with many random faults to one without, bit by bit."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.soak import checks, report
from benchmarks.soak.checkpoints import first_difference
from benchmarks.soak.faults import KINDS, make_plan
from benchmarks.soak.play import Play
from benchmarks.soak.recovery import of_kind, steps_by_process
from benchmarks.soak.training import RANKS, Training

HERE = Path(__file__).resolve().parent
PAUSE_S = 0.02  # after each step with faults; the other run is faster
_START_S = 180.0  # until the first step
_STEPS_PER_S = 10  # minimum, without faults

tables, paint = report.tables, report.paint


class Soak:
    """A soak and its results.

    Args:
      directory: an empty directory.
      seed: seed of the plan.
      minutes: duration of the faults.
      kinds: names of the kinds of faults.
      save: called with the results after each fault.
    """

    def __init__(
        self,
        directory: Path,
        seed: int,
        minutes: float,
        kinds: Sequence[str],
        save: Callable[[dict[str, Any]], None],
    ) -> None:
        self._directory = directory
        self._plan = make_plan(seed, kinds, RANKS)
        self._save = save
        self._points: dict[int, list[list[float]]] = {}
        self.results: dict[str, Any] = {
            "machine": common.machine(),
            "seed": seed,
            "minutes": minutes,
            "begun": 0.0,
            "faults": [],
            "growth": [],
            "lives": [],
            "end": None,
        }

    def run(self) -> None:
        """Runs both trainings, and compares their results.

        Raises:
          BenchmarkError: a training failed permanently.
        """
        broken = Training(self._directory / "broken", "--pause-s", PAUSE_S, evaluators=1)
        with contextlib.closing(broken):
            broken.start()
            broken.wait_until(
                lambda: of_kind(broken.journal.read(), "saved")[1:] and broken.all_live(),
                "second checkpoint",
                _START_S,
            )
            self.results["begun"] = start = time.time()
            while time.time() - start < 60 * self.results["minutes"]:
                self._play(broken)
            broken.signal(signal.SIGTERM)
            code, newest = broken.end(), broken.newest()
        step = int(newest.name.rpartition("-")[2])
        common.log(f"stopped at step {step} with exit code {code}; now the run without faults")
        difference = self._difference(newest, step)
        self.results["end"] = {"exit_code": code, "steps": step, "difference": difference}

    def _play(self, training: Training) -> None:
        self._add_steps(training.journal.begin_chapter())
        play = Play(training, next(self._plan))
        try:
            play.run()
        finally:  # the end of the soak may itself be a fault
            self._add(play.row)

    def _add(self, row: dict[str, Any]) -> None:
        faults = self.results["faults"]
        faults.append({"at_s": round(row["time"] - self.results["begun"], 1), **row})
        self.results["growth"] = checks.growth([f["sample"] for f in faults if "sample" in f])
        self.results["lives"] = list(self._points.values())
        self._save(self.results)
        _log(len(faults), faults[-1])

    def _add_steps(self, notes: Sequence[Any]) -> None:
        for pid, points in steps_by_process(of_kind(notes, "step"), self.results["begun"]).items():
            self._points.setdefault(pid, []).extend(points)

    def _difference(self, newest: Path, step: int) -> str | None:
        unbroken = Training(self._directory / "unbroken", "--max-steps", step)
        with contextlib.closing(unbroken):
            unbroken.start()
            code = unbroken.end(_START_S + step / _STEPS_PER_S)
            if code:
                raise common.BenchmarkError(f"the unbroken run ended with {code}")
            reference = unbroken.newest()
        if reference.name != newest.name:
            return f"the unbroken run ended with {reference.name}, wanted {newest.name}"
        return first_difference(newest, reference)


def _log(number: int, row: dict[str, Any]) -> None:
    text = f"{row['at_s']:.0f} s, {number}: {row['kind']} of rank {row['rank']}: "
    text += row.get("error", "no error")
    if "recovered_s" in row:
        text += f", recovered after {row['recovered_s']:.1f} s"
    common.log("; ".join([text, *(f"WRONG: {problem}" for problem in row["problems"])]))


def main() -> None:
    parser = common.parser(__doc__, HERE)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long faults come")
    parser.add_argument("--seed", type=int, default=7, help="of the plan of faults")
    parser.add_argument(
        "--only", type=_kinds, default=list(KINDS), metavar="KIND,...", help="these kinds alone"
    )
    args = parser.parse_args()
    os.environ.update(common.QUIET)  # TensorFlow reads the checkpoints here
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a launcher would ignore it, too

    def save(results: dict[str, Any]) -> None:
        new = args.json.with_suffix(".new")
        new.write_text(json.dumps(results, indent=1) + "\n")
        new.replace(args.json)

    with tempfile.TemporaryDirectory() as directory:
        soak = Soak(Path(directory), args.seed, args.minutes, args.only, save)
        failure = None
        try:
            soak.run()
        except common.BenchmarkError as error:
            failure = str(error)
    common.publish(soak.results, args, tables, paint)
    wrong = report.verdict(soak.results) + ([failure] if failure else [])
    if wrong:
        sys.exit(f"soak: {len(wrong)} not as expected:\n" + "\n".join(wrong))


def _kinds(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)}: no such kind, wanted of {', '.join(KINDS)}"
        )
    return names


if __name__ == "__main__":
    main()
