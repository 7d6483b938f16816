"""Reads which names of other modules a program uses, and when, without running it."""

from __future__ import annotations

import ast
import enum
from collections import ChainMap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

# What a local name stands for: "module:attribute", or several if that depends on a condition.
Names = tuple[str, ...]
_Scope = ChainMap[str, Names]

UNKNOWN = ""
_MOST = 4  # alternatives, which branches after branches would double
# A condition with one of these depends on what is installed; its branches are guarded.
_QUESTIONS = {"__version__", "VERSION", "version_info", "PY2", "PY3", "TYPE_CHECKING", "hasattr"}
_CAUGHT = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}
# They may evaluate parts of them later, or never.
_LATER = (ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BLOCKS = (ast.For, ast.With, ast.While)


class When(enum.IntEnum):
    """When a program evaluates an expression."""

    IMPORTED = 0
    RUN = 1  # only as `__main__`
    CALLED = 2  # in a function that the file itself does not call


@dataclass(frozen=True)
class Use:
    """A name that a program reads or imports."""

    names: Names  # "module:attribute", as for `pkgutil.resolve_name`; of several, one must exist
    line: int
    when: When  # it must exist
    is_sure: bool  # False if it may not be used then, as in a function, a branch or a loop
    how: type[ast.AST]  # an import, a call, or an expression that reads the name


@dataclass(frozen=True)
class _State:
    when: When = When.IMPORTED
    is_sure: bool = True
    is_guarded: bool = False


class Reader:
    """Reads a module.

    `uses` has its uses of other modules in the order of evaluation, except those that the module
    makes only if they exist: in a `try` that catches an ImportError or an AttributeError, or in
    branches of a condition that asks for a version or an attribute. `imported` has all imports.
    """

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        self.uses: list[Use] = []
        self.imported: set[str] = set()
        self._questions = _QUESTIONS
        named = (node for node in nodes if isinstance(node, (ast.Assign, ast.FunctionDef)))
        self._questions = _QUESTIONS.union(*map(self._named_questions, named))
        self._changed = {ast.unparse(node) for node in nodes if _is_changed_attribute(node)}
        self._functions = {
            node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)
        }
        self._later: list[tuple[ast.AST, _Scope, _State]] = []
        self._top: _Scope = ChainMap()
        self._block(tree.body, self._top, _State())
        later = _State(When.CALLED, is_sure=False)
        self._later += [(each, self._top, later) for each in self._functions.values()]
        while self._later:  # which see the last values of the names around them
            self._body(*self._later.pop(0))

    def _block(self, body: Iterable[ast.AST], scope: _Scope, state: _State) -> None:
        for node in body:
            self._visit(node, scope, state)
            if isinstance(node, (ast.Return, ast.Raise)):
                state = replace(state, is_sure=False)
            if isinstance(node, ast.If) and isinstance(node.body[-1], (ast.Return, ast.Continue)):
                state = replace(state, is_guarded=state.is_guarded or self._asks(node.test))

    def _visit(self, node: ast.AST, scope: _Scope, state: _State) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node, scope, state)
        elif isinstance(node, (ast.Attribute, ast.Name)):
            self._name(node, scope, state)
        elif isinstance(node, ast.Call):
            self._call(node, scope, state)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            self._define(node, scope, state)
        elif isinstance(node, ast.ClassDef):
            self._class(node, scope, state)
        elif isinstance(node, (ast.If, ast.Try)):
            self._branches(node, scope, state)
        elif isinstance(node, ast.Assign):
            self._assign(node, scope, state)
        else:
            self._other(node, scope, state)

    def _parts(self, nodes: Iterable[ast.AST], scope: _Scope, state: _State) -> None:
        for node in nodes:
            self._visit(node, scope, state)

    def _other(self, node: ast.AST, scope: _Scope, state: _State) -> None:
        parts = list(ast.iter_child_nodes(node))
        if isinstance(node, _LATER):
            asks = isinstance(node, (ast.IfExp, ast.BoolOp)) and self._asks(node)
            state = _State(state.when, False, state.is_guarded or asks)
            scope = scope.new_child()
            parts.sort(key=lambda part: not isinstance(part, ast.comprehension))
        if isinstance(node, _BLOCKS):
            state = replace(state, is_sure=False)
        self._parts(parts, scope, state)

    def _import(self, node: ast.Import | ast.ImportFrom, scope: _Scope, state: _State) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                self._use((f"{alias.name}:",), node, state)
                top = alias.name.partition(".")[0]
                scope[alias.asname or top] = (f"{alias.name if alias.asname else top}:",)
                continue
            module = "." * node.level + (node.module or "")
            name = f"{module}:{alias.name.replace('*', '')}"
            self._use((name,), node, state)
            scope[alias.asname or alias.name] = (name,)

    def _class(self, node: ast.ClassDef, scope: _Scope, state: _State) -> None:
        self._parts([*node.decorator_list, *node.bases, *node.keywords], scope, state)
        inner, methods = scope.new_child(), len(self._later)
        self._block(node.body, inner, state)
        # which do not see the names of the class
        self._later[methods:] = [
            (function, scope if around is inner else around, when)
            for function, around, when in self._later[methods:]
        ]
        scope[node.name] = (UNKNOWN,)

    def _assign(self, node: ast.Assign, scope: _Scope, state: _State) -> None:
        self._visit(node.value, scope, state)
        names = self._names(node.value, scope)
        for target in node.targets:
            self._visit(target, scope, state)
            if isinstance(target, ast.Name) and names:
                scope[target.id] = names

    def _name(
        self,
        node: ast.Attribute | ast.Name,
        scope: _Scope,
        state: _State,
        call: ast.Call | None = None,
    ) -> None:
        names = self._names(node, scope)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            scope[node.id] = (UNKNOWN,)
        elif names:
            self._use(names, call or node, state)
        elif isinstance(node, ast.Attribute):
            self._visit(node.value, scope, state)

    def _call(self, node: ast.Call, scope: _Scope, state: _State) -> None:
        if isinstance(node.func, (ast.Attribute, ast.Name)):
            self._name(node.func, scope, state, node)
        else:
            self._visit(node.func, scope, state)
        self._parts([*node.args, *node.keywords], scope, state)
        if state.when < When.CALLED and not state.is_guarded:
            called = self._functions.pop(getattr(node.func, "id", ""), None)
            if called:
                self._body(called, self._top, state)

    def _define(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        scope: _Scope,
        state: _State,
    ) -> None:
        self._parts([*getattr(node, "decorator_list", ()), node.args], scope, state)
        name = getattr(node, "name", "")
        scope[name] = (UNKNOWN,)
        if self._functions.get(name) is not node:
            self._later.append((node, scope, _State(When.CALLED, False, state.is_guarded)))

    def _body(self, node: ast.AST, scope: _Scope, state: _State) -> None:
        inner = scope.new_child()
        arguments, body = node.args, node.body  # type: ignore[attr-defined]
        inner.update(
            {each.arg: (UNKNOWN,) for each in ast.walk(arguments) if hasattr(each, "arg")}
        )
        self._block(body if isinstance(body, list) else [body], inner, state)

    def _branches(self, node: ast.If | ast.Try, scope: _Scope, state: _State) -> None:
        """Visits branches, after which a name stands for what it is in any of them."""
        if isinstance(node, ast.If):
            self._visit(node.test, scope, state)
            is_run = is_main(node)
            is_guarded = self._asks(node.test)
            bodies: list[list[ast.stmt]] = [node.body, node.orelse]
        else:
            is_run, is_guarded = False, any(map(_catches, node.handlers))
            bodies = [node.body + node.orelse, *(handler.body for handler in node.handlers)]
        inner = _State(
            max(state.when, When.RUN) if is_run else state.when,
            state.is_sure and is_run,
            state.is_guarded or is_guarded,
        )
        before = dict(scope.maps[0])
        names: dict[str, Names] = {}
        for body in bodies:
            scope.maps[0].clear()
            scope.maps[0].update(before)
            self._block(body, scope, inner)
            for name, value in scope.maps[0].items():
                values = tuple(dict.fromkeys((*names.get(name, ()), *value)))
                names[name] = values if len(values) <= _MOST else (UNKNOWN,)
        scope.update(names)
        self._block(getattr(node, "finalbody", ()), scope, replace(state, is_sure=False))

    def _use(self, names: Names, node: ast.expr | ast.stmt, state: _State) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self.imported.update(names)
        if UNKNOWN not in names and not state.is_guarded:
            self.uses.append(Use(names, node.lineno, state.when, state.is_sure, type(node)))

    def _names(self, node: ast.AST, scope: _Scope) -> Names:
        """Returns what an expression like `tf.train.Optimizer` stands for; () for any other."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        found = scope.get(node.id, ()) if isinstance(node, ast.Name) else ()
        if isinstance(node, ast.Name) and self._changed:
            texts = (".".join([node.id, *parts[:length]]) for length in range(1, len(parts) + 1))
            if not self._changed.isdisjoint(texts):
                return (UNKNOWN,)
        return tuple(".".join([base, *parts]).replace(":.", ":") if base else "" for base in found)

    def _named_questions(self, node: ast.AST) -> Iterator[str]:
        """Yields the variable or function of a module that has the answer to a question."""
        kept = (ast.Attribute, ast.BoolOp, ast.Call, ast.Compare, ast.UnaryOp)
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, kept)
            and self._asks(node.value)
        ):
            yield from (each.id for each in node.targets if isinstance(each, ast.Name))
        if isinstance(node, ast.FunctionDef) and len(node.body) <= 3:
            returned = [each.value for each in node.body if isinstance(each, ast.Return)]
            if any(self._asks(value) for value in returned if value):
                yield node.name

    def _asks(self, node: ast.AST) -> bool:
        parts = ast.walk(node)
        return any(
            getattr(part, "attr", getattr(part, "id", "")) in self._questions for part in parts
        )


def is_main(node: ast.If) -> bool:
    """Returns True for the part of a module that runs as `__main__`."""
    return ast.unparse(node.test) == "__name__ == '__main__'"


def _is_changed_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)


def _catches(handler: ast.ExceptHandler) -> bool:
    kinds = ast.walk(handler.type) if handler.type else ()
    caught = {getattr(kind, "attr", getattr(kind, "id", "")) for kind in kinds}
    return handler.type is None or not caught.isdisjoint(_CAUGHT)
