"""The public names of all modules are those in `public_names.txt`."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path

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


def test_the_public_names_are_those_of_the_snapshot() -> None:
    public = [file for file in FILES if not file.rpartition(".")[2].startswith("_")]
    actual = sorted(f"{file}.{name}" for file in public for name in declared(file))
    listed = SNAPSHOT.read_text().splitlines()
    changes = difflib.unified_diff(listed, actual, "listed", "declared", n=0, lineterm="")
    difference = "\n".join(changes)
    assert not difference, f"If this change is meant, edit {SNAPSHOT}:\n{difference}"


def test_the_public_names_of_hostopt_exist() -> None:
    assert all(hasattr(hostopt, name) for name in hostopt.__all__)
