"""The options of a communicator, with their defaults, limits and environment variables."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hostopt.errors import ConfigError

__all__: list[str] = []

MIB = 1 << 20
MAX_SEGMENT_BYTES = 1 << 30
_BUCKET_ALIGNMENT_BYTES = 128
_NUMBERS = (
    "bucket_mb",
    "segment_bytes",
    "rendezvous_timeout_s",
    "stall_warning_s",
    "collective_timeout_s",
    "evaluator_timeout_s",
)
_CHOICES: dict[str, tuple[str | bool | None, ...]] = {
    "communication": ("auto", "grpc", "shm"),
    "compression": (None, "fp16", "bf16"),
    "checksum": (None, True, False),
    "nonfinite": ("error", "skip", "warn"),
    "insecure": (True, False),
    "restore_previous": (True, False),
}
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

    Args:
      bucket_mb: size of a gradient bucket in MiB; its bytes are a multiple of 128.
      segment_bytes: largest message on the wire; a chunk travels as several of them.
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
        for name in _NUMBERS:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ConfigError(f"option {name} is {value!r}, wanted a number above 0")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"option {name} is {getattr(self, name)!r}, wanted one of "
                    f"{', '.join(map(repr, choices))}"
                )
        if not isinstance(self.segment_bytes, int) or self.segment_bytes > MAX_SEGMENT_BYTES:
            raise ConfigError(
                f"option segment_bytes is {self.segment_bytes}, wanted a whole number up to "
                f"{MAX_SEGMENT_BYTES}"
            )
        steps = self.desync_check_steps
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise ConfigError(
                f"option desync_check_steps is {steps!r}, wanted a whole number from 0"
            )
        if self.bucket_mb * MIB % _BUCKET_ALIGNMENT_BYTES:
            raise ConfigError(
                f"option bucket_mb is {self.bucket_mb}, which is {self.bucket_mb * MIB:g} bytes: "
                f"wanted a multiple of {_BUCKET_ALIGNMENT_BYTES} bytes, such as "
                f"{max(round(self.bucket_mb * 8192), 1) / 8192}"
            )

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
            name = _variable(field.name)
            if name not in environ:
                continue
            if field.name not in (*_NUMBERS, "desync_check_steps"):
                found[field.name] = _WORDS.get(environ[name], environ[name])
                continue
            try:
                found[field.name] = _number(environ[name])
            except ValueError:
                raise ConfigError(f"{name} is {environ[name]!r}, wanted a number") from None
        return replace(self, **found)


def _number(text: str) -> float:
    return int(text) if text.strip().isdigit() else float(text)


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
