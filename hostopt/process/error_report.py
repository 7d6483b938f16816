"""Reports of the error that ends a rank: cause in one line, full traceback in a file."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import traceback
import types
from typing import NamedTuple

from hostopt.errors import HostOptError

# Set by `hostopt run`: file to which a rank writes its exit code and the cause in one line.
VARIABLE = "HOSTOPT_ERROR_FILE"
_WRITE_TIMEOUT_S = 1.0
_MAX_CHARACTERS = 1000

# Parts of TensorFlow's messages, which contain each error up to four times.
_DEFINED_AT = re.compile(
    r"Detected at node [^\n]*\(most recent call last\):\n(?:[ \t]+[^\n]*\n)*(?:Node: [^\n]*\n)?"
)
_ORIGINAL = re.compile(r"\n*Original stack trace for '[^'\n]*':\n(?:[ \t]+[^\n]*(?:\n|$))*")
_OTHER_ROOTS = re.compile(r"\n  \(1\) .*?\n\d+ successful operations\.", re.DOTALL)
_TRACEBACK = re.compile(
    r"Traceback \(most recent call last\):\n(?:[ \t]*\n|[ \t]+[^\n]*\n)*[^\n]*"
)
_PHRASES = re.compile(
    r"Graph execution error:|\d+ root error\(s\) found\.\s*\(0\) [A-Z_]+: |\[\[.*?\]\]"
    r"|\d+ successful operations\.|\d+ derived errors ignored\.",
    re.DOTALL,
)
# Packages and modules whose frames are left out of the printed traceback.
_PACKAGES = r"(?:hostopt|estimator_ext|tensorflow\w*|keras|tf_keras)"
_LIBRARY = re.compile(rf"(?:{_PACKAGES}|contextlib|runpy)(?:\.|$)")
_ROOT = re.escape(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LIBRARY_ENTRY = re.compile(
    rf'[ \t]+File "(?:(?:[^"\n]*/(?:site|dist)-packages|{_ROOT})/{_PACKAGES}/'
    r'|[^"\n]*/contextlib\.py"|<frozen runpy>")[^\n]*\n(?:[ \t]+(?!File ")[^\s][^\n]*\n)?'
)
_NODE = re.compile(r"^Node: ('[^'\n]*')$", re.MULTILINE)
_PYTHON_FUNCTION_ERROR = "UnknownError"  # TensorFlow's type for exceptions in Python functions


def cause_of(error: BaseException) -> str:
    """Returns type and message of an error in one line, without tracebacks.

    It is truncated to 1000 characters, unless the error is a HostOptError, which ends with advice.
    """
    kind, text = type(error).__name__, str(error)
    if isinstance(error, HostOptError):
        return f"{kind}: {' '.join(text.split())}"
    node = _NODE.search(text)
    for part in (_ORIGINAL, _OTHER_ROOTS, _DEFINED_AT, _TRACEBACK, _PHRASES):
        text = part.sub(" ", text)
    text = " ".join(text.split())
    if kind != _PYTHON_FUNCTION_ERROR or not text:
        at = f" (operation {node[1]})" if node else ""
        text = f"{kind}: {text}{at}".removesuffix(": ")
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def details_of(error: BaseException) -> str:
    """Returns the full text that Python prints for an uncaught error."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def summary_of(error: BaseException, description: str, details_path: str) -> str:
    """Returns the text that a rank prints for the error that ends it.

    It is one line for a HostOptError, which names the rank to blame and the remedy. For other
    errors it is the traceback of the user's code and the function that raised the error, without
    the errors that were being handled when it was raised, and without TensorFlow's repetitions.
    """
    if isinstance(error, HostOptError):
        return f"hostopt: {description}: {cause_of(error)} [traceback: {details_path}]\n"
    trace = traceback.TracebackException.from_exception(error)
    _shorten(trace, error)
    text = _OTHER_ROOTS.sub("", _ORIGINAL.sub("\n", "".join(trace.format())))
    first = _DEFINED_AT.search(text)
    if first is not None:
        defined_at = _LIBRARY_ENTRY.sub("", first[0])
        text = text[: first.start()] + defined_at + _DEFINED_AT.sub("", text[first.end() :])
    last = f"hostopt: {description} ends with this error [full traceback: {details_path}]"
    return f"{text.rstrip()}\n{last}\n"


def _shorten(trace: traceback.TracebackException | None, error: BaseException | None) -> None:
    """Removes frames of libraries and the implicit context of each error, not its cause."""
    while trace is not None and error is not None:
        trace.__context__ = None
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        kept = [not _is_of_library(frame) for frame in frames[:-1]] + [True]
        trace.stack = traceback.StackSummary.from_list(itertools.compress(trace.stack, kept))
        trace, error = trace.__cause__, error.__cause__


def _is_of_library(frame: types.FrameType) -> bool:
    names = frame.f_globals
    name = names.get("__package__") or names.get("__name__") or ""
    return _LIBRARY.match(str(name)) is not None


def write_details(
    directory: str | os.PathLike[str], rank: int, error: BaseException
) -> str | None:
    """Writes the full traceback of an error to a file, and returns its path.

    Returns None if it could not be written within a second.
    """
    path = os.path.join(directory, f"rank_{rank}.error.txt")
    text = details_of(error)
    written = threading.Event()

    def write() -> None:
        with contextlib.suppress(OSError):
            os.makedirs(directory, exist_ok=True)
            with open(path, "w") as file:
                file.write(text)
            written.set()

    with contextlib.suppress(RuntimeError):  # no thread can start while the interpreter exits
        writer = threading.Thread(target=write, daemon=True, name="hostopt-error")
        writer.start()
        writer.join(_WRITE_TIMEOUT_S)
    return path if written.is_set() else None


class Report(NamedTuple):
    """Report of a rank to the launcher."""

    code: int | None = None
    cause: str = ""


def write_report(error: BaseException, code: int, details_path: str | None) -> None:
    """Writes a report for `hostopt run`, if it started this process."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    suffix = f" [traceback: {details_path}]" if details_path else ""
    with contextlib.suppress(OSError), open(path, "wb") as file:
        file.write(f"{code}\n{cause_of(error)}{suffix}".encode(errors="backslashreplace"))


def read_report(path: str) -> Report:
    """Reads the report of a rank; an empty one if the rank has written none."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        code, _, cause = file.read().partition("\n")
        return Report(int(code), cause)
    return Report()
