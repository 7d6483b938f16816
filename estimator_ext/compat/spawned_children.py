"""A call in each interpreter that `multiprocessing` spawns, before it imports the program.

Such a child gets a description of its parent first, and imports the program as that says. So the
call is a part of the description, and happens when the child reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any


class _Call:
    """An object that calls a function where it is unpickled."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._function, self._arguments


def call_in_children(function: Callable[..., Any], *arguments: Any) -> None:
    """Makes children of `multiprocessing` with the methods "spawn" and "forkserver" call it.

    Args:
      function: a function of a module that children can import.
      *arguments: its arguments, which can be pickled.
    """
    describe = spawn.get_preparation_data
    call = _Call(function, arguments)

    @functools.wraps(describe)
    def describe_with_call(name: str) -> dict[str, Any]:
        return {**describe(name), call_in_children.__module__: call}

    spawn.get_preparation_data = describe_with_call
