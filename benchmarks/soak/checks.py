"""Checks after each fault: exit codes, processes, descriptors, memory and files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common
from benchmarks.soak.faults import Expected
from benchmarks.soak.training import Training

LAUNCHER = "launcher"
# Allowed growth of the median, from the first to the last third of the samples.
SLACK = {"descriptors": 4.0, "mb": 50.0}
FEWEST_SAMPLES = 9  # minimum for a comparison
_MB = 1e6
_TEMPORARY = re.compile(r"_temp$|\.tmp$|\.tempstate")
_CHECKPOINT = re.compile(r"model\.ckpt-\d+(?=\.)")


# --- exit codes ---------------------------------------------------------------------------------


def wrong_codes(
    expected: Expected, role: str, code: int | None, attempts: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Compares exit codes with those in the catalogue.

    Args:
      expected: expected consequences of the kind of fault.
      role: role of the rank with the fault.
      code: exit code of the launcher; None if it is still running.
      attempts: events of the launcher, one for each group that ended: exit `codes` by role, and
        as `forced` the roles that it killed after the grace period.

    Returns:
      Descriptions of the wrong codes.
    """
    wrong = []
    if code != expected.launcher:
        wrong.append(f"launcher: {_ending(code)}, wanted {_ending(expected.launcher)}")
    rings = [attempt for attempt in attempts if not _is_evaluator(attempt)]
    if len(rings) > bool(expected.faulty):
        wrong.append(f"{len(rings)} attempts ended, wanted {int(bool(expected.faulty))}")
    elif expected.faulty and not rings:
        wrong.append("no rank ended")
    for ended, result in rings[0]["codes"].items() if rings and expected.faulty else ():
        right = expected.faulty if ended == role else expected.others
        if result not in right:
            wrong.append(f"{ended}: code {result}, wanted {' or '.join(map(str, right))}")
    return wrong + _wrong_evaluators(expected, code, attempts)


def _wrong_evaluators(
    expected: Expected, code: int | None, attempts: Sequence[Mapping[str, Any]]
) -> list[str]:
    ended = {k: v for each in attempts if _is_evaluator(each) for k, v in each["codes"].items()}
    if expected.evaluators and not ended:
        return ["no evaluator ended"]
    # an evaluator that is ended with the ranks has the code of the signal that ended it
    right = expected.evaluators if code is None else (0, code, 128 + 9, 128 + 15)
    return [f"{role}: code {result}" for role, result in ended.items() if result not in right]


def _is_evaluator(attempt: Mapping[str, Any]) -> bool:
    return any(role.startswith("evaluator") for role in attempt["codes"])


def _ending(code: int | None) -> str:
    return "keeps running" if code is None else f"code {code}"


# --- processes ----------------------------------------------------------------------------------


def sample(training: Training) -> dict[str, dict[str, float]]:
    """Returns open descriptors, threads and resident memory of the launcher and of each role."""
    pids = {LAUNCHER: training.launcher, **{role: training.pid(role) for role in training.roles()}}
    result = {}
    for role, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            result[role] = {
                "pid": pid,
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
                "mb": round(process.memory_info().rss / _MB, 1),
            }
    return result


def growth(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compares the last third of the samples with the first third.

    Args:
      samples: result of `sample` after each recovery.

    Returns:
      A row for each role and measure: medians of the `first` and the `last` third, the maximum as
      `most`, and `flat`: False if it grew, None if there are too few samples.
    """
    rows = []
    for role in dict.fromkeys(role for each in samples for role in each):
        for measure, slack in SLACK.items():
            values = [each[role][measure] for each in samples if role in each]
            third = max(1, len(values) // 3)
            first, last = common.median(values[:third]), common.median(values[-third:])
            flat = last <= first + slack if len(values) >= FEWEST_SAMPLES else None
            row = {"role": role, "measure": measure, "first": first, "last": last}
            rows.append({**row, "most": max(values), "flat": flat})
    return rows


# --- files --------------------------------------------------------------------------------------


def leftovers(model_dir: Path) -> set[str]:
    """Returns the names of temporary files and of files of unknown checkpoints."""
    try:
        known = set(re.findall(r'"(.*)"', (model_dir / "checkpoint").read_text()))
        names = [path.name for path in model_dir.iterdir()]
    except FileNotFoundError:
        return set()
    return {name for name in names if _TEMPORARY.search(name) or _is_unknown(name, known)}


def count_files(model_dir: Path) -> int:
    """Counts files and folders, except the logs of TensorFlow, one of each chief."""
    return sum(not path.name.startswith("events.") for path in model_dir.iterdir())


def _is_unknown(name: str, known: set[str]) -> bool:
    checkpoint = _CHECKPOINT.match(name)
    return checkpoint is not None and checkpoint[0] not in known
