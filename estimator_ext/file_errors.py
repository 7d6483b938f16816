"""Errors of files in model_dir, as one `CheckpointError` that says what is missing and what to do.

TensorFlow raises a dozen types for them, some of which it then takes for the end of the data or
for a reason to begin again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence

import tensorflow as tf

import hostopt
from hostopt import descriptors

__all__: list[str] = []

_MB = 1e6
_NOT_RESTORED = "Restoring from checkpoint failed"  # TensorFlow's words


def cause(error: BaseException) -> str:
    """The line of an error that says why, without where in the graph.

    Args:
      error: of TensorFlow or of Python.

    Returns:
      The line.

    Raises:
      hostopt.ResourceError: no file descriptor was left, for which no file is to blame.
    """
    descriptors.check(error)
    text = str(getattr(error, "message", error)) or type(error).__name__
    found = re.search(r"^(.+)\n\s*\[\[", text, re.MULTILINE)
    return found[1] if found else text.partition("\n")[0]


def cannot_save(
    path: str, error: Exception, needed_bytes: int, last_checkpoint: str | None = None
) -> hostopt.CheckpointError:
    """The error for a file that could not be written.

    Args:
      path: the file, or what several files have in common.
      error: what happened.
      needed_bytes: how much was to be written.
      last_checkpoint: path of the newest whole checkpoint.

    Returns:
      The error.
    """
    room = _room(os.path.dirname(path), f"{needed_bytes / _MB:.1f} MB are needed, ")
    return hostopt.CheckpointError(
        f"cannot save {path}: {cause(error)}{room}. Make room there, or correct what forbids "
        "writing, and run the same command again to resume",
        last_checkpoint=last_checkpoint,
    )


def write_whole(path: str, parts: Sequence[bytes]) -> None:
    """Write a file as a whole or not at all.

    Args:
      path: the file; what it holds now stays until then.
      parts: what it is to hold, one after the other.

    Raises:
      hostopt.CheckpointError: it cannot be written.
    """
    draft = f"{path}.tmp"
    try:
        with tf.io.gfile.GFile(draft, "wb") as file:
            for part in parts:
                file.write(part)
        tf.io.gfile.rename(draft, path, overwrite=True)
    except tf.errors.OpError as error:
        remove(draft)  # a full disk must not stay so for it
        raise cannot_save(path, error, sum(map(len, parts))) from error


def remove(path: str) -> None:
    """Remove a file, if that is possible.

    Args:
      path: the file.
    """
    with contextlib.suppress(tf.errors.OpError):
        tf.io.gfile.remove(path)


@contextlib.contextmanager
def errors_of_files(directory: str | None) -> Iterator[None]:
    """Scope in which `error_of_file` is raised, if an error is one.

    Args:
      directory: as `error_of_file` takes it; None on a rank that has no files.

    Yields:
      Nothing.

    Raises:
      hostopt.CheckpointError: a file there could not be written, or a checkpoint not restored.
    """
    try:
        yield
    except Exception as error:
        of_file = None if directory is None else error_of_file(error, directory)
        if of_file is None:
            raise
        raise of_file from error


def error_of_file(error: BaseException, directory: str) -> hostopt.CheckpointError | None:
    """The error for one that a file has caused, by writing, or by a restore that does not fit.

    Args:
      error: what was raised.
      directory: where the files are.

    Returns:
      The error to raise instead; None for all others, those of hostopt among them.
    """
    if isinstance(error, hostopt.HostOptError):
        return None
    if _NOT_RESTORED in str(error):
        return hostopt.CheckpointError(
            f"a checkpoint in {directory} does not fit the model: {_original(error)}. "
            "Train the model that was saved, or give another model_dir"
        )
    # the cause where the session guard has wrapped what TensorFlow takes for the end of the data
    for each in (error, error.__cause__):
        if each and _is_of_writing(each) and _names_file_in(directory, cause(each)):
            return hostopt.CheckpointError(
                f"cannot write or read a file of {directory}: {cause(each)}{_room(directory)}. "
                "Make room there, or correct what forbids it, and run the same command again"
            )
    return None


def _room(directory: str, needed: str = "") -> str:
    with contextlib.suppress(OSError):  # it is gone, or no local path
        free_bytes = shutil.disk_usage(directory or ".").free
        return f" ({needed}{free_bytes / _MB:.1f} MB are free)"
    return ""


def _original(error: BaseException) -> str:
    """What TensorFlow has said before it guessed why."""
    return cause(Exception(str(error).rpartition("Original error:")[2].strip()))


def _names_file_in(directory: str, text: str) -> bool:
    """Whether a path in a text begins with a directory, a name that may be an everyday word."""
    path = re.escape(directory.rstrip("/"))
    return re.search(rf"(?<![^\s\"'(=]){path}(?:[/;]| is not a directory)", text) is not None


def _is_of_writing(error: BaseException) -> bool:
    if isinstance(error, tf.errors.OpError):  # of a file, where no operation has it
        of_reading = isinstance(error, (tf.errors.NotFoundError, tf.errors.DataLossError))
        return error.op is None and not of_reading
    return "Failed to flush" in str(error)  # of an events file, whatever its type
