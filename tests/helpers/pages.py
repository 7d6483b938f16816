"""The pages of the documentation, and their snippets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("benchmarks/*/README.md")),
]


_FENCE = re.compile(r"^```(?P<info>.*)\n(?P<body>(?:.*\n)*?)^```$", re.MULTILINE)


_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Snippet:
    """One fence of a page.

    Args:
      line: number of its first line.
      kind: `python` runs, or is written to a file if it has a title; `py` is a fragment; `console`
        shows commands and their output; `sh` and `bash` are commands that no test runs.
      title: name of a file, or what commands need that no test runs; empty without one.
    """

    page: str
    line: int
    kind: str
    title: str
    body: str

    @property
    def runs(self) -> bool:
        return self.kind == "console" or (self.kind == "python" and not self.title)

    @property
    def needs_tensorflow(self) -> bool:
        if self.kind == "console":
            return "estimator_ext" in self.body or "main.py" in self.body
        imports = re.compile(r"^(?:import|from) (?:tensorflow|estimator_ext)\b", re.MULTILINE)
        return imports.search(self.body) is not None


def snippets_of(page: Path) -> Iterator[Snippet]:
    text = page.read_text()
    for match in _FENCE.finditer(text):
        kind, _, rest = match["info"].strip().partition(" ")
        title = _TITLE.search(rest)
        line = text.count("\n", 0, match.start()) + 2
        name = str(page.relative_to(ROOT))
        yield Snippet(name, line, kind, title[1] if title else "", match["body"])


SNIPPETS = [snippet for page in PAGES for snippet in snippets_of(page)]
