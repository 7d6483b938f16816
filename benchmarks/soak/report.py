"""Report of a soak: tables, a picture, and all problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import common
from benchmarks.soak.faults import GROUPS, KINDS

_ENDED = 143  # after SIGTERM
_COLORS = dict(zip(GROUPS, ("tab:red", "tab:blue", "tab:orange")))
_WRONG = "black"


def verdict(results: dict[str, Any]) -> list[str]:
    """Returns descriptions of all problems; an empty list if there are none."""
    wrong = [
        f"{fault['kind']} at {fault['at_s']:.0f} s: {problem}"
        for fault in results["faults"]
        for problem in fault["problems"]
    ]
    wrong += [
        f"{row['role']}: {row['measure']} grew from {row['first']:g} to {row['last']:g}"
        for row in results["growth"]
        if row["flat"] is False
    ]
    end = results["end"]
    if end is None:
        return [*wrong, "the soak was interrupted, and nothing was compared"]
    if end["exit_code"] != _ENDED:
        wrong.append(f"ended by SIGTERM with exit code {end['exit_code']}, wanted {_ENDED}")
    if end["difference"] is not None:
        wrong.append(f"the trainings differ: {end['difference']}")
    return wrong


def tables(results: dict[str, Any]) -> str:
    """Formats a summary, tables of kinds and of descriptors and memory, and the problems."""
    faults, end = results["faults"], results["end"]
    kinds = {fault["kind"] for fault in faults}
    text = f"{len(faults)} faults of {len(kinds)} kinds in {results['minutes']:g} minutes"
    if end is not None:
        same = end["difference"] is None
        text += (
            f", {end['steps']} steps; ended by SIGTERM with exit code {end['exit_code']}. All "
            "variables and slots, against the unbroken run: "
            + ("equal, bit for bit" if same else f"**different**: {end['difference']}")
        )
    wrong = verdict(results)
    orphans = sum("orphans" in problem for problem in wrong)
    text += f". Processes left over: {orphans or 'none'}. {_files(faults)}"
    parts = [text, _kinds(faults), _growth(results["growth"])]
    if wrong:
        parts.append("\n".join(["Not as expected:", "", *(f"- {line}" for line in wrong)]))
    return "\n\n".join(parts)


def _files(faults: Sequence[dict[str, Any]]) -> str:
    counts = [fault["files"] for fault in faults if "files" in fault]
    return f"Files in model_dir: {min(counts)} to {max(counts)}." if counts else ""


def _kinds(faults: Sequence[dict[str, Any]]) -> str:
    rows = []
    for name, kind in KINDS.items():
        of_kind = [fault for fault in faults if fault["kind"] == name]
        if of_kind:
            right = sum(not fault["problems"] for fault in of_kind)
            cells = [_median_and_max(of_kind, key) for key in ("detected_s", "recovered_s")]
            again = str(sum(fault.get("again", 0) for fault in of_kind))
            rows.append([name, str(kind.expected), f"{right} of {len(of_kind)}", *cells, again])
    header = ["fault", "expected", "as expected", "detected after, s (median, max)"]
    return common.table([*header, "recovered after, s (median, max)", "steps done again"], rows)


def _median_and_max(faults: Sequence[dict[str, Any]], key: str) -> str:
    values = [fault[key] for fault in faults if key in fault]
    return f"{common.median(values):.1f}, {max(values):.1f}" if values else "-"


def _growth(growth: Sequence[dict[str, Any]]) -> str:
    rows = [
        [row["role"], row["measure"], *(f"{row[key]:.0f}" for key in ("first", "last", "most"))]
        for row in growth
    ]
    header = ["process", "measure", "first third (median)", "last third (median)", "most"]
    return common.table(header, rows)


def paint(results: dict[str, Any], axes: Any) -> None:
    """Draws the steps, and each fault as a line from its injection to the recovery."""
    names = [name for name in KINDS if any(f["kind"] == name for f in results["faults"])]
    for fault in results["faults"]:
        begin = (fault["time"] - results["begun"]) / 60
        end = begin + fault.get("recovered_s", 0.0) / 60
        color = _WRONG if fault["problems"] else _COLORS[KINDS[fault["kind"]].group]
        height = names.index(fault["kind"])
        axes.plot([begin, end], [height, height], color=color, linewidth=4, marker="|")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("minutes")
    axes.grid(axis="y", alpha=0.3)
    steps = axes.twinx()
    for points in results["lives"]:
        times_s, numbers = zip(*points)
        steps.plot([time_s / 60 for time_s in times_s], numbers, color="grey", linewidth=1)
    steps.set_ylabel("global step")
    axes.set_title(f"{len(results['faults'])} faults, each until the first new step")
