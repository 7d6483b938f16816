"""Versions of the software of a rank, which the ranks compare at the rendezvous."""

from __future__ import annotations

import importlib.metadata
import sys

VERSION = "0.1.0"
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
