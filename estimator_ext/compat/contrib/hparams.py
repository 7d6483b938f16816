"""HParams of tf.contrib.training: hyperparameters that a command line can override."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

# name=value; commas in brackets belong to the value
_ASSIGNMENT = re.compile(r"\s*(\w+)\s*=\s*(\[[^\]]*\]|[^,\[\]]*)\s*(?:,|$)")


class HParams:
    """Hyperparameters as attributes. Later values must have the types of the first ones."""

    def __init__(self, **values: Any) -> None:
        self._names: list[str] = []
        for name, value in values.items():
            self.add_hparam(name, value)

    def add_hparam(self, name: str, value: Any) -> None:
        """Adds a hyperparameter."""
        if hasattr(self, name):
            raise ValueError(f"Hyperparameter name is reserved: {name}")
        self._names.append(name)
        setattr(self, name, value)

    def set_hparam(self, name: str, value: Any) -> None:
        """Sets a hyperparameter, to a value of the same type."""
        if name not in self._names:
            raise ValueError(f"Unknown hyperparameter: {name}")
        before = getattr(self, name)
        is_flag = isinstance(value, bool)
        if isinstance(before, float) and isinstance(value, int) and not is_flag:
            value = float(value)
        if before is not None and (
            not isinstance(value, type(before)) or is_flag != isinstance(before, bool)
        ):
            raise ValueError(f"{name} is {value!r}, wanted a {type(before).__name__}")
        setattr(self, name, value)

    def values(self) -> dict[str, Any]:
        """Returns all hyperparameters: values by name."""
        return {name: getattr(self, name) for name in self._names}

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a hyperparameter, or a default if it does not exist."""
        return getattr(self, name) if name in self._names else default

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def override_from_dict(self, values: Mapping[str, Any]) -> HParams:
        """Sets hyperparameters from a dict."""
        for name, value in values.items():
            self.set_hparam(name, value)
        return self

    def parse(self, text: str) -> HParams:
        """Sets hyperparameters from assignments, such as "rate=0.1,layers=[64,32],name=adam"."""
        end = 0
        while end < len(text):
            match = _ASSIGNMENT.match(text, end)
            if match is None:
                raise ValueError(f"Could not parse hyperparameters at {text[end:]!r}")
            self.set_hparam(match[1], self._parse_value(match[1], match[2].strip()))
            end = match.end()
        return self

    def _parse_value(self, name: str, text: str) -> Any:
        """Returns the value in a text, with the type of the current value."""
        default = getattr(self, name, None)
        if not text.startswith("["):
            return _value(text, default)
        example = default[0] if isinstance(default, list) and default else None
        words = text[1:-1].split(",") if text[1:-1].strip() else []
        return [_value(word.strip(), example) for word in words]

    def to_json(self, **options: Any) -> str:
        """Returns all hyperparameters as JSON."""
        return json.dumps(self.values(), **options)

    def parse_json(self, text: str) -> HParams:
        """Sets hyperparameters from JSON."""
        return self.override_from_dict(json.loads(text))


def _value(text: str, example: Any) -> Any:
    """Returns the value of a word, with the type of `example` if that is not None."""
    if isinstance(example, str):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_number and isinstance(example, float) else value
