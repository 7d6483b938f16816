"""The versions that a rank runs, as the ranks compare them when they meet."""

from __future__ import annotations

import sys

__all__: list[str] = []

VERSION = "0.1.0"
# What must be the same on all ranks; the other versions may differ.
MUST_BE_SAME = ("hostopt",)
MAY_DIFFER = ("python", "tensorflow")


def own_versions() -> dict[str, str | None]:
    """The versions of this process.

    Returns:
      By name: that of hostopt, major and minor of Python, and that of TensorFlow, None where this
      process has not imported it.
    """
    tensorflow = getattr(sys.modules.get("tensorflow"), "__version__", None)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"hostopt": VERSION, "python": python, "tensorflow": tensorflow}
