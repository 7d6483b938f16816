"""Options of a communicator, with their defaults, limits and environment variables."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import PurePath
from typing import Any

from hostopt.errors import ConfigError

PREFIX = "HOSTOPT_"
MIB = 1 << 20
MAX_SEGMENT_BYTES = 1 << 30
MAX_STREAMS = 16
# Range that the clocks and conditions of Python and the timers of gRPC support.
MIN_TIMEOUT_S, YEAR_S = 0.001, 365.0 * 24 * 3600
# TensorFlow counts micro-batches, examples and loops in int32.
MAX_COUNT = (1 << 31) - 1
WIRE_FORMATS = ("fp16", "bf16")  # built by `collectives.wire_format`
_ALIGNMENT_BYTES = 128
_SHOWN_CHARACTERS = 200
_ALIKE = 0.8  # similarity of a name with a misspelt one


@dataclass(frozen=True)
class Number:
    """Numbers of a closed range; `step_bytes` divides a size in MiB."""

    least: float
    most: float
    whole: bool = False
    step_bytes: int = 0

    def wanted(self, value: Any) -> str | None:
        """Describes the allowed values; returns None if `value` is allowed."""
        kinds = (int,) if self.whole else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_number or not self.least <= value <= self.most:
            kind = "whole number" if self.whole else "number"
            return f"a {kind} from {self.least:.10g} to {self.most:.10g}"
        nbytes = value * MIB
        if not self.step_bytes or nbytes % self.step_bytes == 0:
            return None
        whole_mb = max(round(nbytes / self.step_bytes), 1) * self.step_bytes / MIB
        return f"a multiple of {self.step_bytes} bytes, such as {whole_mb!r}"


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple[str | bool | None, ...]

    def wanted(self, value: Any) -> str | None:
        """Describes the allowed values; returns None if `value` is allowed."""
        plain = value is None or isinstance(value, (bool, str))  # 1 == True
        if plain and value in self.values:
            return None
        return f"one of {', '.join(map(repr, self.values))}"


@dataclass(frozen=True)
class _Path:
    """None, or a path."""

    names_file: bool = False

    def wanted(self, value: Any) -> str | None:
        """Describes the allowed values; returns None if `value` is allowed."""
        if value is not None and not _is_path(value):
            return "None or a path"
        no_file = self.names_file and value is not None and not PurePath(value).name
        return "the name of a file" if no_file else None


@dataclass(frozen=True)
class _Names:
    """None, or names separated by commas."""

    most: int

    def wanted(self, value: Any) -> str | None:
        """Describes the allowed values; returns None if `value` is allowed."""
        names = value.split(",") if isinstance(value, str) else []
        if value is None or (0 < len(names) <= self.most and all(map(_is_name, names))):
            return None
        return f"None or up to {self.most} names separated by commas, such as 'eth1,eth2'"


_SECONDS = Number(MIN_TIMEOUT_S, YEAR_S)
_SWITCH = Choice((True, False))


def option(default: Any, allowed: Number | Choice | _Names | _Path, *, same: bool = False) -> Any:
    """Returns the field of an option, whose values `check_option` allows.

    Args:
      same: True if all ranks must have the same value; they compare it when they connect.
    """
    return field(default=default, metadata={"allowed": allowed, "same": same})


# Values of environment variables that stand for None and bool.
_VALUES: dict[str, bool | None] = {
    "": None,
    "none": None,
    "true": True,
    "1": True,
    "false": False,
    "0": False,
}


@dataclass(frozen=True)
class Options:
    """Options of a communicator.

    The page "Options" of the documentation describes them, with their limits and units.

    Raises:
      ConfigError: the value of an option is not allowed.
    """

    bucket_mb: float = option(25.0, Number(_ALIGNMENT_BYTES / MIB, MIB, False, _ALIGNMENT_BYTES))
    segment_bytes: int = option(0, Number(0, MAX_SEGMENT_BYTES, whole=True), same=True)
    streams: int = option(0, Number(0, MAX_STREAMS, whole=True))
    rendezvous_timeout_s: float = option(300.0, _SECONDS)
    stall_warning_s: float = option(30.0, _SECONDS)
    collective_timeout_s: float = option(300.0, _SECONDS)
    communication: str = option(
        "auto", Choice(("auto", "grpc+tcp", "grpc", "shm", "mpi")), same=True
    )
    compression: str | None = option(None, Choice((None, *WIRE_FORMATS)), same=True)
    timeline: str | os.PathLike[str] | None = option(None, _Path(names_file=True))
    checksum: bool | None = option(None, Choice((None, True, False)))
    nonfinite: str = option("error", Choice(("error", "skip", "warn")), same=True)
    desync_check_steps: int = option(1000, Number(0, MAX_COUNT, whole=True), same=True)
    debug_dir: str | os.PathLike[str] | None = option(None, _Path())
    token_file: str | os.PathLike[str] | None = option(None, _Path())
    tls_dir: str | os.PathLike[str] | None = option(None, _Path())
    insecure: bool = option(False, _SWITCH)
    restore_previous: bool = option(False, _SWITCH)
    evaluator_timeout_s: float = option(3600.0, _SECONDS)
    autotune: bool = option(False, _SWITCH, same=True)
    shard_optimizer: bool | None = option(None, Choice((None, True, False)), same=True)
    interfaces: str | None = option(None, _Names(MAX_STREAMS))

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(each.metadata["allowed"], _Path) and isinstance(value, os.PathLike):
                value = os.fspath(value)
                object.__setattr__(self, each.name, value)
            check_option(f"option {each.name}", each, value)

    @property
    def bucket_bytes(self) -> int:
        """Size of a gradient bucket in bytes."""
        return int(self.bucket_mb * MIB)

    @property
    def uses_data_sockets(self) -> bool:
        """True if data between hosts may travel on data sockets."""
        return self.communication in ("auto", "grpc+tcp")

    def same_on_all_ranks(self) -> dict[str, Any]:
        """Returns the options that all ranks must have in common, by name."""
        return {
            each.name: getattr(self, each.name) for each in fields(self) if each.metadata["same"]
        }

    def with_environment(self, environ: Mapping[str, str] | None = None) -> Options:
        """Overrides options by environment variables, such as HOSTOPT_BUCKET_MB.

        Args:
          environ: environment variables by name; `os.environ` by default.

        Returns:
          The new options.

        Raises:
          ConfigError: the value of a variable is not allowed, or its name is misspelt.
        """
        environ = os.environ if environ is None else environ
        _check_names(environ)
        values: dict[str, Any] = {}
        for each in fields(self):
            variable = _variable(each.name)
            if variable in environ:
                values[each.name] = _value_of(each, environ[variable])
                check_option(variable, each, values[each.name])
        return replace(self, **values)


def shown(value: object) -> str:
    """Returns a user's value for an error: its `repr`, cut; or its type, if that fails."""
    try:
        text = repr(value)
    except Exception:
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _value_of(entry: Field[Any], text: str) -> Any:
    """Converts the text of a variable; returns the text itself if it cannot be converted."""
    allowed = entry.metadata["allowed"]
    if isinstance(allowed, Number):
        try:
            return int(text) if text.strip().isdigit() else float(text)
        except ValueError:
            return text
    if isinstance(allowed, _Path):  # a file may be called "true"
        return None if text in ("", "none") else text
    return _VALUES.get(text, text)


def check_option(label: str, entry: Field[Any], value: Any) -> None:
    """Raises ConfigError if the value of an option is not allowed."""
    wanted = entry.metadata["allowed"].wanted(value)
    if wanted is not None:
        raise ConfigError(
            f"{label} is {shown(value)}, wanted {wanted}. Correct it, or leave it out for the "
            f"default, {entry.default!r}"
        )


def _is_name(text: str) -> bool:
    return text.isprintable() and text.split() == [text]


def _is_path(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return 0 not in os.fsencode(value) and value != ""
    except UnicodeEncodeError:
        return False


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def _check_names(environ: Mapping[str, str]) -> None:
    known = [variable[len(PREFIX) :] for variable in VARIABLES]
    for variable in sorted(environ):
        name = variable[len(PREFIX) :]
        if variable.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, 1, cutoff=_ALIKE)
            if near:
                raise ConfigError(
                    f"hostopt does not read {variable}: did you mean {PREFIX}{near[0]}? Correct "
                    "the name, or unset it"
                )


# Set by `hostopt run` for evaluators and data workers: file that exists once all ranks have
# succeeded.
RING_ENDED = "HOSTOPT_RING_ENDED"
# Set by `hostopt run` for data workers: directory that outlives their restarts.
DATA_DIR = "HOSTOPT_DATA_DIR"
# Read by the adapters of launchers.
RANK, SIZE, RENDEZVOUS = "HOSTOPT_RANK", "HOSTOPT_SIZE", "HOSTOPT_RENDEZVOUS"
LAUNCHER = "HOSTOPT_LAUNCHER"
# Set by the adapters: the process that the launcher has started, as it may start others.
PROCESS = "HOSTOPT_PROCESS"
# All HOSTOPT_* variables: one for each option, the token, and those of launchers.
VARIABLES = (
    *(_variable(each.name) for each in fields(Options)),
    "HOSTOPT_TOKEN",
    "HOSTOPT_SLOT",
    "HOSTOPT_ERROR_FILE",
    "HOSTOPT_PROGRESS_FILE",
    RING_ENDED,
    DATA_DIR,
    RANK,
    SIZE,
    RENDEZVOUS,
    LAUNCHER,
    PROCESS,
)
