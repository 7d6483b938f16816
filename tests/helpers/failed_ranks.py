"""The end of the output of a run: the last lines of each failed test and of its ranks."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from harness import LOGS

LINES = 30


def pytest_runtest_logstart() -> None:
    LOGS.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:  # sections travel from the workers of xdist
        report.sections += [
            (f"output of {task}", _tail(path.read_text(errors="replace")))
            for task, path in LOGS
            if path.exists()
        ]
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    yield  # everything else that is printed
    for kind in ("failed", "error"):
        for report in terminalreporter.stats.get(kind, []):
            terminalreporter.section(f"{kind}: {report.nodeid}", red=True)
            terminalreporter.write_line(_tail(report.longreprtext))
            for title, text in report.sections:
                if title.startswith("output of "):
                    terminalreporter.write_line(f"--- {title}\n{text}")


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-LINES:])
