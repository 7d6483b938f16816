"""Writes the tables of all results.json into their pages, between their markers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

# the overview has two, and some have a page about their subject
PAGES = {
    "docs/benchmarks.md": ("allreduce", "mnist_scaling"),
    "docs/watching.md": ("progress",),
    "docs/data_workers.md": ("data_workers",),
}
# all others are beside their description
for _name in (
    "api",
    "embedding",
    "link",
    "local_quality",
    "model",
    "overhead",
    "overlap",
    "scaling",
    "slow_link",
    "soak",
):
    PAGES[f"benchmarks/{_name}/README.md"] = (_name,)


def section_of(name: str, page: Path) -> str:
    """Returns the tables, machine and picture of the last run of one benchmark."""
    folder = common.ROOT / "benchmarks" / name
    path = folder / "results.json"
    if not path.exists():
        return "No results yet."
    results = json.loads(path.read_text())
    parts = [_load(folder / "main.py").tables(results), describe(results["machine"])]
    picture = folder / "results.png"
    if picture.exists():
        parts.append(f"![{name}]({os.path.relpath(picture, page.parent)})")
    return "\n\n".join(parts)


def describe(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    versions = versions.replace("mpirun mpirun (Open MPI)", "Open MPI")
    return (
        f"*{machine['date'][:10]}: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']:g} GiB; Python {machine['python']}, {versions}.*"
    )


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_main", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    for page, names in PAGES.items():
        write(common.ROOT / page, names)


def write(page: Path, names: Sequence[str]) -> None:
    text = page.read_text()
    for name in names:
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        between = re.compile(f"{begin}.*?{end}", re.DOTALL)
        if not between.search(text):
            sys.exit(f"page: no markers of {name!r} in {page}")
        section = f"{begin}{section_of(name, page)}\n{end}"
        text = between.sub(lambda _, section=section: section, text)
    page.write_text(text)


if __name__ == "__main__":
    main()
