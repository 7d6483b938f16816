"""Tells from the source of a program that it was written for TensorFlow 1."""

from __future__ import annotations

import ast
import operator
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from types import ModuleType

import tensorflow as tf

# They may run later, or never.
_LATER: tuple[type[ast.AST], ...] = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp)
_LATER += (ast.DictComp, ast.GeneratorExp, ast.Try, ast.For, ast.With, ast.AsyncFunctionDef)


def use_of_tensorflow_1(path: str) -> str:
    """Returns what a program will surely use that only TensorFlow 1 has, such as "tf.flags".

    It looks at statements that run in any case. A program that imports `tensorflow.compat.v1`, and
    reads the attribute `value` of dimensions somewhere, has that of TensorFlow 1 in mind. The
    result is "" for other programs.
    """
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):  # which Python reports when it runs the program
        return ""
    nodes = list(ast.walk(tree))
    modules = _imported(nodes, "tensorflow").difference(*map(_changed, nodes))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in _nodes_that_run(tree.body, functions):
        name = _name(node, modules)
        if _is_only_in_tensorflow_1(name):
            return f"tf.{name}"
    if _imported(nodes, "tensorflow.compat.v1"):
        return next((ast.unparse(node) for node in nodes if _is_value_of_dimension(node)), "")
    return ""


def is_in_tensorflow_1(name: str) -> bool:
    """Returns True for a name that `tensorflow.compat.v1` has, such as "train.Optimizer"."""
    try:
        operator.attrgetter(name)(tf.compat.v1)
    except AttributeError:
        return False
    return True


def file_of_module(name: str) -> str:
    """Returns the file that `python -m` runs, without importing packages; "" if there is none."""
    path: Iterable[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for part in [*name.split("."), "__main__"]:
        if path is None:  # the module was no package
            break
        spec = PathFinder.find_spec(part, list(path))
        if spec is None:
            return ""
        path = spec.submodule_search_locations
    return (spec.origin if spec else None) or ""


def _nodes_that_run(
    body: Iterable[ast.AST], functions: dict[str, ast.FunctionDef]
) -> Iterator[ast.AST]:
    """Yields the statements and expressions of a body that are evaluated in any case.

    Args:
      functions: by name; those that the body calls are removed.
    """
    for node in body:
        yield node
        yield from _nodes_that_run(_parts(node), functions)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = functions.pop(node.func.id, None)
            if called is not None:
                yield from _nodes_that_run(called.body, functions)
        if isinstance(node, (ast.Return, ast.Raise)):
            return


def _parts(node: ast.AST) -> Iterable[ast.AST]:
    """Returns the parts of a node that are evaluated whenever it is."""
    if isinstance(node, _LATER):
        return []
    if isinstance(node, (ast.If, ast.While)):
        is_main = ast.unparse(node.test) == "__name__ == '__main__'"
        return [node.test, *(node.body if is_main else [])]
    if isinstance(node, ast.FunctionDef):
        return [*node.decorator_list, node.args]
    return ast.iter_child_nodes(node)


def _changed(node: ast.AST) -> set[str]:
    """Returns names that become another module, or whose attributes change."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {each.asname or each.name for each in node.names if each.name != "tensorflow"}
    if isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
        name = node.value if isinstance(node, ast.Attribute) else node
        return {name.id} if isinstance(name, ast.Name) else set()
    return set()


def _imported(nodes: Iterable[ast.AST], name: str) -> set[str]:
    """Returns what a program calls a module."""
    aliases = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {alias.asname or alias.name for alias in aliases if alias.name == name}


def _is_value_of_dimension(node: ast.AST) -> bool:
    """Returns True for `x.shape[0].value` and `x.get_shape()[0].value`."""
    if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Subscript)):
        return False
    shape = node.value.value
    shape = shape.func if isinstance(shape, ast.Call) else shape
    is_shape = isinstance(shape, ast.Attribute) and shape.attr in ("shape", "get_shape")
    return is_shape and node.attr == "value"


def _is_only_in_tensorflow_1(name: str) -> bool:
    found: object = tf
    for part in name.split(".") if name and not name.startswith("contrib") else []:
        if not isinstance(found, ModuleType):
            return False
        if not hasattr(found, part):
            return is_in_tensorflow_1(name)
        found = getattr(found, part)
    return False


def _name(node: ast.AST, modules: set[str]) -> str:
    """Returns the name that an expression reads in `tensorflow`; "" for any other."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    is_found = parts and isinstance(node, ast.Name) and node.id in modules
    return ".".join(parts) if is_found else ""
