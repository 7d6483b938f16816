"""Versions: those that the ranks compare at the rendezvous, and those that remove a name."""

from __future__ import annotations

import importlib.metadata
import sys
import warnings

VERSION = "1.0.0rc1"
# Versions that must be the same on all ranks, and versions that may differ.
MUST_BE_SAME = ("hostopt",)
MAY_DIFFER = ("python", "tensorflow")


def local_versions() -> dict[str, str | None]:
    """Returns the versions of this process; None for TensorFlow if it is not imported."""
    tensorflow = getattr(sys.modules.get("tensorflow"), "__version__", None)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"hostopt": VERSION, "python": python, "tensorflow": tensorflow}


def has_keras_3() -> bool:
    """Returns True if `tf.keras` may be Keras 3: TensorFlow before 2.16 has Keras 2 only."""
    try:
        release = importlib.metadata.version("tensorflow").split(".")
    except importlib.metadata.PackageNotFoundError:  # or under another name
        return True
    return (int(release[0]), int(release[1])) >= (2, 16)


def warn_deprecated(name: str, instead: str, removed_in: str) -> None:
    """Warns the caller of a deprecated function, argument or option.

    Args:
      name: what is deprecated, as users write it.
      instead: what to write in its place.
      removed_in: version that will not have it. A test fails if that version still calls this.
    """
    message = f"{name} is deprecated, and hostopt {removed_in} will not have it. Use {instead}"
    warnings.warn(message, FutureWarning, stacklevel=3)
