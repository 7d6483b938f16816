"""Durations of tests: which files start first, and the list of the slowest tests of each folder.

`--write-durations` rewrites the sections of the folders that ran in `tests/durations.txt`.
"""

from __future__ import annotations

import collections
import re

import pytest
from harness import ROOT

FILE = ROOT / "tests" / "durations.txt"
SLOWEST = 60  # tests of each folder that are listed

_ROW = re.compile(r"^ *([\d.]+) (tests/(\w+)/.*)$", re.MULTILINE)
_measured: dict[str, float] = collections.defaultdict(float)  # seconds by test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-durations",
        action="store_true",
        help=f"list the slowest {SLOWEST} tests of each folder in {FILE.relative_to(ROOT)}",
    )


def listed() -> dict[str, float]:
    """Returns the listed durations in seconds, by test."""
    text = FILE.read_text() if FILE.exists() else ""
    return {match[2]: float(match[1]) for match in _ROW.finditer(text)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts the longest files first: the last one would keep only one processor busy."""
    by_file: dict[str, float] = collections.defaultdict(float)
    for name, seconds in listed().items():
        by_file[name.partition("::")[0]] += seconds
    items.sort(key=lambda item: -by_file[item.nodeid.partition("::")[0]])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _measured[report.nodeid] += report.duration  # of setup, call and teardown


def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")
    if not session.config.option.write_durations or is_worker:
        return
    ran = {_folder(name) for name in _measured}
    rows = {name: s for name, s in listed().items() if _folder(name) not in ran} | _measured
    by_folder: dict[str, list[tuple[float, str]]] = collections.defaultdict(list)
    for name, seconds in rows.items():
        by_folder[_folder(name)].append((seconds, name))
    text = f"Seconds of the slowest {SLOWEST} tests of each folder.\n"
    for folder, durations in sorted(by_folder.items()):
        text += f"\n{folder}\n"
        for seconds, name in sorted(durations, reverse=True)[:SLOWEST]:
            text += f"{seconds:8.1f} {name}\n"
    FILE.write_text(text)


def _folder(name: str) -> str:
    return "/".join(name.split("/")[:2])
