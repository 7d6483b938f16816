"""Atomic replacement of files that several ranks write.

A program for a single process writes the same file on each rank and reads it back, as BERT's
programs do with their TFRecords. One rank would truncate the file while another reads it. So a
file that is written through TensorFlow has a temporary name until it is closed, and then replaces
the existing file. If it is flushed earlier, a copy replaces the existing file.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import FileIO, WritableFile

__all__: list[str] = []

_REPLACING_MODES = ("w", "wb")  # other modes keep the contents
_numbers = itertools.count()


class _Draft:
    """The temporary name of a file that is being written.

    Args:
      path: final name.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        directory, name = os.path.split(path)
        # no other process or writer uses it, and no pattern matches it
        unique = f".{name}.{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
        self.name = os.path.join(directory, unique)

    def publish(self) -> None:
        """Moves the file to its final name."""
        tf.io.gfile.rename(self.name, self._path, overwrite=True)

    def publish_copy(self) -> None:
        """Copies the current contents to the final name."""
        copy = _Draft(self._path)
        tf.io.gfile.copy(self.name, copy.name)
        copy.publish()


def write_atomically() -> None:
    """Makes `tf.io.gfile.GFile` and `tf.io.TFRecordWriter` replace a file when they are closed."""
    _replace_text_files(FileIO)
    _replace_records(tf.io.TFRecordWriter)


def _draft(path: Any) -> _Draft | None:
    """Returns the draft of a file, or None for a device or directory, which are not replaced."""
    path = tf.compat.as_str(os.fspath(path))
    if "://" not in path:
        path = os.path.realpath(path)  # replaces the target of a symbolic link
        if os.path.exists(path) and not os.path.isfile(path):
            return None
    return _Draft(path)


def _close(file: Any, close: Any) -> None:
    draft = file.__dict__.pop("_draft", None)
    close(file)
    if draft is not None:
        draft.publish()


def _flush(file: Any, flush: Any) -> None:
    flush(file)
    draft = file.__dict__.get("_draft")
    if draft is not None:
        draft.publish_copy()


def _replace_text_files(kind: Any) -> None:
    open_to_write, flush, close = kind._prewrite_check, kind.flush, kind.close

    @functools.wraps(open_to_write)
    def open_draft(self: Any) -> None:
        draft = None
        if self.mode in _REPLACING_MODES and not self._writable_file:
            draft = _draft(self.name)
        if draft is not None:
            name = tf.compat.as_bytes(draft.name)
            self._writable_file = WritableFile(name, b"w")
            self._draft = draft
        open_to_write(self)

    kind._prewrite_check = open_draft
    kind.flush = functools.wraps(flush)(lambda self: _flush(self, flush))
    kind.close = functools.wraps(close)(lambda self: _close(self, close))
    kind.__del__ = kind.close


def _replace_records(kind: Any) -> None:
    init, flush, close = kind.__init__, kind.flush, kind.close

    @functools.wraps(init)
    def open_draft(self: Any, path: Any, options: Any = None) -> None:
        draft = _draft(path)
        init(self, path if draft is None else draft.name, options)
        self._draft = draft

    def close_once(self: Any, *_: Any) -> None:
        if "_draft" in self.__dict__:
            _close(self, close)

    kind.__init__ = open_draft
    kind.flush = functools.wraps(flush)(lambda self: _flush(self, flush))
    kind.close = functools.wraps(close)(close_once)
    kind.__exit__ = kind.__del__ = close_once
