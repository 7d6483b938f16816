"""HParams, as tf.contrib.training had it: named values that a command line may override."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

__all__: list[str] = []

# name=value, where commas within brackets belong to the value
_ASSIGNMENT = re.compile(r"\s*(\w+)\s*=\s*(\[[^\]]*\]|[^,\[\]]*)\s*(?:,|$)")


class HParams:
    """Hyperparameters as attributes.

    Args:
      **values: the hyperparameters with their defaults, whose types are those of later values.
    """

    def __init__(self, **values: Any) -> None:
        self._names: list[str] = []
        for name, value in values.items():
            self.add_hparam(name, value)

    def add_hparam(self, name: str, value: Any) -> None:
        """Adds a hyperparameter.

        Args:
          name: of an attribute that does not exist yet.
          value: its value.

        Raises:
          ValueError: there is such an attribute.
        """
        if hasattr(self, name):
            raise ValueError(f"Hyperparameter name is reserved: {name}")
        self._names.append(name)
        setattr(self, name, value)

    def set_hparam(self, name: str, value: Any) -> None:
        """Changes a hyperparameter.

        Args:
          name: of one that exists.
          value: of its type.

        Raises:
          ValueError: there is none of this name, or the value is of another type.
        """
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
        """All hyperparameters.

        Returns:
          Values by name.
        """
        return {name: getattr(self, name) for name in self._names}

    def get(self, name: str, default: Any = None) -> Any:
        """One hyperparameter.

        Args:
          name: of the hyperparameter.
          default: what to return if there is none of this name.

        Returns:
          Its value.
        """
        return getattr(self, name) if name in self._names else default

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def override_from_dict(self, values: Mapping[str, Any]) -> HParams:
        """Changes hyperparameters.

        Args:
          values: new values by name.

        Returns:
          This object.

        Raises:
          ValueError: as for `set_hparam`.
        """
        for name, value in values.items():
            self.set_hparam(name, value)
        return self

    def parse(self, text: str) -> HParams:
        """Changes hyperparameters.

        Args:
          text: such as "rate=0.1,layers=[64,32],name=adam".

        Returns:
          This object.

        Raises:
          ValueError: the text cannot be read, or as for `set_hparam`.
        """
        end = 0
        while end < len(text):
            found = _ASSIGNMENT.match(text, end)
            if found is None:
                raise ValueError(f"Could not parse hyperparameters at {text[end:]!r}")
            self.set_hparam(found[1], self._read(found[1], found[2].strip()))
            end = found.end()
        return self

    def _read(self, name: str, text: str) -> Any:
        """A value of text, of the type of the default."""
        default = getattr(self, name, None)
        if text.startswith("["):
            words = [word.strip() for word in text[1:-1].split(",")] if text[1:-1].strip() else []
            example = default[0] if isinstance(default, list) and default else None
            return [_value(word, example) for word in words]
        return _value(text, default)

    def to_json(self, **options: Any) -> str:
        """All hyperparameters as JSON.

        Args:
          **options: of `json.dumps`.

        Returns:
          The text.
        """
        return json.dumps(self.values(), **options)

    def parse_json(self, text: str) -> HParams:
        """Changes hyperparameters.

        Args:
          text: an object of JSON.

        Returns:
          This object.

        Raises:
          ValueError: as for `set_hparam`, or no JSON.
        """
        return self.override_from_dict(json.loads(text))


def _value(text: str, example: Any) -> Any:
    """What a word says, as the type of an example if there is one."""
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
