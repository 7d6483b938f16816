"""Files that several ranks write as one process does.

A program for a single process writes the same file on each rank and reads it back, as BERT's
programs do with their TFRecords. One rank would truncate the file while another reads it. So a
file that is written through TensorFlow has a temporary name until it is closed, and then replaces
the existing file. If it is flushed earlier, a copy replaces the existing file. A file with several
names, or of another user, is overwritten instead: it stays the same file.

What ranks append to a file would be in it once per rank. So rank 0 alone appends to it, and each
other rank to a file of the same name in a directory of its own.

A directory that all ranks delete is gone for each of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import socket
import stat
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import FileIO, redirect_writes

_REPLACING_MODES = ("w", "wb")
_MAX_NAME_BYTES = 255  # of file systems
_MAX_DELETIONS = 100  # each of which another rank disturbs
_numbers = itertools.count()


class _Draft:
    """The temporary name of a file that is being written.

    `mode` has the permissions of the existing file; None if there is none. If `is_kept`, that
    file is overwritten, and not replaced.
    """

    def __init__(self, path: str, mode: int | None = None, is_kept: bool = False) -> None:
        self._path = path
        self._mode = mode
        self._is_kept = is_kept
        directory, name = os.path.split(path)
        # no other process or writer uses it, and no pattern matches it
        unique = f".{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
        begin = name.encode()[: _MAX_NAME_BYTES - len(unique) - 1].decode(errors="ignore")
        self.name = os.path.join(directory, f".{begin}{unique}")
        if mode is not None:  # nobody may read more of the draft than of the file
            os.close(os.open(self.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            os.chmod(self.name, mode)

    def publish(self) -> None:
        """Moves the file to its final name."""
        if self._is_kept:
            self.publish_copy()
            tf.io.gfile.remove(self.name)
        else:
            tf.io.gfile.rename(self.name, self._path, overwrite=True)

    def publish_copy(self) -> None:
        """Copies the current contents to the final name."""
        if self._is_kept:
            _overwrite(self._path, self.name)
        else:
            copy = _Draft(self._path, self._mode)
            tf.io.gfile.copy(self.name, copy.name, overwrite=True)
            copy.publish()


def write_atomically(rank: int = 0) -> None:
    """Makes `tf.io.gfile.GFile` and `tf.io.TFRecordWriter` write files as one process does.

    The ranks may also delete a directory at the same time.
    """
    _replace_text_files(rank)
    _replace_records()
    v1 = tf.compat.v1
    deletions = [(shutil, "rmtree"), (tf.io.gfile, "rmtree"), (v1.io.gfile, "rmtree")]
    for api, name in [*deletions, (v1.gfile, "DeleteRecursively")]:
        setattr(api, name, _deletes_together(getattr(api, name)))


def _deletes_together(delete: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(delete)
    def delete_all(path: Any, *arguments: Any, **options: Any) -> Any:
        for _ in range(_MAX_DELETIONS):
            try:
                return delete(path, *arguments, **options)
            except (FileNotFoundError, tf.errors.NotFoundError):  # another rank was first
                if not tf.io.gfile.exists(path):
                    return None
        return delete(path, *arguments, **options)

    return delete_all


def _draft(path: Any) -> _Draft | None:
    """Returns the draft of a file; None if the file itself is to be written.

    That is a device, a directory, a file that must not be written, and one in a directory that
    takes no other file.
    """
    path = tf.compat.as_str(os.fspath(path))
    if "://" in path:
        return _Draft(path)
    path = os.path.realpath(path)  # replaces the target of a symbolic link
    try:
        found = os.stat(path)
    except OSError:
        return _Draft(path)
    if not stat.S_ISREG(found.st_mode) or not os.access(path, os.W_OK):
        return None
    is_kept = found.st_nlink > 1 or found.st_uid != os.geteuid()
    with contextlib.suppress(OSError):
        return _Draft(path, stat.S_IMODE(found.st_mode), is_kept)
    return None


def _overwrite(path: str, source: str) -> None:
    """Copies a file over another one, so that ranks with the same contents never see a part."""
    with open(source, "rb") as new, open(path, "r+b") as file:
        shutil.copyfileobj(new, file)
        file.truncate()


def _path_of_rank(path: str | os.PathLike[str], rank: int) -> str:
    """Returns the file that a rank other than 0 appends to, in place of another one."""
    path = str(tf.compat.as_str(os.fspath(path)))
    if os.path.exists(path) and not os.path.isfile(path):  # a device, such as /dev/stderr
        return path
    directory, name = os.path.split(path)
    own = os.path.join(directory, f".rank-{rank}")
    with contextlib.suppress(tf.errors.AlreadyExistsError):
        tf.io.gfile.mkdir(own)
    return os.path.join(own, name)


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


def _replace_text_files(rank: int) -> None:
    def open_draft(file: FileIO, open_at: Callable[[str], None]) -> None:
        if file.mode in _REPLACING_MODES:
            draft = _draft(file.name)
            if draft is not None:
                open_at(draft.name)
                file._draft = draft
        elif rank > 0 and "a" in file.mode:
            open_at(_path_of_rank(file.name, rank))

    redirect_writes(open_draft)
    flush, close = FileIO.flush, FileIO.close
    FileIO.flush = functools.wraps(flush)(lambda self: _flush(self, flush))
    FileIO.close = functools.wraps(close)(lambda self: _close(self, close))
    FileIO.__del__ = FileIO.close


def _replace_records() -> None:
    kind = tf.io.TFRecordWriter
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
