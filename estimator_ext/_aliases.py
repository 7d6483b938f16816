"""Modules and names that have moved within TensorFlow, where programs look for them."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import operator
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

__all__: list[str] = []

_MOVED = {
    "tensorflow.python.estimator": "tensorflow_estimator.python.estimator",
    "tensorflow.python.training.tracking": "tensorflow.python.trackable",
    # which lay there, too
    "tensorflow.python.trackable.graph_view": "tensorflow.python.checkpoint.graph_view",
    "tf_keras.legacy_tf_layers": "tf_keras.src.legacy_tf_layers",
}

# by module the names that it had, and where they are now: attributes of a module
_MOVED_NAMES = {
    "tensorflow.python.feature_column.feature_column_lib": {
        "DenseFeatures": "tensorflow.compat.v1:keras.layers.DenseFeatures",
    },
    "tensorflow.python.framework.ops": {
        "IndexedSlices": "tensorflow.python.framework.indexed_slices:IndexedSlices",
        "Tensor": "tensorflow.python.framework.tensor:Tensor",
    },
    "tensorflow.python.ops.array_ops": {
        "stack": "tensorflow.python.ops.array_ops_stack:stack",
        "unstack": "tensorflow.python.ops.array_ops_stack:unstack",
    },
    "tensorflow.python.ops.control_flow_ops": {
        "Assert": "tensorflow.python.ops.control_flow_assert:Assert",
        "case": "tensorflow.python.ops.control_flow_case:case",
        "cond": "tensorflow.python.ops.cond:cond",
        "while_loop": "tensorflow.python.ops.while_loop:while_loop",
    },
    "tensorflow.python.ops.variable_scope": {
        "variable": "tensorflow.python.ops.variable_v1:VariableV1",
    },
    "tensorflow.python.util.nest": {"is_sequence": "tensorflow.python.util.nest:is_nested"},
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
    """Has programs find what has moved; may be called again."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())  # before a package is searched again
    for name, sources in _MOVED_NAMES.items():
        vars(importlib.import_module(name))["__getattr__"] = _lookup(name, sources)


def _lookup(module: str, sources: Mapping[str, str]) -> Callable[[str], Any]:
    """What Python calls for a name that a module does not have."""

    def find(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        source, _, attributes = sources[name].partition(":")
        return operator.attrgetter(attributes)(importlib.import_module(source))

    return find
