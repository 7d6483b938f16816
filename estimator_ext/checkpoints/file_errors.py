"""Translates errors of files in model_dir to `CheckpointError`.

TensorFlow raises a dozen types of errors for files. It mistakes some of them for the end of the
data, and starts a new session after others.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence

import tensorflow as tf

import hostopt
from hostopt.process import descriptors

_MB = 1e6
_NOT_RESTORED = "Restoring from checkpoint failed"  # message of TensorFlow


def cause(error: BaseException) -> str:
    """Returns the line of an error message that names the cause, without operations of graphs."""
    descriptors.check(error)  # raises a ResourceError if the process has none left
    text = str(getattr(error, "message", error)) or type(error).__name__
    match = re.search(r"^(.+)\n\s*\[\[", text, re.MULTILINE)
    return match[1] if match else text.partition("\n")[0]


def cannot_save(
    path: str, error: Exception, needed_bytes: int, last_checkpoint: str | None = None
) -> hostopt.CheckpointError:
    """Creates the error for a file, or for files with a common prefix, that cannot be written."""
    space = _free_space(os.path.dirname(path), f"{needed_bytes / _MB:.1f} MB are needed, ")
    return hostopt.CheckpointError(
        f"cannot save {path}: {cause(error)}{space}. {_remedy(path)}, and run the same command "
        "again to resume",
        last_checkpoint=last_checkpoint,
    )


def replace_file(path: str, parts: Sequence[bytes]) -> None:
    """Writes a file atomically; the old content stays until the new content is complete."""
    draft = f"{path}.tmp"
    try:
        with tf.io.gfile.GFile(draft, "wb") as file:
            for part in parts:
                file.write(part)
        tf.io.gfile.rename(draft, path, overwrite=True)
    except tf.errors.OpError as error:
        remove(draft)  # free the disk space
        raise cannot_save(path, error, sum(map(len, parts))) from error


def remove(path: str) -> None:
    """Removes a file; ignores errors."""
    with contextlib.suppress(tf.errors.OpError):
        tf.io.gfile.remove(path)


@contextlib.contextmanager
def translate_io_errors(directory: str | None) -> Iterator[None]:
    """Scope that raises the errors of `io_error`; directory is None on a rank without files."""
    try:
        yield
    except Exception as error:
        translated = None if directory is None else io_error(error, directory)
        if translated is None:
            raise
        raise translated from error


def io_error(error: BaseException, directory: str) -> hostopt.CheckpointError | None:
    """Translates an error of writing a file, or of restoring a checkpoint that does not fit.

    Returns None for all other errors, including those of hostopt.
    """
    if isinstance(error, hostopt.HostOptError):
        return None
    if _NOT_RESTORED in str(error):
        return hostopt.CheckpointError(
            f"a checkpoint in {directory} does not fit the model: {_original(error)}. "
            "Train the model that was saved, or give another model_dir"
        )
    for each in (error, error.__cause__):  # the session guard wraps errors
        if each and _is_of_writing(each) and _names_file_in(directory, cause(each)):
            return hostopt.CheckpointError(
                f"cannot write or read a file of {directory}: {cause(each)}"
                f"{_free_space(directory)}. {_remedy(directory)}, and run the same command again"
            )
    return None


def is_local(path: str) -> bool:
    """Returns True for a path of this machine, False for a URL such as ``s3://...``."""
    return "://" not in path


def absolute(path: str) -> str:
    """Returns an absolute path; a URL is one already."""
    return os.path.abspath(path) if is_local(path) else path


def _remedy(path: str) -> str:
    if is_local(path):
        return "Free disk space, or allow access to it"
    return "Check its quota and its permissions"


def _free_space(directory: str, needed: str = "") -> str:
    with contextlib.suppress(OSError):  # the directory is gone, or not a local path
        free_bytes = shutil.disk_usage(directory or ".").free
        return f" ({needed}{free_bytes / _MB:.1f} MB are free)"
    return ""


def _original(error: BaseException) -> str:
    """The first message of TensorFlow, without the guesses that it puts before it."""
    return cause(Exception(str(error).rpartition("Original error:")[2].strip()))


def _names_file_in(directory: str, text: str) -> bool:
    """True if a text has a path in a directory, whose name may also be a common word."""
    path = re.escape(directory.rstrip("/"))
    return re.search(rf"(?<![^\s\"'(=]){path}(?:[/;]| is not a directory)", text) is not None


def _is_of_writing(error: BaseException) -> bool:
    if isinstance(error, tf.errors.OpError):  # without an operation it is an error of a file
        of_reading = isinstance(error, (tf.errors.NotFoundError, tf.errors.DataLossError))
        return error.op is None and not of_reading
    return "Failed to flush" in str(error)  # of an events file, whatever its type
