"""The documentation: its programs run, its links lead somewhere, its lines are short."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import QUIET, ROOT

from hostopt import cli

PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("benchmarks/*/README.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
README_WORDS = 900
LINE_LENGTH = 100
SHELL_OPERATORS = {";", "&&", "|", ">", "<"}

_GENERATED = re.compile(r"<!-- ([\w ]+) -->\n(?:.*\n)*?<!-- end of \1 -->")
_FENCE = re.compile(r"^```(?P<info>.*)\n(?P<body>(?:.*\n)*?)^```$", re.MULTILINE)
_TITLE = re.compile(r'title="([^"]+)"')
_LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Snippet:
    """One fence of a page.

    Args:
      page: path of the page below the root.
      line: number of its first line.
      kind: `python` runs, or is written to a file if it has a title; `py` is a fragment; `console`
        shows commands and their output; `sh` and `bash` are commands that no test runs.
      title: name of a file; empty without one.
      body: the text.
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


def blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def prose_of(page: Path) -> str:
    """The page with its fences, and the tables that benchmarks write, blanked."""
    return _FENCE.sub(blank, _GENERATED.sub(blank, page.read_text()))


# --- programs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the pages name, and with `hostopt` and `python` in `bin`."""
    made = tmp_path_factory.mktemp("docs")
    (made / "main.py").write_bytes((ROOT / "examples/minimal/main.py").read_bytes())
    for snippet in SNIPPETS:
        if snippet.title:
            (made / snippet.title).write_text(snippet.body)
    (made / "bin").mkdir()
    for name, arguments in {"hostopt": "-m hostopt.cli", "python": ""}.items():
        script = made / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        script.chmod(0o755)
    return made


def run(command: list[str], directory: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    ours = {name for name in os.environ if name.startswith("HOSTOPT_") or name == "TF_CONFIG"}
    env = {name: value for name, value in os.environ.items() if name not in ours}
    path = f"{directory / 'bin'}:{env['PATH']}"
    env = {**env, **QUIET, "PYTHONPATH": str(ROOT), "PATH": path}
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        cwd=directory,
        env=env,
        text=True,
        timeout=timeout_s,
    )


def matches(expected: str, output: str) -> bool:
    """Compares output with a page, in which `...` stands for any text, a line of it for lines."""
    pattern = re.escape(expected).replace(re.escape("...\n"), "(?:.*\n)*?.*\n?")
    return re.fullmatch(pattern.replace(re.escape("..."), ".*"), output) is not None


def commands_of(snippet: Snippet) -> Iterator[tuple[str, str]]:
    """Each command of a console, and the output that the page shows for it."""
    for part in re.split(r"^\$ ", snippet.body, flags=re.MULTILINE)[1:]:
        command = re.match(r"(?:.*\\\n)*.*\n", part)
        assert command is not None
        yield command[0].strip(), part[command.end() :]


def run_all(kind: str, tensorflow: bool) -> list[Snippet]:
    """Snippets of that kind to run, each text once."""
    chosen = {
        snippet.body: snippet
        for snippet in SNIPPETS
        if snippet.runs and snippet.kind == kind and snippet.needs_tensorflow == tensorflow
    }
    return list(chosen.values())


def check_python(snippets: list[Snippet], directory: Path) -> None:
    """Runs the snippets in one process, each with its own globals."""
    code = "import sys\n"
    for snippet in snippets:
        name = f"{snippet.page}:{snippet.line}"
        code += f"print({name!r}, file=sys.stderr)\n"
        code += f"exec(compile({snippet.body!r}, {name!r}, 'exec'), {{'__name__': '__main__'}})\n"
    done = run([sys.executable, "-c", code], directory, 100)
    assert done.returncode == 0, done.stdout + done.stderr


def check_console(snippets: list[Snippet], directory: Path) -> None:
    for snippet in snippets:
        for command, expected in commands_of(snippet):
            done = run(["bash", "-c", command], directory, 100)
            where = f"{snippet.page}:{snippet.line}: $ {command}\n{done.stdout}{done.stderr}"
            assert matches(expected, done.stdout), where


def test_python_snippets_run(directory: Path) -> None:
    check_python(run_all("python", False), directory)


def test_consoles_show_what_commands_print(directory: Path) -> None:
    check_console(run_all("console", False), directory)


@pytest.mark.tensorflow
def test_snippets_with_tensorflow_run(directory: Path) -> None:
    check_python(run_all("python", True), directory)
    check_console(run_all("console", True), directory)


def test_fragments_are_python() -> None:
    for snippet in SNIPPETS:
        if snippet.kind in ("py", "python"):
            compile(snippet.body, f"{snippet.page}:{snippet.line}", "exec")


def test_every_page_has_a_snippet_that_runs() -> None:
    pages = {name for name in NAMES if name == "README.md" or re.fullmatch(r"docs/\w+\.md", name)}
    assert pages - {snippet.page for snippet in SNIPPETS if snippet.runs} == set()


def test_the_guide_shows_the_minimal_example() -> None:
    (shown,) = [s for s in SNIPPETS if s.page == "docs/guide.md" and s.title == "main.py"]
    assert shown.body == (ROOT / "examples/minimal/main.py").read_text()


def test_the_readme_changes_lines_of_the_minimal_example() -> None:
    (diff,) = [snippet for snippet in SNIPPETS if snippet.kind == "diff"]
    example = (ROOT / "examples/minimal/main.py").read_text().splitlines()
    added = [line[1:] for line in diff.body.splitlines() if line.startswith("+")]
    code = [line.partition("  #")[0].strip() for line in example]
    assert [line for line in added if line.strip() not in code] == []


def hostopt_commands() -> Iterator[tuple[str, list[str]]]:
    """Each `hostopt` command of a shell snippet, as arguments."""
    for snippet in SNIPPETS:
        if snippet.kind not in ("sh", "bash", "console"):
            continue
        body = snippet.body.replace("\\\n", " ")
        for line in body.splitlines():
            lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(itertools.takewhile(lambda word: word not in SHELL_OPERATORS, lexer))
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
                del words[0]
            if words[:1] == ["hostopt"]:
                yield f"{snippet.page}:{snippet.line}", words[1:]


def test_shell_snippets_use_options_that_exist() -> None:
    commands = list(hostopt_commands())
    assert commands
    for _, arguments in commands:
        cli._parser().parse_args(arguments)  # exits if it refuses them


# --- text ---------------------------------------------------------------------------------------


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("name", NAMES)
def test_links_have_targets(name: str) -> None:
    page = ROOT / name
    broken = []
    for link in _LINK.findall(prose_of(page)):
        path, _, anchor = link.partition("#")
        if re.match(r"https?:|mailto:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("name", [name for name in NAMES if re.match(r"docs/|[^/]+$", name)])
def test_lines_of_text_are_short(name: str) -> None:
    lines = enumerate(prose_of(ROOT / name).splitlines(), 1)
    assert [n for n, line in lines if len(line) > LINE_LENGTH and line[:1] not in "|!*"] == []


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= README_WORDS
    assert "make mnist" in text
    assert "make test" in text


def test_the_site_has_every_page() -> None:
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")]
    assert sorted(listed) == sorted([*pages, "changelog.md"])


def test_tests_named_on_pages_exist() -> None:
    files = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    functions = set(re.findall(r"^ *(?:async )?def (test_\w+)", "\n".join(files.values()), re.M))
    named = re.findall(
        r"`(?:tests/)?(test_\w+\.py)?:*(test_\w+)?`", "\n".join(map(prose_of, PAGES))
    )
    missing = [
        f"{file}::{test}"
        for file, test in named
        if (file and file not in files) or (test and test not in functions)
    ]
    assert missing == []
