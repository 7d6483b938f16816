"""Tells from the source of a program that it was written for TensorFlow 1."""

from __future__ import annotations

import ast
import operator
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import PathFinder
from types import ModuleType

import tensorflow as tf

from estimator_ext.compat.reader import Reader


def use_of_tensorflow_1(path: str) -> str:
    """Returns what a program will surely use that only TensorFlow 1 has, such as "tf.flags".

    It looks at statements that run in any case. A program that imports `tensorflow.compat.v1`, and
    reads the attribute `value` of dimensions somewhere, has that of TensorFlow 1 in mind. The
    result is "" for other programs.
    """
    try:
        tree = parsed(path)
    except (OSError, SyntaxError, ValueError):  # which Python reports when it runs the program
        return ""
    reader = Reader(tree)
    for use in reader.uses:
        if use.is_sure and all(map(_is_only_in_tensorflow_1, use.names)):
            return f"tf.{use.names[0].partition(':')[2]}"
    if "tensorflow.compat.v1:" in reader.imported:
        return next((ast.unparse(node) for node in values_of_dimensions(tree)), "")
    return ""


def parsed(path: str | os.PathLike[str]) -> ast.Module:
    """Returns the syntax tree of a program."""
    with open(path, "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escape sequences
        return ast.parse(file.read())


def values_of_dimensions(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yields expressions like `x.shape[0].value` and `x.get_shape()[0].value`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "value":
            shape = node.value.value if isinstance(node.value, ast.Subscript) else None
            shape = shape.func if isinstance(shape, ast.Call) else shape
            if isinstance(shape, ast.Attribute) and shape.attr in ("shape", "get_shape"):
                yield node


def is_in_tensorflow_1(name: str) -> bool:
    """Returns True for a name that `tensorflow.compat.v1` has, such as "train.Optimizer"."""
    try:
        operator.attrgetter(name)(tf.compat.v1)
    except AttributeError:
        return False
    return True


def file_of_module(name: str) -> str:
    """Returns the file that `python -m` runs, without importing packages; "" if there is none."""
    path: list[str] | None = [os.getcwd(), *sys.path]
    file = ""
    for part in [*name.split("."), "__main__"]:
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return ""
        file, path = spec.origin or "", spec.submodule_search_locations
        if path is None:  # not a package
            break
    return file


def _is_only_in_tensorflow_1(name: str) -> bool:
    module, _, name = name.partition(":")
    is_read = module == "tensorflow" and name and not name.startswith("contrib")
    found: object = tf
    for part in name.split(".") if is_read else []:
        if not isinstance(found, ModuleType):
            return False
        if not hasattr(found, part):
            return is_in_tensorflow_1(name)
        found = getattr(found, part)
    return False
