"""Modules that have moved, under the names that they had."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__all__: list[str] = []

_MOVED = {
    "tensorflow.python.estimator": "tensorflow_estimator.python.estimator",
    "tensorflow.python.training.tracking": "tensorflow.python.trackable",
    # which lay there, too
    "tensorflow.python.trackable.graph_view": "tensorflow.python.checkpoint.graph_view",
    "tf_keras.legacy_tf_layers": "tf_keras.src.legacy_tf_layers",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module that has moved where it is now."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if _now(name) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return importlib.import_module(_now(spec.name) or "")

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _now(name: str) -> str | None:
    for old, new in _MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None


def add_moved_modules() -> None:
    """Has `import` find what has moved; may be called again."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
