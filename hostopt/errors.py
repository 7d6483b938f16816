"""Every error that hostopt raises, as one small tree.

::

    RuntimeError
    └── HostOptError                  exit code 70   a bug of ours, if nothing more precise fits
        ├── ConfigError               78   TF_CONFIG, resolver, options or address cannot be used
        ├── CollectiveMismatchError   65   ranks disagree on what they are going to reduce
        ├── ProtocolError             76   a frame that does not fit what was agreed
        ├── AuthError                 77   a peer that may not take part
        ├── CheckpointError           74   a checkpoint that cannot be written or read
        ├── NonFiniteGradientError    79   NaN or Inf in a gradient
        └── RetryableError           (none raised itself: run the same command again)
            ├── PeerLostError        200   a rank died, left or was aborted
            ├── CollectiveTimeoutError  201   a rank is there but makes no progress
            ├── RendezvousTimeoutError  202   a rank never came
            └── ResourceError        203   the process is out of file descriptors

Codes below 128 are permanent: the same command fails again. Codes from 193 on are worth a retry.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
from typing import Any, ClassVar

__all__: list[str] = []


class HostOptError(RuntimeError):
    """Base of all errors of hostopt.

    Args:
      message: what was found, what was wanted and what to do.
      rank: rank that the error is about (0..size-1), where there is one.
      task: task of that rank, such as ``worker:1``.
      address: ``host:port`` of that rank.
      step: number of the step that was under way, counted from 0; of a collective outside of
        training, its number.
      bucket: index of the gradient bucket that was under way.
      root_cause: what another rank reported as the first failure.
      last_checkpoint: path of the newest whole checkpoint.
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
        self.message = message  # as it travels to other ranks
        self.rank = rank
        self.task = task
        self.address = address
        self.step = step
        self.bucket = bucket
        self.root_cause = root_cause
        self.last_checkpoint = last_checkpoint

    def resume_from(self, checkpoint: str | None) -> None:
        """Say in the error's text where the training can go on.

        Args:
          checkpoint: path of the newest whole checkpoint; None where this rank knows of none.
        """
        self.last_checkpoint = checkpoint or self.last_checkpoint
        sentences = [self.message.rstrip(". \n")]
        if self.last_checkpoint is not None:
            step = re.search(r"-(\d+)$", self.last_checkpoint)
            where = f"step {step[1]}" if step else self.last_checkpoint
            sentences.append(f"Last whole checkpoint: {where}")
        if isinstance(self, RetryableError):
            sentences.append("Re-run the same command to resume")
        self.args = (". ".join(sentences) + ".",) if len(sentences) > 1 else (self.message,)


class ConfigError(HostOptError):
    """TF_CONFIG, a cluster resolver, an option or an address cannot be used."""

    exit_code = 78


class CollectiveMismatchError(HostOptError):
    """Two ranks disagree on names, shapes, dtypes or the operation to run."""

    exit_code = 65


class ProtocolError(HostOptError):
    """A frame arrived that does not fit what the ranks agreed on."""

    exit_code = 76


class AuthError(HostOptError):
    """A peer has no right to take part."""

    exit_code = 77


class CheckpointError(HostOptError):
    """A checkpoint cannot be written or read."""

    exit_code = 74


class NonFiniteGradientError(HostOptError):
    """A gradient holds NaN or Inf."""

    exit_code = 79


class RetryableError(HostOptError):
    """Base of the errors after which the same command may succeed."""


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
    """A process, or its machine, has no file descriptor left."""

    exit_code = 203


_FACTS = {
    "rank": int,
    "task": str,
    "address": str,
    "step": int,
    "bucket": int,
    "root_cause": str,
    "last_checkpoint": str,
}
_KINDS = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        CollectiveMismatchError,
        ProtocolError,
        AuthError,
        CheckpointError,
        NonFiniteGradientError,
        PeerLostError,
        CollectiveTimeoutError,
        RendezvousTimeoutError,
        ResourceError,
    )
}
# Of texts that travel, as JSON writes them: all of them fit into what a rank reads.
_MOST_MESSAGE_BYTES, _MOST_FACT_BYTES = 20_000, 6_000


def error_to_dict(error: HostOptError) -> dict[str, Any]:
    """Describe an error for another rank.

    Args:
      error: the error.

    Returns:
      Its kind, message and facts, as JSON can hold them; long texts lose their end.
    """
    facts = {name: getattr(error, name) for name in _FACTS}
    for name, fact in facts.items():
        if isinstance(fact, str):
            facts[name] = _cut(fact, _MOST_FACT_BYTES)
    message = _cut(error.message, _MOST_MESSAGE_BYTES)
    return {"kind": type(error).__name__, "message": message, "facts": facts}


def _cut(text: str, most_bytes: int) -> str:
    """The beginning of a text that JSON writes in so many bytes, up to 12 for a character."""
    text = text[:most_bytes]
    if len(json.dumps(text)) <= most_bytes:
        return text
    ends = list(itertools.accumulate(len(json.dumps(each)) - len('""') for each in text))
    return text[: bisect.bisect_right(ends, most_bytes)]


def error_from_dict(note: Any) -> HostOptError:
    """Rebuild the error that another rank described; an unknown kind is a HostOptError.

    Args:
      note: what `error_to_dict` returned there.

    Returns:
      An error of the same kind, message and facts, without those of another type.

    Raises:
      ValueError: it is no such note.
    """
    parts = note if isinstance(note, dict) else {}
    kind, message, facts = (parts.get(key) for key in ("kind", "message", "facts"))
    if not (isinstance(kind, str) and isinstance(message, str) and isinstance(facts, dict)):
        raise ValueError("an error has a kind, a message and facts")
    known: dict[str, Any] = {
        name: value if isinstance(value := facts.get(name), type_) else None
        for name, type_ in _FACTS.items()
    }
    return _KINDS.get(kind, HostOptError)(message, **known)
