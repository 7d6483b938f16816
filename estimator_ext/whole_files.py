"""Files that all ranks of a program write: each takes its place as a whole.

A program that knows nothing of ranks writes the same file on each of them, and reads it back, as
BERT's do with their TFRecords. One rank would truncate what another one reads. So a file that is
written through TensorFlow has another name until it is closed; then it replaces what is there.
"""

from __future__ import annotations

import functools
import os
import socket
from typing import Any

import tensorflow as tf
from tensorflow.python.lib.io import file_io
from tensorflow.python.lib.io.tf_record import TFRecordWriter

__all__: list[str] = []

_WHOLE_MODES = ("w", "wb")  # others keep what is there


def replace_as_a_whole() -> None:
    """Has `tf.io.gfile.GFile` and `tf.io.TFRecordWriter` replace a file when they are closed."""
    _replace_text_files(file_io.FileIO)
    _replace_records(TFRecordWriter)


def _own_name(path: Any) -> str:
    """A name in the same directory that no other process uses, and that no pattern matches."""
    directory, name = os.path.split(tf.compat.as_str(os.fspath(path)))
    return os.path.join(directory, f".{name}.{socket.gethostname()}-{os.getpid()}")


def _publish(file: Any) -> None:
    """Puts what was written in its place, once."""
    path = file.__dict__.pop("_path_of_whole", None)
    if path is not None:
        tf.io.gfile.rename(_own_name(path), path, overwrite=True)


def _replace_text_files(kind: Any) -> None:
    open_to_write, close = kind._prewrite_check, kind.close

    @functools.wraps(open_to_write)
    def open_own(self: Any) -> None:
        if self.mode in _WHOLE_MODES and not self._writable_file:
            own = tf.compat.as_bytes(_own_name(self.name))
            self._writable_file = file_io._pywrap_file_io.WritableFile(own, b"w")
            self._path_of_whole = self.name
        open_to_write(self)

    @functools.wraps(close)
    def close_and_publish(self: Any) -> None:
        close(self)
        _publish(self)

    kind._prewrite_check, kind.close = open_own, close_and_publish
    kind.__del__ = close_and_publish


def _replace_records(kind: Any) -> None:
    init, close = kind.__init__, kind.close

    @functools.wraps(init)
    def open_own(self: Any, path: Any, options: Any = None) -> None:
        init(self, _own_name(path), options)
        self._path_of_whole = path

    @functools.wraps(close)
    def close_and_publish(self: Any, *_: Any) -> None:
        if "_path_of_whole" in self.__dict__:
            close(self)
            _publish(self)

    kind.__init__, kind.close = open_own, close_and_publish
    kind.__exit__ = kind.__del__ = close_and_publish
