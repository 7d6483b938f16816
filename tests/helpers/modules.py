"""The modules of the product, and their syntax trees."""

from __future__ import annotations

import ast
import functools

from harness import ROOT

# Paths by the name of the module.
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("hostopt", "estimator_ext")
    for path in sorted((ROOT / package).rglob("*.py"))
}


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())
