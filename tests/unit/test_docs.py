"""The documentation: its programs run, its links lead somewhere, its lines are short."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from harness import ROOT
from pages import _FENCE, PAGES, SNIPPETS

from hostopt import __main__ as cli

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
README_WORDS = 900
LINE_LENGTH = 100
SHELL_OPERATORS = {";", "&&", "|", ">", "<"}

_GENERATED = re.compile(r"<!-- ([\w ]+) -->\n(?:.*\n)*?<!-- end of \1 -->")
_LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
# sites that pages may link to: an address that a writer has made up is not among them
SITES = {
    "doi.org",
    "github.com",
    "prometheus.io",
    "pypi.org",
    "ray.io",
    "ui.perfetto.dev",
    "www.tensorflow.org",
}


def blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def prose_of(page: Path) -> str:
    """The page with its fences, and the tables that benchmarks write, blanked."""
    return _FENCE.sub(blank, _GENERATED.sub(blank, page.read_text()))


# --- programs -----------------------------------------------------------------------------------


def test_fragments_are_python() -> None:
    for snippet in SNIPPETS:
        if snippet.kind in ("py", "python"):
            compile(snippet.body, f"{snippet.page}:{snippet.line}", "exec")


def test_commands_that_no_test_runs_say_what_they_need() -> None:
    untested = [snippet for snippet in SNIPPETS if snippet.kind in ("sh", "bash")]
    silent = [s for s in untested if not s.title.startswith("needs ")]
    assert [f"{snippet.page}:{snippet.line}" for snippet in silent] == []


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


@pytest.mark.parametrize("name", NAMES)
def test_links_to_other_sites_are_secure_and_known(name: str) -> None:
    addresses = re.findall(r"\b[a-z+]+://[^\s)>`]*", re.sub(r"`.*?`", "", prose_of(ROOT / name)))
    split = [urlsplit(address) for address in addresses]
    wrong = [each.geturl() for each in split if each.scheme != "https" or each.netloc not in SITES]
    assert wrong == []


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
    labs = [str(page.relative_to(ROOT)) for page in ROOT.glob("examples/*/README.md")]
    assert sorted(listed) == sorted([*pages, *labs, "changelog.md"])


def test_tests_named_on_pages_exist() -> None:
    files: dict[str, str] = {}  # their text by path and by name
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        files[str(path.relative_to(ROOT))] = text
        files[path.name] = files.get(path.name, "") + text
    functions = set(re.findall(r"^ *def (test_\w+)", "\n".join(files.values()), re.M))
    named = re.findall(r"`([\w/]*test_\w+\.py)?:*(test_\w+)?`", "\n".join(map(prose_of, PAGES)))
    missing = [
        f"{file}::{test}"
        for file, test in named
        if (file and file not in files)
        or (test and test not in functions)
        or (file and test and f"def {test}(" not in files[file])
    ]
    assert missing == []
