"""Imports each module of a folder in a process of its own, as `python -m estimator_ext` would.

Prints a JSON object: for each file, the error of its import, or null. An error is its class, the
name that is missing, and the line of the file in which it happened, or of one that it imports.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from estimator_ext.compat.compat import install, use_v1_api

# a name that a module does not have, or that an import does not find
MISSING = r"(?:attribute|cannot import name|No module named|the program uses) '?([\w.]+)"


def main(root: Path, is_v1: bool) -> None:
    install(contrib=True)
    if is_v1:
        use_v1_api()
    sys.path.insert(0, str(root))
    paths = sorted(path for path in root.rglob("*.py") if path.name != "__main__.py")
    print(json.dumps({str(path): error_of(path, root) for path in paths}))


def error_of(path: Path, root: Path) -> Any:
    """Forks a child that imports a module, and returns what the child says."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        os.write(writes, json.dumps(imported(path, root)).encode())
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said or b'["died", "", "", 0, ""]')


def imported(path: Path, root: Path) -> Any:
    signal.alarm(120)
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            importlib.import_module(name[: -len(".__init__")] if path.stem == "__init__" else name)
    except BaseException as error:
        frames = [(str(path), getattr(error, "lineno", 0) or 0)]
        for frame in traceback.extract_tb(error.__traceback__):
            if root in Path(frame.filename).parents:
                frames.append((frame.filename, frame.lineno or 0))
        if isinstance(error, SyntaxError):
            frames.append((error.filename or "", error.lineno or 0))
        found = re.search(MISSING, str(error))
        return [type(error).__name__, found[1] if found else "", *frames[-1], str(error)[:300]]
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), "--v1" in sys.argv)
