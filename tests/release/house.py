"""Prints the sizes of the product: modules, functions, packages, words.

    python tests/release/house.py [REVISION]

A revision of git is measured in place of the files at hand.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hostopt", "estimator_ext")
SMALL, PARAMETERS, WORDS = 100, 6, 4
# Of what is often added, one that exists; the modules that name it are those to edit.
EXAMPLES = {
    "an option": "desync_check_steps",
    "a collective": "all_to_all",
    "a transport": "inproc",
    "a launcher": "slurm",
    "a wire format": "bf16",
}
ENTRY = re.compile(r"^\s*\*{0,2}\w+: (.+)$", re.MULTILINE)


def sources(revision: str | None) -> dict[str, str]:
    """Returns the text of each module by its dotted name."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    found: dict[str, str] = {}
    if revision is None:
        files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
        texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    else:
        names = git("ls-tree", "-r", "--name-only", revision, *PACKAGES).split()
        texts = {name: git("show", f"{revision}:{name}") for name in names if name.endswith(".py")}
    for name, text in texts.items():
        found[name[:-3].replace("/", ".").removesuffix(".__init__")] = text
    return found


def imports(tree: ast.AST, modules: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room(module: str) -> str:
    """Returns the package of a module, of the first two levels, or a module at the top."""
    return ".".join(module.split(".")[:2])


def measure(modules: dict[str, str]) -> Iterator[tuple[str, object]]:
    """Yields the name and the value of each figure."""
    trees = {name: ast.parse(text) for name, text in modules.items()}
    lines = {name: len(text.splitlines()) for name, text in modules.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    arrows: Counter[tuple[str, str]] = Counter()
    for name, tree in trees.items():
        for other in set(imports(tree, modules)) & modules.keys() - {name}:
            importers[other].add(name)
            if room(name) != room(other):
                arrows[room(name), room(other)] += 1
    sizes: dict[type, list[int]] = defaultdict(list)
    wide = short = entries = 0
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                kind = ast.ClassDef if isinstance(node, ast.ClassDef) else ast.FunctionDef
                sizes[kind].append((node.end_lineno or 0) - node.lineno + 1)
                section = (ast.get_docstring(node) or "").partition("Args:")[2]
                words = [len(each.split()) for each in ENTRY.findall(section.partition("\n\n")[0])]
                entries, short = entries + len(words), short + sum(n <= WORDS for n in words)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                wide += len([each for each in named if each.arg != "self"]) > PARAMETERS
    text = "\n".join(modules.values())
    comments = len(re.findall(r"^\s*#", text, re.MULTILINE))
    alone = [name for name in modules if len(importers[name]) == 1 and lines[name] < SMALL]
    yield "modules", len(modules)
    yield "lines", sum(lines.values())
    yield "lines of a module, median and largest", _sizes(list(lines.values()))
    yield "lines of a class, median and largest", _sizes(sizes[ast.ClassDef])
    yield "lines of a function, median and largest", _sizes(sizes[ast.FunctionDef])
    yield "packages or modules at the top, pairs that import", len(arrows)
    yield "pairs in both directions", sum((b, a) in arrows for a, b in arrows) // 2
    yield f"modules below {SMALL} lines with one importer", len(alone)
    yield f"functions above {PARAMETERS} parameters", wide
    yield f"entries of Args, and those up to {WORDS} words", f"{entries}, {short}"
    for kind, name in EXAMPLES.items():
        naming = [text for text in modules.values() if re.search(rf"\b{name}\b", text)]
        yield f"modules that name {kind}, {name}", len(naming)
    yield "share of comments, %", round(100 * comments / sum(lines.values()), 1)


def _sizes(values: list[int]) -> str:
    return f"{statistics.median(values):g}, {max(values)}"


if __name__ == "__main__":
    for label, value in measure(sources(sys.argv[1] if len(sys.argv) > 1 else None)):
        print(f"| {label} | {value} |")
