"""What is deprecated warns its caller, and is gone in the version that it names."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from modules import FILES, tree_of
from packaging.version import Version

from hostopt.versions import VERSION, warn_deprecated


def overdue(tree: ast.AST, version: str) -> Iterator[str]:
    """What a module still warns of, though it should be gone in this version."""
    for node in ast.walk(tree):
        function = getattr(node, "func", None)
        if getattr(function, "id", getattr(function, "attr", "")) == "warn_deprecated":
            name, _, removed_in = (ast.literal_eval(each) for each in node.args)
            # its candidates count as the version: 2.0.0rc1 is 2.0
            if Version(version).release[:2] >= Version(removed_in).release[:2]:
                yield name


def test_nothing_is_left_that_this_version_should_not_have() -> None:
    found = {module: list(overdue(tree_of(module), VERSION)) for module in FILES}
    assert not {module: names for module, names in found.items() if names}


@pytest.mark.parametrize(
    "version, expected",
    [("1.9.3", []), ("2.0.0rc1", ["f(x)"]), ("2.0.1", ["f(x)"]), ("2.10", ["f(x)", "g()"])],
)
def test_what_is_overdue_is_found(version: str, expected: list[str]) -> None:
    program = """
warn_deprecated("f(x)", "h(x)", "2.0")
versions.warn_deprecated("g()", "h()", "2.3")
warn("f", "h", "0.1")
"""
    assert list(overdue(ast.parse(program), version)) == expected


def test_the_warning_names_what_to_use_and_the_line_of_the_caller() -> None:
    def old_function() -> None:
        warn_deprecated("old_function()", "new_function()", "2.0")

    with pytest.warns(FutureWarning) as caught:
        old_function()
    (warning,) = caught
    assert str(warning.message) == (
        "old_function() is deprecated, and hostopt 2.0 will not have it. Use new_function()"
    )
    assert warning.filename == __file__
