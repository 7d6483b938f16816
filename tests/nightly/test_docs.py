"""The documentation: its programs run, its links lead somewhere, its lines are short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import QUIET, ROOT
from pages import SNIPPETS, Snippet

# --- programs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the pages name, and with `hostopt` and `python` in `bin`."""
    made = tmp_path_factory.mktemp("docs")
    (made / "main.py").write_bytes((ROOT / "examples/minimal/main.py").read_bytes())
    (made / "examples").symlink_to(ROOT / "examples")
    for snippet in SNIPPETS:
        if snippet.title and snippet.kind == "python":
            (made / snippet.title).write_text(snippet.body)
    (made / "bin").mkdir()
    for name, arguments in {"hostopt": "-m hostopt", "python": ""}.items():
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


def test_python_snippets_run(directory: Path) -> None:
    check_python(run_all("python", False), directory)


def test_python_snippets_with_tensorflow_run(directory: Path) -> None:
    check_python(run_all("python", True), directory)


# in the order of the pages: a later one may resume what an earlier one has trained
@pytest.mark.parametrize(
    "snippet",
    [*run_all("console", False), *run_all("console", True)],
    ids=lambda snippet: f"{snippet.page}:{snippet.line}",
)
def test_a_console_shows_what_its_commands_print(snippet: Snippet, directory: Path) -> None:
    for command, expected in commands_of(snippet):
        done = run(["bash", "-c", command], directory, 100)
        assert matches(expected, done.stdout), f"$ {command}\n{done.stdout}{done.stderr}"
