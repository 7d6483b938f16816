"""The conventions of docs/contributing.md: sizes, docstrings, and a test file for each module."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from harness import ROOT
from modules import FILES, tree_of

CONTRIBUTING = (ROOT / "docs" / "contributing.md").read_text()
MAX_MODULE_LINES = 500
MAX_CLASS_LINES = 350
MAX_METHODS = 20
QUESTION = re.compile(r"(What|Whether|How|Who|Whom|Whose|Where|Which|Why)\b")


def section_of(heading: str) -> str:
    text = CONTRIBUTING.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    assert text, heading
    return text


@functools.cache
def nodes(name: str) -> list[ast.AST]:
    return list(ast.walk(tree_of(name)))


def classes(name: str) -> Iterator[ast.ClassDef]:
    return (node for node in nodes(name) if isinstance(node, ast.ClassDef))


def oversized() -> Iterator[str]:
    for name, path in FILES.items():
        if len(path.read_text().splitlines()) > MAX_MODULE_LINES:
            yield name
        for node in classes(name):
            methods = sum(
                isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef)) for x in node.body
            )
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno >= MAX_CLASS_LINES or methods > MAX_METHODS:
                yield f"{name}.{node.name}"


def test_modules_and_classes_are_small_or_named_as_exceptions() -> None:
    section = section_of("## Exceptions to the size limits")
    exceptions = re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)
    assert sorted(oversized()) == sorted(exceptions)


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    questions = []
    for name in FILES:
        for node in nodes(name):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            if isinstance(node, kinds) and QUESTION.match(ast.get_docstring(node) or ""):
                questions.append(f"{name}: {(ast.get_docstring(node) or '').splitlines()[0]}")
    assert questions == []


def test_unit_tests_are_in_the_folders_of_the_product() -> None:
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")}
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder).is_dir()] == []


def test_who_may_abort_the_ring_is_written_down() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("## Who ends the ring")[2].partition("\n## ")[0]
    written = {*re.findall(r"`((?:hostopt|estimator_ext)\.[\w.]+)`", table)}
    aborting = {
        name
        for name in FILES
        if not name.startswith(("hostopt.transport.", "hostopt.launch."))
        for node in nodes(name)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "abort"
    }
    assert aborting == written


def test_functions_have_few_parameters() -> None:
    others = ("hostopt.tensorflow", "hostopt.keras", "estimator_ext.spec", "estimator_ext.tpu")
    others += ("estimator_ext.compat.contrib",)
    many = []
    for name in FILES:
        if name.startswith(others):  # whose parameters are those of Horovod and TensorFlow
            continue
        for node in nodes(name):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if len([each for each in named if each.arg not in ("self", "cls")]) > 8:
                    many.append(f"{name}.{node.name}")
    assert many == []
