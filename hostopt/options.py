"""The options of a communicator, with their defaults, limits and environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import Any, NamedTuple

from hostopt.errors import ConfigError

__all__: list[str] = []

MIB = 1 << 20
MAX_SEGMENT_BYTES = 1 << 30
# What clocks and conditions of Python, and timers of gRPC, count with ease.
MIN_TIMEOUT_S, YEAR_S = 0.001, 365.0 * 24 * 3600
# TensorFlow counts micro-batches, examples and loops in int32.
MAX_COUNT = (1 << 31) - 1
_BUCKET_ALIGNMENT_BYTES = 128
_SHOWN_CHARACTERS = 200


class _Range(NamedTuple):
    """Numbers that an option may have, both ends included."""

    least: float
    most: float
    whole: bool = False

    def __contains__(self, value: Any) -> bool:
        kinds = (int,) if self.whole else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        return self.least <= value <= self.most

    def __str__(self) -> str:
        kind = "whole number" if self.whole else "number"
        return f"a {kind} from {self.least:.10g} to {self.most:.10g}"


_SECONDS = _Range(MIN_TIMEOUT_S, YEAR_S)
_NUMBERS = {
    "bucket_mb": _Range(_BUCKET_ALIGNMENT_BYTES / MIB, MIB),
    "segment_bytes": _Range(1, MAX_SEGMENT_BYTES, whole=True),
    "rendezvous_timeout_s": _SECONDS,
    "stall_warning_s": _SECONDS,
    "collective_timeout_s": _SECONDS,
    "evaluator_timeout_s": _SECONDS,
    "desync_check_steps": _Range(0, MAX_COUNT, whole=True),
}
_CHOICES: dict[str, tuple[str | bool | None, ...]] = {
    "communication": ("auto", "grpc", "shm"),
    "compression": (None, "fp16", "bf16"),
    "checksum": (None, True, False),
    "nonfinite": ("error", "skip", "warn"),
    "insecure": (True, False),
    "restore_previous": (True, False),
}
_PATHS = ("timeline", "debug_dir", "token_file", "tls_dir")
# How the environment writes values that are no text.
_WORDS: dict[str, bool | None] = {
    "": None,
    "none": None,
    "true": True,
    "1": True,
    "false": False,
    "0": False,
}


@dataclass(frozen=True)
class Options:
    """How ranks meet, wait and cut their messages.

    Times are 0.001 s to 365 days. A path is a `str` or an `os.PathLike`, which becomes one.

    Args:
      bucket_mb: size of a gradient bucket in MiB, up to 1 TiB; its bytes are a multiple of 128.
      segment_bytes: largest message on the wire, up to 1 GiB; a chunk travels as several of them.
      rendezvous_timeout_s: how long to wait for all ranks to appear.
      stall_warning_s: a rank that waits longer says for whom; repeated at doubled times.
      collective_timeout_s: a rank that waits longer without any progress gives up.
      communication: "auto" reduces in shared memory among ranks of one host and over gRPC between
        hosts; "grpc" uses gRPC alone; "shm" is an error where a host's ranks cannot share memory.
      compression: "fp16" or "bf16" halves float32 gradients on the wire; None sends them whole.
      timeline: file for a Chrome trace, one for each rank; None records nothing.
      checksum: True has a checksum of its data travel with each message, False of its header
        alone; None is True where a peer is reached over a network without TLS, and False over TLS
        or where all addresses are loopback ones.
      nonfinite: what happens where a reduced gradient holds NaN or Inf. "error" ends the training,
        "skip" leaves the step's update out on all ranks, "warn" says so and goes on.
      desync_check_steps: every so many steps the ranks compare their variables; 0 for never.
      debug_dir: directory for the stacks and the last events of a rank whose ring was aborted;
        None keeps nothing.
      token_file: file that holds the token which all ranks share, readable by its owner alone; the
        variable HOSTOPT_TOKEN may hold the token itself instead.
      tls_dir: directory with ca.pem, cert.pem and key.pem, for mutual TLS between the ranks.
      insecure: True lets ranks on several machines meet without token and TLS.
      restore_previous: True has a training go on from the newest checkpoint that can be read,
        where the newest of all cannot.
      evaluator_timeout_s: an evaluator that sees nothing of the chief for longer gives up.

    Raises:
      ConfigError: an option may not have its value.
    """

    bucket_mb: float = 25.0
    segment_bytes: int = 2 * MIB
    rendezvous_timeout_s: float = 300.0
    stall_warning_s: float = 30.0
    collective_timeout_s: float = 300.0
    communication: str = "auto"
    compression: str | None = None
    timeline: str | None = None
    checksum: bool | None = None
    nonfinite: str = "error"
    desync_check_steps: int = 1000
    debug_dir: str | None = None
    token_file: str | None = None
    tls_dir: str | None = None
    insecure: bool = False
    restore_previous: bool = False
    evaluator_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in _PATHS:
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        for field in fields(self):
            _check(f"option {field.name}", field.name, getattr(self, field.name))

    @property
    def bucket_bytes(self) -> int:
        """Size of a gradient bucket in bytes."""
        return int(self.bucket_mb * MIB)

    def with_environment(self, environ: Mapping[str, str] | None = None) -> Options:
        """Let HOSTOPT_<OPTION> variables, such as HOSTOPT_BUCKET_MB, override these options.

        Args:
          environ: where to look the variables up; `os.environ` by default.

        Returns:
          The options that hold.

        Raises:
          ConfigError: a variable holds no number where one is wanted, or a value out of range.
        """
        environ = os.environ if environ is None else environ
        found: dict[str, Any] = {}
        for field in fields(self):
            variable = _variable(field.name)
            if variable in environ:
                found[field.name] = _value_of(field.name, environ[variable])
                _check(variable, field.name, found[field.name])
        return replace(self, **found)


def shown(value: object) -> str:
    """A value as an error shows it, whatever it is.

    Args:
      value: given by the user.

    Returns:
      Its `repr`, up to 200 characters; its type, if it has none, as integers of many digits.
    """
    try:
        text = repr(value)
    except Exception:
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _value_of(name: str, text: str) -> Any:
    """What a variable of the environment says; the text itself if that is no value."""
    if name in _NUMBERS:
        try:
            return int(text) if text.strip().isdigit() else float(text)
        except ValueError:
            return text
    if name in _PATHS:  # a file may be called "true"
        return None if text in ("", "none") else text
    return _WORDS.get(text, text)


def _check(label: str, name: str, value: Any) -> None:
    """Make sure that an option may have a value.

    Args:
      label: what the user calls it: the option, or its variable.
      name: field of `Options`.
      value: given by the user.

    Raises:
      ConfigError: it may not.
    """
    wanted = _wanted(name, value)
    if wanted is not None:
        default = getattr(Options, name)
        raise ConfigError(
            f"{label} is {shown(value)}, wanted {wanted}. Correct it, or leave it out for the "
            f"default, {default!r}"
        )


def _wanted(name: str, value: Any) -> str | None:
    """What an option wants instead of a value; None if it takes it."""
    if name in _NUMBERS:
        if value not in _NUMBERS[name]:
            return str(_NUMBERS[name])
        return _wanted_bucket(value) if name == "bucket_mb" else None
    if name in _CHOICES:
        plain = value is None or isinstance(value, (bool, str))  # 1 == True
        choices = ", ".join(map(repr, _CHOICES[name]))
        return None if plain and value in _CHOICES[name] else f"one of {choices}"
    if value is None or _is_path(value):
        no_file = name == "timeline" and value is not None and not PurePath(value).name
        return "the name of a file" if no_file else None
    return "None or a path"


def _wanted_bucket(bucket_mb: float) -> str | None:
    nbytes = bucket_mb * MIB
    if nbytes % _BUCKET_ALIGNMENT_BYTES == 0:
        return None
    whole_mb = max(round(nbytes / _BUCKET_ALIGNMENT_BYTES), 1) * _BUCKET_ALIGNMENT_BYTES / MIB
    return f"a multiple of {_BUCKET_ALIGNMENT_BYTES} bytes, such as {whole_mb!r}"


def _is_path(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return 0 not in os.fsencode(value) and value != ""
    except UnicodeEncodeError:
        return False


def _variable(name: str) -> str:
    return f"HOSTOPT_{name.upper()}"


# `hostopt run` names a file to evaluators, which is there once all ranks have succeeded.
RING_ENDED = "HOSTOPT_RING_ENDED"
# All of ours in the environment: one for each option, the token, and what `hostopt run` sets.
VARIABLES = (
    *(_variable(field.name) for field in fields(Options)),
    "HOSTOPT_TOKEN",
    "HOSTOPT_SLOT",
    "HOSTOPT_ERROR_FILE",
    RING_ENDED,
)
