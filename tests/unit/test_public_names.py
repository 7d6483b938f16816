"""The public names of all modules, and their parameters, are those in `public_names.txt`.

A parameter with a default is written `name=`. Those after `*` are given by name only.
"""

from __future__ import annotations

import ast
import collections
import difflib
import enum
import importlib
import inspect
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from harness import ROOT
from modules import FILES, tree_of

import hostopt

SNAPSHOT = Path(__file__).with_name("public_names.txt")


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


def described(name: str, value: Any, public: Collection[int]) -> Iterator[str]:
    """The lines of a public name and, for a class, those of its public members.

    A class has the members of its bases, too, if these are ours and not public themselves.
    """
    yield name + parameters(value)
    if not inspect.isclass(value) or not is_own(value):
        return
    hidden = ["^_", "^on_(epoch|train)_"]  # those that Keras calls
    if name.count(".") == 1 and name.startswith("hostopt."):  # as in the API reference
        page = (ROOT / "docs/api/hostopt.md").read_text()
        hidden = json.loads(re.findall(r"filters: (\[[^]]*\])", page)[0])
    bases = [each for each in value.__mro__[1:] if is_own(each) and id(each) not in public]
    for member, kind in collections.ChainMap(*map(dict, map(vars, [value, *bases]))).items():
        if any(re.search(pattern.lstrip("!"), member) for pattern in hidden):
            continue
        if isinstance(kind, property) or inspect.isroutine(getattr(value, member)):
            yield f"{name}.{member}{parameters(getattr(value, member))}"


def parameters(value: Any) -> str:
    is_enum = inspect.isclass(value) and issubclass(value, enum.Enum)
    if is_enum or not (inspect.isclass(value) or inspect.isroutine(value)):
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


def test_the_public_names_and_parameters_are_those_of_the_snapshot() -> None:
    values: dict[str, Any] = {}
    names_only: list[str] = []
    for file in FILES:
        is_private = file.rpartition(".")[2].startswith("_")
        names = {} if is_private else {f"{file}.{name}": name for name in declared(file)}
        try:
            module = importlib.import_module(file) if names else None
        except (ImportError, hostopt.ConfigError):  # Ray or Keras 3 is absent
            names_only += names
            continue
        values.update({full: getattr(module, name) for full, name in names.items()})
    public = {id(value) for value in values.values()}
    actual = [line for name, value in values.items() for line in described(name, value, public)]
    listed = []
    for line in SNAPSHOT.read_text().splitlines():
        name = line.partition("(")[0]
        is_member = any(name.startswith(f"{owner}.") for owner in names_only)
        if name in names_only or not is_member:
            listed.append(name if name in names_only else line)
    actual = sorted(actual + names_only)
    changes = difflib.unified_diff(listed, actual, "listed", "found", n=0, lineterm="")
    difference = "\n".join(changes)
    assert not difference, f"If this change is meant, edit {SNAPSHOT}:\n{difference}"
