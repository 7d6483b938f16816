"""What is shown of an error that ends a rank: its cause in one line, and what goes to a file."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import traceback
from typing import NamedTuple

from hostopt.errors import HostOptError

__all__: list[str] = []

# Set by `hostopt run`: a file in which a rank leaves the cause of its end, in one line.
VARIABLE = "HOSTOPT_ERROR_FILE"
_WRITE_TIMEOUT_S = 1.0
_MOST_CHARACTERS = 1000

# Parts of TensorFlow's messages, which repeat each error up to four times.
_DEFINED_AT = re.compile(
    r"Detected at node [^\n]*\(most recent call last\):\n(?:[ \t]+[^\n]*\n)*(?:Node: [^\n]*\n)?"
)
_ORIGINAL = re.compile(r"\n*Original stack trace for '[^'\n]*':\n(?:[ \t]+[^\n]*(?:\n|$))*")
_OTHER_ROOTS = re.compile(r"\n  \(1\) .*?\n\d+ successful operations\.", re.DOTALL)
_TRACEBACK = re.compile(
    r"Traceback \(most recent call last\):\n(?:[ \t]*\n|[ \t]+[^\n]*\n)*[^\n]*"
)
_WORDS = re.compile(
    r"Graph execution error:|\d+ root error\(s\) found\.\s*\(0\) [A-Z_]+: |\[\[.*?\]\]"
    r"|\d+ successful operations\.|\d+ derived errors ignored\.",
    re.DOTALL,
)
_NODE = re.compile(r"^Node: ('[^'\n]*')$", re.MULTILINE)
_OF_PYTHON = "UnknownError"  # what TensorFlow makes of an exception in a Python function


def cause_of(error: BaseException) -> str:
    """An error in one line: its type and what it says, without tracebacks.

    Args:
      error: of hostopt, of TensorFlow or of the user's code.

    Returns:
      The line; at most 1000 characters and dots, unless the error is of hostopt, whose last words
      say what to do.
    """
    kind, text = type(error).__name__, str(error)
    if isinstance(error, HostOptError):
        return f"{kind}: {' '.join(text.split())}"
    node = _NODE.search(text)
    for part in (_ORIGINAL, _OTHER_ROOTS, _DEFINED_AT, _TRACEBACK, _WORDS):
        text = part.sub(" ", text)
    text = " ".join(text.split())
    if kind != _OF_PYTHON or not text:
        at = f" (operation {node[1]})" if node else ""
        text = f"{kind}: {text}{at}".removesuffix(": ")
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def details_of(error: BaseException) -> str:
    """All that Python would print of an error."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def shown_of(error: BaseException, who: str, details: str) -> str:
    """What a rank prints of the error that ends it.

    Args:
      error: the error.
      who: the rank, as messages name it.
      details: where the rest can be read.

    Returns:
      For an error of hostopt, which names the rank to blame and the cure, one line. For any other
      one, the traceback of the user's code, without the errors before it that were being handled
      and without what TensorFlow repeats.
    """
    if isinstance(error, HostOptError):
        return f"hostopt: {who}: {cause_of(error)} [traceback: {details}]\n"
    found = traceback.TracebackException.from_exception(error)
    _drop_contexts(found)
    text = _OTHER_ROOTS.sub("", _ORIGINAL.sub("\n", "".join(found.format())))
    first = _DEFINED_AT.search(text)
    if first is not None:
        text = text[: first.end()] + _DEFINED_AT.sub("", text[first.end() :])
    return f"{text.rstrip()}\nhostopt: {who} ends with this error [all of it: {details}]\n"


def _drop_contexts(found: traceback.TracebackException | None) -> None:
    """Keep what an error was raised `from`, and nothing that was only being handled."""
    while found is not None:
        found.__context__ = None
        found = found.__cause__


def write_details(directory: str, rank: int, error: BaseException) -> str | None:
    """Write all of an error into a directory; a disk that hangs is waited for a second.

    Args:
      directory: where the flight recorder writes, too.
      rank: this rank.
      error: the error.

    Returns:
      The file; None if it is not written.
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

    with contextlib.suppress(RuntimeError):  # no thread starts while Python ends
        writer = threading.Thread(target=write, daemon=True, name="hostopt-error")
        writer.start()
        writer.join(_WRITE_TIMEOUT_S)
    return path if written.is_set() else None


class Report(NamedTuple):
    """What a rank has left to the launcher.

    Args:
      code: exit code of the rank, also if it is killed before it has ended; None if it left none.
      said: the cause of its end, in one line.
    """

    code: int | None = None
    said: str = ""


def tell_launcher(error: BaseException, code: int, details: str | None) -> None:
    """Leave the cause of this rank's end to `hostopt run`, if that has started it.

    Args:
      error: the error.
      code: exit code of this rank.
      details: where the rest can be read, if anywhere.
    """
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    where = f" [traceback: {details}]" if details else ""
    with contextlib.suppress(OSError), open(path, "wb") as file:
        file.write(f"{code}\n{cause_of(error)}{where}".encode(errors="backslashreplace"))


def read_report(path: str) -> Report:
    """What a rank has left to the launcher; nothing if it had no time for it."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        code, _, said = file.read().partition("\n")
        return Report(int(code), said)
    return Report()
