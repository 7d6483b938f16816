"""Settings that programs get as arguments."""

from __future__ import annotations

import json
import sys
from typing import Any


def chosen() -> dict[str, Any]:
    """Returns the JSON objects of all arguments as one; later ones override."""
    return {name: value for text in sys.argv[1:] for name, value in json.loads(text).items()}
