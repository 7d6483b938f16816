"""Imports each module of a package in a process of its own, as `python -m estimator_ext` would.

Prints a JSON object: for each file the names that `--check` says an import lacks, and the error of
the import: its class, the name that it misses, and its text, or null.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from estimator_ext.compat.check import Tree
from estimator_ext.compat.compat import install, use_v1_api
from estimator_ext.compat.reader import When

# a name that a module does not have, or that an import does not find
MISSING = r"(?:attribute|cannot import name|No module named|the program uses) '?([\w.]+)"


def main(root: Path, is_v1: bool) -> None:
    install(contrib=True)
    sys.path.insert(0, str(root.parent))
    paths = sorted(path for path in root.rglob("*.py") if path.name != "__main__.py")
    errors = {path: error_of(path, root, is_v1) for path in paths}
    tree = Tree(root)  # after the children, as it imports modules of TensorFlow
    for path in paths:
        problems = tree.problems(tree.file(path), is_v1)
        lacks = [each.name for each in problems if each.when == When.IMPORTED]
        errors[path] = lacks, errors[path]
    print(json.dumps({str(path.relative_to(root)): each for path, each in errors.items()}))


def error_of(path: Path, root: Path, is_v1: bool) -> Any:
    """Forks a child that imports a module, and returns what the child says."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        os.write(writes, json.dumps(imported(path, root, is_v1)).encode())
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:
        error = pipe.read()
    os.waitpid(child, 0)
    return json.loads(error or b'["died", "", ""]')


def imported(path: Path, root: Path, is_v1: bool) -> Any:
    signal.alarm(120)
    name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if is_v1:
                use_v1_api()
            importlib.import_module(re.sub(r"\.__init__$", "", name))
    except BaseException as error:
        found = re.search(MISSING, str(error))
        return [type(error).__name__, found[1] if found else "", str(error)[:300]]
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), "--v1" in sys.argv)
