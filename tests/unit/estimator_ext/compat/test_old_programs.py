"""What programs of older Python and NumPy, and of one process, expect."""

from __future__ import annotations

import collections
import inspect
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from estimator_ext.compat.atomic_files import _deletes_together
from estimator_ext.compat.compat import restore_python_names


def test_names_that_python_and_numpy_removed() -> None:
    restore_python_names()
    old: Any = inspect
    spec = old.getargspec(lambda a, b=2, *c, **d: None)
    assert tuple(spec) == (["a", "b"], "c", "d", (2,))
    assert vars(np)["int"] is int
    assert isinstance({}, vars(collections)["Mapping"])


def test_a_directory_that_another_rank_deletes_is_gone(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    (directory / "eval").mkdir(parents=True)
    others = iter([directory / "eval"])

    def delete(path: Path) -> None:
        """Fails after the other rank has deleted a part of it."""
        for part in others:
            part.rmdir()
            raise tf.errors.NotFoundError(None, None, f"{part}; No such file or directory")
        path.rmdir()

    _deletes_together(delete)(directory)
    assert not directory.exists()
    _deletes_together(shutil.rmtree)(directory)  # the other rank has deleted all of it
