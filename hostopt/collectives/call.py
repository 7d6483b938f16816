"""Identity of one collective call, and the array type that all algorithms use."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hostopt.transport.message import Tag
from hostopt.transport.signature import UNSIGNED, Signature

Array = np.ndarray[Any, Any]


class CollectiveCall(NamedTuple):
    """One collective call, the same on all ranks.

    Args:
      channel: channel of the communicator.
      step: sequence number of the call on that channel, from 0.
      bucket: index of the gradient bucket.
      signature: kind, name, dtype and shape, which the ranks compare.
    """

    channel: int
    step: int
    bucket: int = 0
    name: str = ""
    signature: Signature = UNSIGNED

    def in_phase(self, phase: str) -> str:
        """Describes a phase of the call, for warnings and errors."""
        return f"{self.name or 'data'} ({phase})"

    def tag(self, round_: int = 0, chunk: int = 0, segment: int = 0) -> Tag:
        """Tag of one message of the call."""
        checksum = self.signature.checksum
        return Tag(self.channel, self.step, self.bucket, round_, chunk, segment, checksum)
