"""What is looked at after each fault: exit codes, processes, descriptors, memory and files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common
from benchmarks.soak.faults import Wanted
from benchmarks.soak.training import Training

LAUNCHER = "launcher"
# Medians of the last third of the samples above those of the first, where that is flat still.
SLACK = {"descriptors": 4.0, "mb": 50.0}
FEWEST_SAMPLES = 9  # of which something can be said
_MB = 1e6
_TEMPORARY = re.compile(r"_temp$|\.tmp$|\.tempstate")
_CHECKPOINT = re.compile(r"model\.ckpt-\d+(?=\.)")


# --- exit codes ---------------------------------------------------------------------------------


def wrong_codes(
    wanted: Wanted, role: str, code: int | None, attempts: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Compare exit codes with those that the catalogue has.

    Args:
      wanted: of the kind of fault.
      role: who suffered it.
      code: exit code of the launcher; None if it went on.
      attempts: what the launcher has told of each group that ended, with the `codes` by role, and
        the roles with which it lost its patience as `forced`.

    Returns:
      What is wrong, in words.
    """
    wrong = []
    if code != wanted.launcher:
        wrong.append(f"launcher: {_ending(code)}, wanted {_ending(wanted.launcher)}")
    rings = [attempt for attempt in attempts if not _is_evaluator(attempt)]
    if len(rings) > bool(wanted.struck):
        wrong.append(f"{len(rings)} attempts ended, wanted {int(bool(wanted.struck))}")
    elif wanted.struck and not rings:
        wrong.append("no rank ended")
    for ended, found in rings[0]["codes"].items() if rings and wanted.struck else ():
        right = wanted.struck if ended == role else wanted.others
        if found not in right:
            wrong.append(f"{ended}: code {found}, wanted {' or '.join(map(str, right))}")
    return wrong + _wrong_evaluators(wanted, code, attempts)


def _wrong_evaluators(
    wanted: Wanted, code: int | None, attempts: Sequence[Mapping[str, Any]]
) -> list[str]:
    ended = {k: v for each in attempts if _is_evaluator(each) for k, v in each["codes"].items()}
    if wanted.evaluators and not ended:
        return ["no evaluator ended"]
    # an evaluator that is ended with the ranks has the code of the signal that ended it
    right = wanted.evaluators if code is None else (0, code, 128 + 9, 128 + 15)
    return [f"{role}: code {found}" for role, found in ended.items() if found not in right]


def _is_evaluator(attempt: Mapping[str, Any]) -> bool:
    return any(role.startswith("evaluator") for role in attempt["codes"])


def _ending(code: int | None) -> str:
    return "goes on" if code is None else f"code {code}"


# --- processes ----------------------------------------------------------------------------------


def sample(training: Training) -> dict[str, dict[str, float]]:
    """Open descriptors, threads and resident memory of the launcher and of each role."""
    pids = {LAUNCHER: training.launcher, **{role: training.pid(role) for role in training.roles()}}
    found = {}
    for role, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            found[role] = {
                "pid": pid,
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
                "mb": round(process.memory_info().rss / _MB, 1),
            }
    return found


def growth(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare the last third of the samples with the first, which were taken alike.

    Args:
      samples: what `sample` found, after each recovery.

    Returns:
      A row for each role and what is measured: medians of the `first` third and of the `last`, the
      `most`, and whether it is `flat`; None where there are too few to know.
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
    """Names of files that a save has left: temporary ones, and those of unknown checkpoints."""
    try:
        known = set(re.findall(r'"(.*)"', (model_dir / "checkpoint").read_text()))
        names = [path.name for path in model_dir.iterdir()]
    except FileNotFoundError:
        return set()
    return {name for name in names if _TEMPORARY.search(name) or _is_unknown(name, known)}


def count_files(model_dir: Path) -> int:
    """How many files and folders there are, beside TensorFlow's logs, one of each chief."""
    return sum(not path.name.startswith("events.") for path in model_dir.iterdir())


def _is_unknown(name: str, known: set[str]) -> bool:
    checkpoint = _CHECKPOINT.match(name)
    return checkpoint is not None and checkpoint[0] not in known
