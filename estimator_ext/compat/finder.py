"""Import of modules by names that they do not have themselves."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets a function find modules by their full names; it returns None for other names."""

    def __init__(self, find: Callable[[str], types.ModuleType | None]) -> None:
        self._find = find

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Returns the spec of a module that the function finds."""
        module = self._find(name)
        if module is None:
            return None
        return importlib.machinery.ModuleSpec(name, self, loader_state=module)

    def exec_module(self, module: Any) -> None:
        """Puts the module that was found in the place of a new one."""
        sys.modules[module.__name__] = module.__spec__.loader_state
