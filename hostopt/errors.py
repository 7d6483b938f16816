"""All errors that hostopt raises.

::

    RuntimeError
    └── HostOptError                  exit code 70   base class; itself only for internal errors
        ├── ConfigError               78   TF_CONFIG, resolver, options or address cannot be used
        ├── CollectiveMismatchError   65   ranks call different collectives
        ├── ProtocolError             76   a message that violates the protocol
        ├── AuthError                 77   a peer is not authorized
        ├── CheckpointError           74   a checkpoint cannot be written or read
        ├── NonFiniteGradientError    79   NaN or Inf in a gradient
        └── RetryableError           (none) base class of errors after which a retry may succeed
            ├── PeerLostError        200   a rank died, left or was aborted
            ├── CollectiveTimeoutError  201   a rank is connected but makes no progress
            ├── RendezvousTimeoutError  202   a rank did not start in time
            └── ResourceError        203   no file descriptor, or no room in a cluster, is left

After exit codes below 128 the same command fails again. After codes from 193 on, retry it.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
from typing import Any, ClassVar


class HostOptError(RuntimeError):
    """Base class of all errors of hostopt.

    Every collective raises one if a rank failed, left or timed out.

    Args:
      message: what happened, and what to do.
      rank: rank that the error is about (0..size-1), if there is one.
      task: task of that rank, such as ``worker:1``.
      address: ``host:port`` of that rank.
      step: number of the current step, from 0; outside of training, number of the collective.
      bucket: index of the current gradient bucket.
      root_cause: first failure, as another rank reported it.
      last_checkpoint: path of the newest intact checkpoint.
    """

    exit_code: ClassVar[int] = 70

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        task: str | None = None,
        address: str | None = None,
        step: int | None = None,
        bucket: int | None = None,
        root_cause: str | None = None,
        last_checkpoint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message  # as sent to other ranks
        self.rank = rank
        self.task = task
        self.address = address
        self.step = step
        self.bucket = bucket
        self.root_cause = root_cause
        self.last_checkpoint = last_checkpoint

    def resume_from(self, checkpoint: str | None) -> None:
        """Adds the checkpoint to resume from to the error's text.

        Args:
          checkpoint: path of the newest intact checkpoint; None if this rank knows none.
        """
        self.last_checkpoint = checkpoint or self.last_checkpoint
        sentences = [self.message.rstrip(". \n")]
        if self.last_checkpoint is not None:
            step = re.search(r"-(\d+)$", self.last_checkpoint)
            name = f"step {step[1]}" if step else self.last_checkpoint
            sentences.append(f"Newest intact checkpoint: {name}")
        if isinstance(self, RetryableError):
            sentences.append("Re-run the same command to resume")
        self.args = (". ".join(sentences) + ".",) if len(sentences) > 1 else (self.message,)


class ConfigError(HostOptError):
    """TF_CONFIG, a cluster resolver, an option or an address cannot be used."""

    exit_code = 78


class CollectiveMismatchError(HostOptError):
    """Ranks call collectives of different names, shapes, dtypes or kinds."""

    exit_code = 65


class ProtocolError(HostOptError):
    """A message violates the protocol."""

    exit_code = 76


class AuthError(HostOptError):
    """A peer is not authorized to join the ring."""

    exit_code = 77


class CheckpointError(HostOptError):
    """A checkpoint cannot be written or read."""

    exit_code = 74


class NonFiniteGradientError(HostOptError):
    """A gradient holds NaN or Inf."""

    exit_code = 79


class RetryableError(HostOptError):
    """Base class of errors after which the same command may succeed."""


class PeerLostError(RetryableError):
    """A rank died, left the ring or was aborted."""

    exit_code = 200


class CollectiveTimeoutError(RetryableError):
    """A rank is connected but made no progress before the deadline."""

    exit_code = 201


class RendezvousTimeoutError(RetryableError):
    """A rank did not appear before the deadline."""

    exit_code = 202


class ResourceError(RetryableError):
    """The process or its machine has no file descriptor left, or its cluster has no room."""

    exit_code = 203


_ATTRIBUTE_TYPES = {
    "rank": int,
    "task": str,
    "address": str,
    "step": int,
    "bucket": int,
    "root_cause": str,
    "last_checkpoint": str,
}
CLASSES = {  # all that end a process, by name
    kind.__name__: kind
    for kind in (*HostOptError.__subclasses__(), *RetryableError.__subclasses__())
    if kind is not RetryableError
}
# Sizes of texts as JSON. An error of this size is below the limit of a message to a rank.
_MAX_MESSAGE_BYTES, _MAX_ATTRIBUTE_BYTES = 20_000, 6_000


def error_to_dict(error: HostOptError) -> dict[str, Any]:
    """Converts an error to JSON values for another rank; long texts are truncated."""
    attributes = {name: getattr(error, name) for name in _ATTRIBUTE_TYPES}
    for name, value in attributes.items():
        if isinstance(value, str):
            attributes[name] = cut(value, _MAX_ATTRIBUTE_BYTES)
    message = cut(error.message, _MAX_MESSAGE_BYTES)
    return {"kind": type(error).__name__, "message": message, "facts": attributes}


def cut(text: str, max_bytes: int) -> str:
    """Truncates a text to a number of bytes as JSON, which takes up to 12 per character."""
    text = text[:max_bytes]
    if len(json.dumps(text)) <= max_bytes:
        return text
    ends = list(itertools.accumulate(len(json.dumps(each)) - len('""') for each in text))
    return text[: bisect.bisect_right(ends, max_bytes)]


def error_from_dict(value: Any) -> HostOptError:
    """Converts the result of `error_to_dict` on another rank back to an error of the same class.

    An unknown class becomes HostOptError, and attributes of a wrong type become None. Raises
    ValueError if the value has no class name, message or attributes.
    """
    parts = value if isinstance(value, dict) else {}
    kind, message, attributes = (parts.get(key) for key in ("kind", "message", "facts"))
    if not (isinstance(kind, str) and isinstance(message, str) and isinstance(attributes, dict)):
        raise ValueError("not an error: kind, message or facts are missing")
    known: dict[str, Any] = {
        name: attribute if isinstance(attribute := attributes.get(name), type_) else None
        for name, type_ in _ATTRIBUTE_TYPES.items()
    }
    return CLASSES.get(kind, HostOptError)(message, **known)
