"""Programs that use both packages can check their types, as they can with an installed package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import ROOT, run_python
from modules import FILES

LINES = (ROOT / "tests" / "unit" / "public_names.txt").read_text().splitlines()
PUBLIC = [line.partition("(")[0] for line in LINES]
# what the author of a program writes, as TensorFlow has no types
CONFIG = "[mypy]\nstrict = true\n[mypy-tensorflow.*]\nignore_missing_imports = true\n"


def check(directory: Path, *programs: Path) -> str:
    """Returns what mypy says of programs, to which both packages are installed ones."""
    config = directory / "mypy.ini"
    config.write_text(CONFIG)
    # kept, as the first run takes 10 s, and others take 1 s
    cache = ROOT / ".mypy_cache" / "of_programs"
    options = ("--config-file", config, "--cache-dir", cache)
    result = run_python(
        "-m", "mypy", *options, *programs, code=None, cwd=directory, without="MYPYPATH"
    )
    assert result.stderr == ""
    return result.stdout


def module_of(name: str) -> str:
    """The module of a public name, or of a member of a public class."""
    owner = name.rpartition(".")[0]
    return owner if owner in FILES else module_of(owner)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("types")
    names = directory / "names.py"
    lines = [f"import {module}" for module in sorted({*map(module_of, PUBLIC)})]
    lines += [f"reveal_type({name})" for name in PUBLIC]
    names.write_text("\n".join([*lines, ""]))
    return check(directory, names, ROOT / "tests" / "programs" / "typed_sample.py")


def test_a_typed_program_has_no_errors(said: str) -> None:
    assert [line for line in said.splitlines() if ": error: " in line] == []


def test_every_public_name_has_a_type(said: str) -> None:
    types = re.findall(r'^names\.py:\d+: note: Revealed type is "(.*)"$', said, re.MULTILINE)
    assert len(types) == len(PUBLIC)
    untyped = [name for name, kind in zip(PUBLIC, types) if kind == "Any"]
    # made at run time: classes for the Keras that is installed, and calls of a wrapped optimizer
    made = re.compile(r"Callback|CrossShardOptimizer\.")
    assert [name for name in untyped if not made.search(name)] == []
