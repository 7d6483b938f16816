"""`python -m estimator_ext --check`: says what a program needs, without running it."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import hostopt
from estimator_ext.compat.compat import HOROVOD, serve_horovod
from estimator_ext.compat.contrib.names import REPLACE, ROOT, missing
from estimator_ext.compat.reader import Reader, Use, When, is_main
from estimator_ext.compat.tensorflow_1 import parsed, values_of_dimensions

_KNOWN = re.compile(r"(tensorflow|tf_slim|keras|horovod|smdistributed)\b")
_OLD_PYTHON = {"urllib2", "urlparse", "cPickle", "StringIO", "cStringIO", "ConfigParser", "Queue"}
_OLD_PYTHON |= {"HTMLParser", "__builtin__", "commands", "imp", "distutils"}
_ESTIMATOR = re.compile(
    r"(\w*Estimator|model_to_estimator|(DNN|Linear|Baseline|BoostedTrees)\w*(Classifier|Regressor))"
)
_REFUSED = {  # calls
    r"tensorflow\b.*[.:]ParameterServerStrategy(V1)?": "There are no parameter servers. Remove it",
    r"tensorflow\b.*[.:]train\.(Server|SyncReplicasOptimizer|replica_device_setter)": "It belongs "
    "to a loop over parameter servers. Train an Estimator, or run the program in one process",
}
_TRAINS = re.compile(  # in a session
    r"tensorflow\b.*[.:](MonitoredTrainingSession|Supervisor|(slim\.learning|training)\.train)"
)
_OF_HOROVOD = {name.partition(".")[0] for name in HOROVOD}
_NO_ESTIMATOR = "It has no Estimator. Run it in one process"
_NO_TPU = "There is no TPU. Pass False"


class Problem(NamedTuple):
    """Something that a file lacks."""

    word: str  # "needs" or "cannot"
    name: str  # what it needs, or cannot do
    advice: str
    line: int
    when: When
    file: Path  # that has the line


@dataclass
class File:
    """The facts that are known of a file."""

    path: Path
    is_script: bool = False  # True if it asks whether it is run
    is_program: bool = False  # True if it builds an estimator
    uses_tensorflow: bool = False
    imports: dict[Path, When] = field(default_factory=dict)  # of files of the tree
    options: set[str] = field(default_factory=set)  # that a run needs
    problems: dict[bool, list[Problem]] = field(  # without and with --v1
        default_factory=lambda: {False: [], True: []}
    )

    def add(self, word: str, name: str, advice: str, line: int, when: When = When.CALLED) -> None:
        """Adds a problem of any run."""
        for each in self.problems.values():
            each.append(Problem(word, name, advice, line, when, self.path))


class Tree:
    """The files of a folder, or a program and the files beside it that it imports."""

    def __init__(self, root: Path) -> None:
        self._files: dict[Path, File] = {}
        self._root = root.resolve()
        folder = self._root if self._root.is_dir() else self._root.parent
        self._folder = folder
        packages = list(_packages(folder))
        self._package = packages[-1].parent if packages else None
        sources = _sources(folder)
        self._present = {name for path in sources for name in (path.stem, path.parent.name)}

    def files(self) -> list[File]:
        """Returns all files of the folder, or the program and what it imports."""
        if self._root.is_dir():
            return [self.file(path) for path in _sources(self._root)]
        return [self.file(path) for path in self._closure(self._root, When.CALLED)]

    def file(self, path: Path) -> File:
        """Returns what is known of a file, which is read once."""
        if path not in self._files:
            self._files[path] = self._read(path)
        return self._files[path]

    def problems(self, file: File, is_v1: bool) -> list[Problem]:
        """Returns the problems of a file, and those that it has when it imports other files."""
        others = [self.file(path) for path in self._closure(file.path, When.IMPORTED)[1:]]
        found = [each for other in others for each in other.problems[is_v1]]
        return file.problems[is_v1] + [each for each in found if each.when == When.IMPORTED]

    def choose(self, file: File) -> tuple[set[str], list[Problem]]:
        """Returns the options with which a file has the fewest problems, and those problems."""
        related = [file]
        if file.is_program:
            related = [self.file(path) for path in self._closure(file.path, When.CALLED)]
        found = {}
        for is_v1 in (False, True):
            problems = self.problems(file, is_v1)
            called = sum(len(each.problems[is_v1]) for each in related)
            imported = sum(each.when == When.IMPORTED for each in problems)
            found[is_v1] = (imported, called), problems
        is_v1 = found[True][0] < found[False][0]
        options = {"--v1"} if is_v1 else set()
        return options.union(*(each.options for each in related)), found[is_v1][1]

    def _read(self, path: Path) -> File:
        file = File(path)
        try:
            tree = parsed(path)
        except (SyntaxError, ValueError) as error:
            advice = f"Python 3 cannot read it: {getattr(error, 'msg', error)}"
            file.add("cannot", "run", advice, getattr(error, "lineno", 0) or 0, When.IMPORTED)
            file.uses_tensorflow = b"tensorflow" in path.read_bytes()
            return file
        reader, elsewhere = Reader(tree), []
        file.uses_tensorflow = any(map(_KNOWN.match, reader.imported))
        self._add_calls(file, tree)
        for use in reader.uses:
            files = self._imported(use, path)
            if files is None:
                elsewhere.append(use)
                self._add(file, use)
            elif use.how in (ast.Import, ast.ImportFrom):
                for each in files:
                    file.imports[each] = min(use.when, file.imports.get(each, use.when))
        if path != self._root:
            file.imports.update(dict.fromkeys(_packages(path.parent), When.IMPORTED))
        for node in values_of_dimensions(tree):
            problem = "needs", ast.unparse(node), "Run it with --v1", node.lineno, When.CALLED
            file.problems[False].append(Problem(*problem, path))
        others = self._present - (set(sys.modules) - _OF_HOROVOD)
        for use in elsewhere:
            if _root_of(use.names[0]) not in others:
                for is_v1, problems in file.problems.items():
                    lacks = [_lack(name, use.how is ast.ImportFrom, is_v1) for name in use.names]
                    if lacks[0] and all(lacks):
                        problems.append(Problem(*lacks[0], use.line, use.when, path))
        return file

    def _add(self, file: File, use: Use) -> None:
        """Adds what is known of a name from elsewhere."""
        name = use.names[0]
        root = _root_of(name)
        if root in _OF_HOROVOD:
            file.options.add("--hvd")
        if root == "keras" and importlib.metadata.version("keras").startswith("3"):
            file.add("needs", "tf.keras", "`import keras` is Keras 3, without graphs", use.line)
        for pattern, advice in _REFUSED.items() if use.how is ast.Call else ():
            if re.fullmatch(pattern, name):
                file.add("cannot", f"use {_shown(name)}", advice, use.line, use.when)
        if use.how is ast.Call and file.is_script and _TRAINS.fullmatch(name):
            file.add("cannot", f"train on ranks with {_shown(name)}", _NO_ESTIMATOR, use.line)

    def _add_calls(self, file: File, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.If):
                file.is_script |= is_main(node)
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            file.is_program |= bool(_ESTIMATOR.fullmatch(name))
            given = {each.arg: getattr(each.value, "value", "") for each in node.keywords}
            if name == "TPUEstimator" and None not in given:
                given.setdefault("use_tpu", True)
            first = [getattr(each, "value", "") for each in node.args[:2]]
            if given.get("use_tpu") is True:
                file.add("needs", "use_tpu=False", _NO_TPU, node.lineno, When.RUN)
            elif name.startswith("DEFINE_bool") and first == ["use_tpu", True]:
                file.add("needs", "--use_tpu=false", _NO_TPU, node.lineno, When.RUN)

    def _closure(self, path: Path, when: When) -> list[Path]:
        found = {path: None}
        waiting = [path]
        while waiting:
            for other, at in self.file(waiting.pop()).imports.items():
                if at <= when and other not in found:
                    found[other] = None
                    waiting.append(other)
        return list(found)

    def _imported(self, use: Use, path: Path) -> tuple[Path, ...] | None:
        """Returns the files of the tree that an import runs; None if it is from elsewhere."""
        module, _, attributes = use.names[0].partition(":")
        dots = len(module) - len(module.lstrip("."))
        attribute = attributes.partition(".")[0] if use.how is ast.ImportFrom else ""
        parts = tuple(filter(None, [*module.lstrip(".").split("."), attribute]))
        bases = [path.parents[dots - 1]] if dots else [self._folder, path.parent]
        # beside the package, there may be all packages of the environment
        if self._package and not dots and parts[0] == self._package.name:
            bases.insert(1, self._package.parent)
        found = (_files(base, parts) for base in bases)
        return next(filter(None, found), () if dots else None)


def _sources(folder: Path) -> list[Path]:
    """Returns the sources in a folder, except those in hidden folders."""
    found = (path for path in folder.rglob("*.py") if path.is_file())
    return sorted(path for path in found if "/." not in f"/{path.relative_to(folder)}")


def _packages(folder: Path) -> Iterator[Path]:
    """Yields the `__init__.py` of a folder and of the packages around it."""
    while (folder / "__init__.py").exists():
        yield folder / "__init__.py"
        folder = folder.parent


@functools.cache
def _files(folder: Path, parts: tuple[str, ...]) -> tuple[Path, ...]:
    found: tuple[Path, ...] = ()
    for part in parts:
        if (folder / f"{part}.py").exists():
            return (*found, folder / f"{part}.py")
        folder = folder / part
        if not (folder / "__init__.py").exists():
            break
        found += (folder / "__init__.py",)
    return found


# -- names -------------------------------------------------------------------------------------


@functools.cache
def _lack(name: str, is_import: bool, is_v1: bool) -> tuple[str, str, str] | None:
    """Returns what is missing of a name: a word, the name, and what to do."""
    module, _, attributes = name.partition(":")
    root = _root_of(module)
    if root not in sys.modules:
        if importlib.util.find_spec(root) is not None:
            return None
        if root in _OLD_PYTHON:
            return "cannot", f"import {root}", "This Python does not have it. " + REPLACE
        return "needs", f"the package {root}", "Install it"
    try:
        found = _module(module, is_v1)
    except ImportError as error:
        return _lacking(error.name or module)
    except hostopt.ConfigError as error:  # another Keras is installed
        return _lacking(module, _advice_of(error))
    path = module
    for part in filter(None, attributes.split(".")):
        if not isinstance(found, (ModuleType, type)):
            return None
        path += f".{part}"
        try:
            found = getattr(found, part)
        except (AttributeError, ImportError) as error:
            lacking = _lacking(path, _advice_of(error) if root in _OF_HOROVOD else "")
            if not is_import and root == "tensorflow":
                return lacking
            try:
                found = _module(path, is_v1)
            except ImportError:
                return lacking
    return None


def _module(name: str, is_v1: bool) -> object:
    """Imports a module of TensorFlow or Horovod; others are found, if they are loaded."""
    root, _, rest = name.partition(".")
    if root == "tensorflow" and is_v1 and not rest.startswith("compat"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"tensorflow.compat.v1.{rest}".rstrip("."))
    if root == "tensorflow" or root in _OF_HOROVOD:
        return importlib.import_module(name)
    if name in sys.modules:
        return sys.modules[name]
    if importlib.util.find_spec(name) is None:
        raise ImportError(name=name)
    return None


def _lacking(name: str, advice: str = "") -> tuple[str, str, str]:
    if name.startswith(f"{ROOT}."):
        advice = _advice_of(missing(name[len(ROOT) + 1 :]))
    return "needs", _shown(name), advice or REPLACE


def _advice_of(error: Exception) -> str:
    """Returns the second sentence of an error; "" if it has one only."""
    return str(error).partition(". ")[2]


def _root_of(name: str) -> str:
    return re.split("[.:]", name)[0]


def _shown(name: str) -> str:
    name = name.replace(":", ".")
    return re.sub(r"^tensorflow\.(?!python)", "tf.", name)


# -- output ------------------------------------------------------------------------------------


def check(root: str) -> int:
    """Prints a line for each file that uses TensorFlow, and a summary; returns the exit code."""
    serve_horovod()
    tree = Tree(Path(root))
    files = tree.files()
    shown = [file for file in files if file.uses_tensorflow or file.is_program]
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    needed: Counter[str] = Counter()
    for file in shown:
        options, problems = tree.choose(file)
        with_options = " ".join(["with", *sorted(options)] if options else [])
        word = _text(file, problems) or f"runs {with_options}".strip()
        if problems and options:
            word += f". Then run it {with_options}"
        print(f"{os.path.relpath(file.path)}: {word}")
        counts[file.is_program][problems[0].word if problems else word] += 1
        needed.update(list(dict.fromkeys(problem.name for problem in problems)))
    for kind, words in (("programs", counts[True]), ("modules", counts[False])):
        texts = [f"{number} {word}" for word, number in words.most_common()]
        print(f"{kind}: {', '.join(texts) or 'none'}")
    if needed:
        texts = [f"{name} ({number})" for name, number in needed.most_common(10)]
        print(f"most often: {', '.join(texts)}")
    if len(files) > len(shown):
        print(f"without TensorFlow: {len(files) - len(shown)} files")
    return hostopt.ConfigError.exit_code if needed else 0


def _text(file: File, problems: Iterable[Problem]) -> str:
    groups: dict[tuple[str, str], dict[str, list[Problem]]] = {}
    for problem in problems:
        names = groups.setdefault((problem.word, problem.advice), {})
        names.setdefault(problem.name, []).append(problem)
    return "; ".join(
        f"{word} {', '.join(f'{name}{_place(file, each)}' for name, each in names.items())}: "
        f"{advice}"
        for (word, advice), names in groups.items()
    )


def _place(file: File, problems: list[Problem]) -> str:
    """Returns in which lines a name is needed, and whether only functions need it."""
    lines = [
        f"line {each.line}" if each.file == file.path else f"{each.file.name}:{each.line}"
        for each in sorted(problems, key=lambda each: each.when)
    ]
    different = list(dict.fromkeys(lines))
    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
    is_later = all(each.when == When.CALLED for each in problems)
    return f"{' when called' if is_later else ''} ({different[0]}{more})"
