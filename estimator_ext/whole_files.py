"""Files that all ranks of a program write: each takes its place as a whole.

A program that knows nothing of ranks writes the same file on each of them, and reads it back, as
BERT's do with their TFRecords. One rank would truncate what another one reads. So a file that is
written through TensorFlow has another name until it is closed; then it replaces what is there. If
it is flushed before, a copy of it does.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
from typing import Any

import tensorflow as tf
from tensorflow.python.lib.io import file_io
from tensorflow.python.lib.io.tf_record import TFRecordWriter

__all__: list[str] = []

_WHOLE_MODES = ("w", "wb")  # others keep what is there
_numbers = itertools.count()


class _Draft:
    """What is written of a file.

    Args:
      path: where it goes in the end.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        directory, name = os.path.split(path)
        # no other process or writer uses it, and no pattern matches it
        own = f".{name}.{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
        self.name = os.path.join(directory, own)

    def publish(self) -> None:
        """Puts it in its place."""
        tf.io.gfile.rename(self.name, self._path, overwrite=True)

    def publish_copy(self) -> None:
        """Puts what there is so far in its place."""
        copy = _Draft(self._path)
        tf.io.gfile.copy(self.name, copy.name)
        copy.publish()


def replace_as_a_whole() -> None:
    """Has `tf.io.gfile.GFile` and `tf.io.TFRecordWriter` replace a file when they are closed."""
    _replace_text_files(file_io.FileIO)
    _replace_records(TFRecordWriter)


def _draft(path: Any) -> _Draft | None:
    """A draft of a file; None for a device or the like, which cannot be replaced."""
    path = tf.compat.as_str(os.fspath(path))
    if "://" not in path:
        path = os.path.realpath(path)  # a link stays, and what it names is replaced
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
        if self.mode in _WHOLE_MODES and not self._writable_file:
            draft = _draft(self.name)
        if draft is not None:
            name = tf.compat.as_bytes(draft.name)
            self._writable_file = file_io._pywrap_file_io.WritableFile(name, b"w")
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
