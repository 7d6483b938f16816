"""The public names of all modules, and their parameters, are those in `public_names.txt`.

A parameter with a default is written `name=`. Those after `*` are given by name only.
"""

from __future__ import annotations

import ast
import difflib
import enum
import importlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness import ROOT
from modules import FILES, tree_of

SNAPSHOT = Path(__file__).with_name("public_names.txt")
NEEDS_RAY = "hostopt.ray."  # which is not installed here
# Patterns of the members that the API reference leaves out, as they are for hostopt itself.
HIDDEN = json.loads(
    re.search(r"filters: (\[.*_in_place.*\])", (ROOT / "docs/api/hostopt.md").read_text())[1]
)


def declared(module: str) -> Iterator[str]:
    """Names in `__all__` of a module, which is not imported; most modules have none."""
    imported = {}  # full names of modules
    for node in tree_of(module).body:
        if isinstance(node, ast.ImportFrom):
            imported.update({each.name: f"{node.module}.{each.name}" for each in node.names})
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from ast.literal_eval(node.value)
        elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "__all__":
            yield from declared(imported[ast.unparse(node.value).partition(".")[0]])


def described(name: str) -> Iterator[str]:
    """The lines of a public name and, for a class, those of its own public members."""
    module, _, last = name.rpartition(".")
    value = None if name.startswith(NEEDS_RAY) else getattr(importlib.import_module(module), last)
    yield name + parameters(value)
    # as in the API reference: without what it inherits
    for member, kind in vars(value).items() if inspect.isclass(value) and is_own(value) else ():
        if any(re.search(pattern.lstrip("!"), member) for pattern in HIDDEN):
            continue
        if isinstance(kind, property):
            yield f"{name}.{member}"
        elif inspect.isroutine(getattr(value, member)):
            yield f"{name}.{member}{parameters(getattr(value, member))}"


def parameters(value: Any) -> str:
    is_enum = inspect.isclass(value) and issubclass(value, enum.Enum)
    if is_enum or not callable(value) or not (inspect.isclass(value) or inspect.isroutine(value)):
        return ""
    written: list[str] = []
    for each in inspect.signature(value).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not any(name.startswith("*") for name in written):
            written.append("*")
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        written.append(f"{stars}{each.name}{'' if each.default is each.empty else '='}")
    return f"({', '.join(name for name in written if name != 'self')})"


def is_own(value: Any) -> bool:
    return value.__module__.partition(".")[0] in ("hostopt", "estimator_ext")


def assert_listed(actual: Iterable[str], listed: Iterable[str]) -> None:
    changes = difflib.unified_diff(sorted(listed), sorted(actual), "listed", "found", n=0)
    difference = "\n".join(map(str.rstrip, changes))
    assert not difference, f"If this change is meant, edit {SNAPSHOT}:\n{difference}"


def test_the_public_names_and_parameters_are_those_of_the_snapshot() -> None:
    public = [file for file in FILES if not file.rpartition(".")[2].startswith("_")]
    names = [f"{file}.{name}" for file in public for name in declared(file)]
    actual = [line for name in names for line in described(name)]
    assert_listed(actual, SNAPSHOT.read_text().splitlines())
