"""Measures how strong the tests of `make test` are: how many small changes they notice.

python tests/release/mutants.py map         runs the tests, and notes which test runs which line
python tests/release/mutants.py run         changes one expression at a time, and runs those tests
python tests/release/mutants.py survivors --tests tests/faults   tries other tests on what is left

The sources are changed in place and restored; `--root DIR` changes those of a clone. coverage has
to be installed beside pytest, as it measures the processes that tests start, too. What it needs
in these processes is in this file, which pytest loads as a plugin, and in `fork_server`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = Path("build", "mutants")  # below the root
FASTEST = 60  # tests that run for each mutant, beside those of tests/training
GROUPS = {
    "ring": """hostopt/collectives/ring.py hostopt/collectives/ring_schedule.py
        hostopt/collectives/communicator.py hostopt/collectives/host_memory.py
        hostopt/collectives/pairs.py hostopt/collectives/shared_memory.py""",
    "reducers": "hostopt/gradients/reducer.py",
    "buckets": "hostopt/gradients/bucket.py",
    "exchange": "hostopt/gradients/fused_exchange.py",
    "reduction": """estimator_ext/reduction/gradient_reduction.py
        hostopt/tensorflow/gradient_reduction.py""",
    "unreduced": "estimator_ext/reduction/unreduced_updates.py",
    "checkpoints": "estimator_ext/checkpoints/reading.py",
    "stop": "estimator_ext/session/coordinated_stop.py",
    "restarts": "hostopt/launch/restarts.py",
    "sharding": """estimator_ext/pipelines/sharding.py estimator_ext/pipelines/divided_pipeline.py
        estimator_ext/data_workers/service.py""",
}
SWAPS = {"<": "<=", ">": ">=", "==": "!=", "in": "not in", "is": "is not", "and": "or"}
SWAPS |= {new: old for old, new in SWAPS.items()}
SWAPS |= {"+": "-", "*": "//", "+=": "-=", "*=": "//="}
RC = """[run]
parallel = True
include = {include}
data_file = {data}
context = ${{PYTEST_CURRENT_TEST-none}}
patch = _exit
"""
MESSAGES = {"debug", "info", "warning", "error", "exception", "critical", "log", "warn"}


# --- the mutants of a file --------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A change of one expression.

    Args:
      path: file, relative to the root.
      line: line where the change begins.
      statement: first line of the statement that is changed.
      start: byte of the file where the change begins.
      end: the byte behind the old text.
      new: the new text.
      kind: what is changed.
      in_function: false for code that runs when the module is imported.
    """

    path: str
    line: int
    statement: int
    start: int
    end: int
    new: str
    kind: str
    in_function: bool

    def applied_to(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def lines(self, source: bytes) -> set[tuple[str, int]]:
        count = source[self.start : self.end].count(b"\n") + 1
        return {(self.path, self.line + i) for i in range(count)}

    def described(self, source: bytes) -> str:
        both = (source, self.applied_to(source))
        before, after = (text.decode().splitlines()[self.line - 1].strip() for text in both)
        return f"{self.path}:{self.line}  {before}  ->  {after}"


class Source:
    """The text of a file, and what may be changed in it.

    Args:
      root: directory of the sources.
      path: the file, relative to the root.
    """

    def __init__(self, root: Path, path: str) -> None:
        self.text = (root / path).read_bytes()
        self._path = path
        lengths = [len(line) for line in self.text.splitlines(keepends=True)]
        self._starts = [sum(lengths[:i]) for i in range(len(lengths))]

    def mutants(self) -> Iterator[Mutant]:
        """Yields all changes that Python can compile."""
        for node, statement, in_function in self._nodes(ast.parse(self.text), 1, False):
            for start, end, new in self._edits(node):
                line = self.text[:start].count(b"\n") + 1
                where = (self._path, line, statement, start, end)
                mutant = Mutant(*where, new, type(node).__name__, in_function)
                with contextlib.suppress(SyntaxError):
                    compile(mutant.applied_to(self.text), self._path, "exec", dont_inherit=True)
                    yield mutant

    def _span(self, node: Any) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _code(self, node: ast.AST | None) -> str:
        return "" if node is None else self.text[slice(*self._span(node))].decode()

    def _nodes(
        self, node: ast.AST, statement: int, in_function: bool
    ) -> Iterator[tuple[ast.AST, int, bool]]:
        """Yields the nodes that may be changed, with their statements."""
        statement = node.lineno if isinstance(node, ast.stmt) else statement
        in_function |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield node, statement, in_function
        for child in self._children(node):
            yield from self._nodes(child, statement, in_function)

    def _children(self, node: Any) -> list[ast.AST]:
        """Returns no messages, annotations, decorators, defaults and imports for type checking."""
        if isinstance(node, (ast.Raise, ast.JoinedStr)) or _is_message(node):
            return []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return node.body
        if isinstance(node, ast.Lambda):
            return [node.body]
        if isinstance(node, ast.AnnAssign):
            return [node.value] if node.value and self._code(node.target) != "__all__" else []
        if isinstance(node, ast.Assign) and self._code(node.targets[0]) == "__all__":
            return []
        if isinstance(node, ast.If) and self._code(node.test).endswith("TYPE_CHECKING"):
            return []
        return list(ast.iter_child_nodes(node))

    def _edits(self, node: Any) -> Iterator[tuple[int, int, str]]:
        """Yields the changes of a node: first byte, the byte behind the last one, new text."""
        yield from self._swaps(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield (*self._span(node), self._code(node)[len("not") :].strip())
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield (*self._span(node), str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield (*self._span(node), str(node.value + 1))
        elif isinstance(node, (ast.If, ast.IfExp)):
            if not self._code(node.test).endswith("TYPE_CHECKING") and not _is_text(node.body):
                yield (*self._span(node.test), f"not ({self._code(node.test)})")
        elif isinstance(node, ast.Return) and self._code(node.value) not in ("", "None"):
            yield (*self._span(node.value), "None")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if not _is_message(node.value):
                yield (*self._span(node), "pass")
        elif isinstance(node, (ast.Break, ast.Continue)):
            yield (*self._span(node), "continue" if isinstance(node, ast.Break) else "break")

    def _swaps(self, node: Any) -> Iterator[tuple[int, int, str]]:
        """Yields the changes of operators, each of which is the text between two operands."""
        for left, right in _operands(node):
            end = self._span(left)[1]
            between = self.text[end : self._span(right)[0]].decode()
            operator = between.strip("() \n")
            if operator in SWAPS:
                start = end + between.index(operator)
                yield start, start + len(operator), SWAPS[operator]


def _operands(node: Any) -> list[tuple[ast.AST, ast.AST]]:
    """Returns the operands left and right of each operator of a node."""
    if isinstance(node, ast.Compare):
        return list(zip([node.left, *node.comparators], node.comparators))
    if isinstance(node, ast.BoolOp):
        return list(zip(node.values, node.values[1:]))
    if isinstance(node, ast.BinOp) and not any(map(_is_text, ast.walk(node))):
        return [(node.left, node.right)]
    if isinstance(node, ast.AugAssign) and not _is_text(node.value):
        return [(node.target, node.value)]
    return []


def _is_text(node: object) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def _is_message(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in MESSAGES


def files_of(root: Path, groups: Iterable[str] = GROUPS) -> list[str]:
    """Returns the files of groups, relative to the root."""
    patterns = [pattern for group in groups for pattern in GROUPS[group].split()]
    files = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    return [str(path.relative_to(root)) for path in files]


def choose(root: Path, group: str, count: int, seed: int) -> list[Mutant]:
    """Returns mutants of a group: all kinds are equally likely, and no two share a line."""
    sources = {path: Source(root, path) for path in files_of(root, [group])}
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    for source in sources.values():
        for mutant in source.mutants():
            by_kind[mutant.kind].append(mutant)
    rng = random.Random(f"{seed} {group}")
    chosen: list[Mutant] = []
    taken: set[tuple[str, int]] = set()
    while len(chosen) < count and any(by_kind.values()):
        left = by_kind[rng.choice([kind for kind in sorted(by_kind) if by_kind[kind]])]
        mutant = left.pop(rng.randrange(len(left)))
        lines = mutant.lines(sources[mutant.path].text)
        if not lines & taken:
            chosen.append(mutant)
            taken |= lines
    return chosen


# --- which tests run a line: the plugin of pytest, and what `map` does --------------------------

_seconds: dict[str, float] = defaultdict(float)  # by test
_failed: set[str] = set()


def pytest_runtest_logreport(report: Any) -> None:
    _seconds[report.nodeid] += report.duration
    if report.failed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: Any) -> None:
    if not hasattr(session.config, "workerinput"):
        passed = {test: s for test, s in _seconds.items() if test not in _failed}
        (session.config.rootpath / DATA / "seconds.json").write_text(json.dumps(passed))


def _switch(item: Any, phase: str) -> None:
    import coverage

    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(f"{item.nodeid} ({phase})")


def pytest_runtest_setup(item: Any) -> None:
    _switch(item, "setup")


def pytest_runtest_call(item: Any) -> None:
    _switch(item, "call")


def pytest_runtest_teardown(item: Any) -> None:
    _switch(item, "teardown")


def measure(root: Path, tests: Sequence[str], jobs: int) -> int:
    """Runs the tests, and writes down which of them run which line, and how long they take.

    Returns:
      Exit code of pytest. `run` leaves tests that failed out.
    """
    directory = root / DATA
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    rc = directory / "coverage.rc"
    include = "".join(f"\n    {root}/{path}" for path in files_of(root))
    rc.write_text(RC.format(include=include, data=directory / "data"))
    environ = {**_environ(root), "COVERAGE_PROCESS_START": str(rc)}
    check = [sys.executable, "-c", "import sys; sys.exit('coverage' not in sys.modules)"]
    if subprocess.run(check, env=environ, check=False).returncode:
        sys.exit(f"coverage does not start by itself: {sys.executable} -m pip install -U coverage")
    options = ["-q", "-p", "mutants", "-p", "no:cacheprovider", "-n", str(jobs)]
    options += ["--dist", "loadfile", "--no-loadscope-reorder"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    code = subprocess.run(command, cwd=root, env=environ, check=False).returncode
    combine = [sys.executable, "-m", "coverage", "combine", "--quiet", "--rcfile", str(rc)]
    subprocess.run(combine, cwd=root, check=True)
    (directory / "sources").write_text(_digest(root))
    return code


def tests_of(root: Path, mutant: Mutant, seconds: dict[str, float]) -> list[str]:
    """Returns tests that run the line of a mutant, the fastest ones first.

    For code that runs at import, these are tests that run any line of the module.

    Args:
      root: directory of the sources.
      mutant: the mutant.
      seconds: duration of each test that passes without a mutant.
    """
    import coverage

    data = coverage.CoverageData(str(root / DATA / "data"))
    data.read()
    by_line = data.contexts_by_lineno(str(root / mutant.path))
    lines = {mutant.line, mutant.statement} if mutant.in_function else set(by_line)
    contexts = {context for each in lines for context in by_line.get(each, [])}
    tests = sorted(_named(contexts, seconds), key=lambda test: seconds[test])
    trainings = [test for test in tests[FASTEST:] if test.startswith("tests/training/")]
    return tests[:FASTEST] + trainings


def _named(contexts: set[str], tests: Iterable[str]) -> set[str]:
    """Returns those of the tests that the contexts name.

    A process that a test starts has the context "test", or "none|test" after a fork. Fixtures may
    serve all tests of a file, so a context with "(setup)" stands for all of them.
    """
    named: set[str] = set()
    for context in contexts:
        match = re.search(r"(?:^|\|)(tests/(?:(?!\|tests/).)*) \((\w+)\)$", context, re.DOTALL)
        if match and match[2] == "setup":
            named.update(test for test in tests if test.startswith(match[1].split("::")[0] + "::"))
        elif match:
            named.update({match[1]} & set(tests))
    return named


# --- running mutants --------------------------------------------------------------------------


def _digest(root: Path) -> str:
    files = [(root / path).read_bytes() for path in files_of(root)]
    return hashlib.sha256(b"".join(files)).hexdigest()


def _environ(root: Path) -> dict[str, str]:
    """Returns an environment in which the sources of `root` are imported, and this plugin."""
    paths = os.pathsep.join([str(root), str(Path(__file__).parent)])
    return {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "PYTHONPATH": paths}


def _check(root: Path) -> None:
    """Ends the program if `root` is not what the map was made of."""
    command = ["git", "diff", "--quiet", "--", "hostopt", "estimator_ext"]
    if subprocess.run(command, cwd=root, check=False).returncode:
        sys.exit(f"the sources in {root} have changes: commit them, or take a clone with --root")
    digest = root / DATA / "sources"
    if not digest.exists() or digest.read_text() != _digest(root):
        sys.exit(f"there is no map of the sources in {root}: run `mutants.py map` first")


@contextlib.contextmanager
def applied(root: Path, mutant: Mutant) -> Iterator[None]:
    """Scope in which the file has the change."""
    path = root / mutant.path
    source, stat = path.read_bytes(), path.stat()
    try:
        path.write_bytes(mutant.applied_to(source))
        yield
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # compiled files count again


def killed_by(root: Path, arguments: Sequence[str], limit_s: float) -> str | None:
    """Runs tests until the first one fails.

    Returns:
      Its name, or another reason; None if all tests passed.
    """
    mark, scratch = f"MUTANTS={os.getpid()}", tempfile.mkdtemp(prefix="mutant-")
    environ = {**_environ(root), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": scratch}
    environ.update([mark.split("=")])
    options = ["-x", "-q", "--hypothesis-seed=0", "-p", "no:cacheprovider", "-p", "no:durations"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    log = root / DATA / "last.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=root, env=environ, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"timeout of {limit_s:.0f} s"
        finally:
            _end_processes(mark)
            process.wait()
            shutil.rmtree(scratch, ignore_errors=True)
    text = log.read_text(errors="replace")
    if "\nERROR: not found: " in text:  # the names of tests depend on what was changed
        files = dict.fromkeys(argument.split("::")[0] for argument in arguments)
        return killed_by(root, list(files), limit_s)
    match = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - |$)", text, re.MULTILINE)
    return None if code == 0 else match[1] if match else f"exit code {code}"


def _end_processes(mark: str) -> None:
    """Kills what a mutant has left running: all processes with `mark` in their environment."""
    while True:
        marked = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is not ours
                if mark.encode() in path.read_bytes().split(b"\0"):
                    marked.append(int(path.parent.name))
        if not marked:
            return
        for pid in marked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def try_mutant(root: Path, mutant: Mutant, arguments: Sequence[str], limit_s: float) -> bool:
    """Prints a mutant, runs tests, and prints what they say.

    Returns:
      True if it was killed.
    """
    print(mutant.described((root / mutant.path).read_bytes()), flush=True)
    began_s = time.monotonic()
    with applied(root, mutant):
        killer = killed_by(root, arguments, limit_s) if arguments else None
    result = f"killed by {killer}" if killer else "survived" if arguments else "survived: no test"
    print(f"    {result}, {time.monotonic() - began_s:.0f} s", flush=True)
    return killer is not None


def run(root: Path, seed: int, count: int, only: Sequence[str], limit_s: float) -> None:
    """Runs mutants of some groups against the tests that run their lines."""
    survivors: list[Mutant] = []
    rows = []
    for i, group in enumerate(GROUPS):
        mutants = choose(root, group, count // len(GROUPS) + (i < count % len(GROUPS)), seed)
        if group in (only or GROUPS):
            left = [mutant for mutant in mutants if not _try_with_map(root, mutant, limit_s)]
            survivors += left
            found = json.dumps([asdict(mutant) for mutant in survivors])
            (root / DATA / "survivors.json").write_text(found)
            rows.append((group, len(mutants) - len(left), len(mutants)))
    print(f"\n{'group':12} killed of")
    rows.append(("all", *(sum(row[i] for row in rows) for i in (1, 2))))
    for group, killed, total in rows:
        print(f"{group:12} {killed:6} {total:2}")
    print(f"{rows[-1][1] / rows[-1][2]:.0%} killed")


def _try_with_map(root: Path, mutant: Mutant, limit_s: float) -> bool:
    seconds = json.loads((root / DATA / "seconds.json").read_text())
    tests = tests_of(root, mutant, seconds)
    limit_s = max(limit_s, 4 * sum(seconds[test] for test in tests))  # slow tests kill nothing
    return try_mutant(root, mutant, ["-n", "0", *tests] if tests else [], limit_s)


def run_survivors(root: Path, tests: Sequence[str], jobs: int, limit_s: float) -> None:
    """Runs what the last run left against other tests."""
    mutants = [Mutant(**x) for x in json.loads((root / DATA / "survivors.json").read_text())]
    arguments = ["-n", str(jobs), "--dist", "loadfile", *tests]
    broken = killed_by(root, arguments, limit_s)
    if broken:
        sys.exit(f"the tests fail without a mutant: {broken}")
    killed = sum(try_mutant(root, mutant, arguments, limit_s) for mutant in mutants)
    print(f"\n{killed} of {len(mutants)} killed")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--root", type=Path, default=ROOT, help="directory of the sources")
    parallel = argparse.ArgumentParser(add_help=False)
    parallel.add_argument("--jobs", type=int, default=3, help="tests that run at the same time")
    command = commands.add_parser("map", parents=[common, parallel])
    command.add_argument("--tests", nargs="+", default=["tests/unit", "tests/training"])
    command = commands.add_parser("run", parents=[common])
    command.add_argument("--seed", type=int, default=31)
    command.add_argument("--count", type=int, default=40, help="mutants of all groups together")
    command.add_argument("--only", nargs="+", choices=GROUPS, default=[], metavar="GROUP")
    command.add_argument("--limit", type=float, default=300, help="seconds for each mutant")
    command = commands.add_parser("survivors", parents=[common, parallel])
    command.add_argument("--tests", nargs="+", required=True)
    command.add_argument("--limit", type=float, default=3600, help="seconds for each mutant")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    root = arguments.root.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # restores the source
    if importlib.util.find_spec("coverage") is None:
        sys.exit(f"coverage is missing: {sys.executable} -m pip install coverage")
    if arguments.command == "map":
        return measure(root, arguments.tests, arguments.jobs)
    _check(root)
    if arguments.command == "run":
        run(root, arguments.seed, arguments.count, arguments.only, arguments.limit)
    else:
        run_survivors(root, arguments.tests, arguments.jobs, arguments.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
